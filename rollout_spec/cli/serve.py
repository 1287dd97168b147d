"""Serve a model over HTTP: the endpoints of SGLang that RL trainers use, and OpenAI's.

    rollout-spec serve --model FOLDER_OR_GGUF --weights-dir checkpoints

It listens on 127.0.0.1:30000; a status page is at http://127.0.0.1:30000/. Weights are loaded from below the folders
given with --weights-dir alone. Beyond loopback a key is needed (--api-key-file). See docs/server.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import ConfigError, MissingExtraError

HELP = "serve a model over HTTP (SGLang's and OpenAI's endpoints)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, metavar="PATH", help="a folder, or a .gguf file")
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="for OpenAI's clients; the path's last part"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=30000, help="(30000)")
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="its first line is the key to ask for"
    )
    parser.add_argument(
        "--weights-dir",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="weights may be loaded from below it; may be given more than once",
    )
    parser.add_argument("--max-seqs", type=int, default=16, metavar="N", help="completions at once (16)")
    parser.add_argument("--max-seq-len", type=int, metavar="N", help="tokens of prompt and completion")
    parser.add_argument(
        "--max-waiting", type=int, default=1024, metavar="N", help="requests that may wait (1024)"
    )
    parser.add_argument(
        "--draft", choices=("trie", "mtp", "hybrid", "none"), default="trie", help="what drafts (trie)"
    )
    parser.add_argument("--no-warm-up", action="store_true", help="compile each size when it is first needed")


def run(parsed: argparse.Namespace) -> None:
    try:
        import uvicorn

        from ..integrations.server import EngineHost, ServerSettings, create_app
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"serving needs {error.name}, which isn't installed: pip install 'rollout-spec[server]'"
        ) from error
    from ..config import EngineConfig
    from ..draft.config import DraftConfig
    from ..engine import RolloutEngine

    settings = ServerSettings(
        model_name=parsed.served_model_name or parsed.model.stem,
        model_path=str(parsed.model),
        host=parsed.host,
        port=parsed.port,
        api_key=_key(parsed.api_key_file),
        weights_folders=tuple(parsed.weights_dir),
        max_waiting=parsed.max_waiting,
    )
    config = EngineConfig(
        max_seqs=parsed.max_seqs,
        max_seq_len=parsed.max_seq_len,
        max_batch_tokens=max(256, parsed.max_seqs),
        draft=DraftConfig(kind=parsed.draft),
    )
    engine = RolloutEngine.from_pretrained(parsed.model, config)
    if not parsed.no_warm_up:
        engine.warm_up(progress=True)
    app = create_app(EngineHost(engine, max_waiting=settings.max_waiting), settings)
    uvicorn.run(app, host=settings.host, port=settings.port, log_level="warning")


def _key(path: Path | None) -> str | None:
    if path is None:
        return None
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines or not lines[0].strip():
        raise ConfigError(f"{path}: expected the key on its first line, which is empty")
    return lines[0].strip()

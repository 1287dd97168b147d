"""Generate completions of prompts given on the command line, or of a file with one prompt a line.

    rollout-spec generate --model FOLDER_OR_GGUF "Why is the sky blue?" --max-tokens 64
    rollout-spec generate --model FOLDER_OR_GGUF --prompts prompts.jsonl -n 8 --json > rollouts.jsonl

A line of a file is a text, or a JSON object with `prompt` (a text or token ids) or `messages` (a chat). What --json
prints, one prompt a line, is what `rollout-spec project --history` reads.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PromptError
from .prompts import read_prompts

if TYPE_CHECKING:
    from ..outputs import RolloutOutput

HELP = "generate completions of prompts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="*", help="texts to go on from")
    parser.add_argument("--model", type=Path, required=True, metavar="PATH", help="a folder, or a .gguf file")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt a line")
    parser.add_argument("--chat", action="store_true", help="each text is what a user says to a chat model")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="completions of each prompt (1)")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="of a completion (256)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (1)")
    parser.add_argument("--top-p", type=float, default=1.0, help="(1)")
    parser.add_argument("--top-k", type=int, default=0, help="0 is all (0)")
    parser.add_argument("--seed", type=int, help="of the first prompt; each next one's is one more")
    parser.add_argument("--max-seqs", type=int, default=16, metavar="N", help="completions at once (16)")
    parser.add_argument(
        "--draft", choices=("trie", "mtp", "hybrid", "none"), default="trie", help="what drafts (trie)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")


def run(parsed: argparse.Namespace) -> None:
    from ..config import EngineConfig
    from ..draft.config import DraftConfig
    from ..engine import RolloutEngine
    from ..sampling import SamplingParams

    prompts: list[Any] = [
        [{"role": "user", "content": text}] if parsed.chat else text for text in parsed.prompt
    ]
    if parsed.prompts is not None:
        prompts += read_prompts(parsed.prompts, as_chat=parsed.chat).values()
    if not prompts:
        raise PromptError("expected prompts, on the command line or with --prompts FILE")
    sampling = [
        SamplingParams(
            n=parsed.n,
            max_tokens=parsed.max_tokens,
            temperature=parsed.temperature,
            top_p=parsed.top_p,
            top_k=parsed.top_k,
            seed=None if parsed.seed is None else parsed.seed + index,
        )
        for index in range(len(prompts))
    ]
    config = EngineConfig(
        max_seqs=parsed.max_seqs,
        max_batch_tokens=max(256, parsed.max_seqs),
        draft=DraftConfig(kind=parsed.draft),
    )
    with RolloutEngine.from_pretrained(parsed.model, config) as engine:
        outputs = engine.generate(prompts, sampling, progress=not parsed.json)
        if parsed.json:
            for output in outputs:
                print(json.dumps(as_json(output)))
            return
        _show(outputs)
        stats = engine.stats()
        print(
            f"\n{stats.generated_tokens:,} tokens, {stats.tokens_per_s:.1f} a second, "
            f"{stats.acceptance_length:.2f} a step"
        )


def _show(outputs: list[RolloutOutput]) -> None:
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    console = Console()
    for output in outputs:
        for number, completion in enumerate(output.completions):
            text = (
                completion.text if completion.text is not None else " ".join(map(str, completion.token_ids))
            )
            title = f"prompt {output.index}, completion {number} ({completion.finish_reason})"
            console.print(Panel(Text(text), title=title, title_align="left"))


def as_json(output: RolloutOutput) -> dict[str, Any]:
    """An output as a line of JSON."""
    return {
        "index": output.index,
        "group_id": str(output.group_id),
        "prompt_token_ids": output.prompt_token_ids.tolist(),
        "completions": [
            {
                "text": one.text,
                "token_ids": one.token_ids.tolist(),
                "logprobs": [round(float(value), 6) for value in one.logprobs],
                "finish_reason": one.finish_reason,
                "stop_token": one.stop_token,
                "weight_versions": one.weight_versions.tolist(),
                "seed": one.seed,
            }
            for one in output.completions
        ],
    }

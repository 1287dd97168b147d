"""Say what a model, a saved history or recorded rollouts hold.

rollout-spec inspect FOLDER_OR_GGUF        a model: sizes, options, memory
rollout-spec inspect history.bin           what `engine.save_history` wrote
rollout-spec inspect rollouts.jsonl        recorded rollouts
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

HELP = "say what a model, a history or recorded rollouts hold"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="a folder, a .gguf, a history, or recorded rollouts")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(parsed: argparse.Namespace) -> None:
    found = facts(parsed.path)
    if parsed.json:
        print(json.dumps(found, default=str))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=str(parsed.path), show_header=False)
    for name, value in found.items():
        table.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
    Console().print(table)


def facts(path: Path) -> dict[str, Any]:
    """What there is to say, by name. Raises an error of this package for a file that is none of these."""
    if path.is_dir() or path.suffix == ".gguf":
        return _model(path)
    if path.suffix in (".npz", ".jsonl"):
        from ..recorded import load_workload

        workload = load_workload(path)
        return {
            "kind": "recorded rollouts",
            "epochs": len(workload.epochs),
            "prompts": len({one.prompt_number for one in workload.completions}),
            "completions": len(workload.completions),
            "tokens": workload.num_tokens,
        }
    from ..draft.trie import TrieDrafter

    drafter = TrieDrafter()
    drafter.load(path)
    return {"kind": "history", **dataclasses.asdict(drafter.facts()), "memory_bytes": drafter.memory_bytes}


def _model(path: Path) -> dict[str, Any]:
    import jax

    from ..loading import load_model
    from ..loading.huggingface import read_config
    from ..models import abstract_params

    config = load_model(path).config if path.suffix == ".gguf" else read_config(path)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(config)))
    cached = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    if config.latent is not None:
        cached = config.num_layers * (config.latent.kv_rank + config.latent.rope_dim)
    set_options = {
        name: value
        for name, value in dataclasses.asdict(config).items()
        if value not in (None, False, (), 0) and name != "architecture"
    }
    return {
        "kind": "model",
        "architecture": config.architecture,
        "parameters": count,
        "bytes_in_bfloat16": 2 * count,
        "cache_bytes_a_token_in_bfloat16": 2 * cached,
        **set_options,
    }

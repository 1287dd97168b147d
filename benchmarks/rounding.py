"""How often another batch size, or drafting, changes a token by rounding: SmolLM2-135M, sampled at temperature 1.

    python -m benchmarks.rounding [--prompts N] [--max-tokens N] [--bfloat16]

The same prompts and seeds run one at a time without drafts, sixteen at a time without drafts, and both ways with
drafts. Logic never changes a token (the promises' tests); matrix products of other sizes may add in another order,
and then a token whose lead is smaller than the error can change. A completion counts as changed from its first
changed token on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from examples.smollm2 import fetch
from rollout_spec import Completion, DraftConfig, EngineConfig, RolloutEngine, SamplingParams
from rollout_spec.loading import load_model

FOLDER = Path(__file__).parent
WAYS = {
    "1 at a time, plain": (1, "none"),
    "16 at a time, plain": (16, "none"),
    "1 at a time, speculative": (1, "trie"),
    "16 at a time, speculative": (16, "trie"),
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """Against the first way: completions with another token, and the tokens up to and including those."""

    way: str
    completions: int
    completions_changed: int
    tokens_compared: int
    largest_logprob_gap: float

    @property
    def rate(self) -> float:
        """Changes per token compared."""
        return self.completions_changed / self.tokens_compared


def compare(way: str, reference: Sequence[Completion], other: Sequence[Completion]) -> Difference:
    changed = compared = 0
    gap = 0.0
    for one, two in zip(reference, other, strict=True):
        length = min(len(one.token_ids), len(two.token_ids))
        differs = np.flatnonzero(one.token_ids[:length] != two.token_ids[:length])
        same = int(differs[0]) if len(differs) else length
        changed += len(differs) > 0 or len(one.token_ids) != len(two.token_ids)
        compared += min(same + 1, length)
        if same:
            gap = max(gap, float(np.abs(one.logprobs[:same] - two.logprobs[:same]).max()))
    return Difference(way, len(reference), changed, compared, gap)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs all ways, prints a table, writes benchmarks/results/rounding_<dtype>.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--bfloat16", action="store_true", help="weights and cache in bfloat16 (slow on CPU)")
    parser.add_argument("--output", type=Path, default=FOLDER / "results")
    options = parser.parse_args(arguments)

    dtype = "bfloat16" if options.bfloat16 else "float32"
    loaded = load_model(fetch(), dtype)
    lines = (FOLDER / "data" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [entry["prompt"] for entry in map(json.loads, lines) if entry["kind"] == "math"]
    prompts = [[{"role": "user", "content": text}] for text in texts[: options.prompts]]
    sampling = [SamplingParams(max_tokens=options.max_tokens, seed=index) for index in range(len(prompts))]

    completions: dict[str, list[Completion]] = {}
    for way, (max_seqs, kind) in WAYS.items():
        draft = DraftConfig(kind=kind, max_nodes=7, gate=False)  # type: ignore[arg-type]
        config = EngineConfig(max_seqs=max_seqs, max_seq_len=512, draft=draft)
        engine = RolloutEngine(loaded.config, loaded.params, tokenizer=loaded.tokenizer, config=config)
        completions[way] = [
            output.completions[0] for output in engine.generate(prompts, sampling, progress=True)
        ]
        engine.close()
    first, *others = WAYS
    differences = [compare(way, completions[first], completions[way]) for way in others]

    table = Table(
        "against one at a time, plain", "completions changed", "of", "per token", "log-probability gap"
    )
    for found in differences:
        table.add_row(
            found.way,
            str(found.completions_changed),
            str(found.completions),
            f"{found.rate:.1e}" if found.completions_changed else f"< {1 / found.tokens_compared:.1e}",
            f"{found.largest_logprob_gap:.1e}",
        )
    Console().print(table)
    results: dict[str, Any] = {
        "machine": machine.describe(),
        "dtype": dtype,
        "settings": {"prompts": len(prompts), "max_tokens": options.max_tokens},
        "differences": [dataclasses.asdict(found) | {"rate": found.rate} for found in differences],
    }
    options.output.mkdir(parents=True, exist_ok=True)
    target = options.output / f"rounding_{dtype}.json"
    target.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

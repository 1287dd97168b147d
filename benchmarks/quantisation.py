"""What 8-bit weights and caches change: greedy tokens that differ, and errors of log-probabilities. SmolLM2-135M.

    python -m benchmarks.quantisation [--prompts N] [--max-tokens N]

Every way completes the same prompts greedily. A completion is compared with that of the float32 engine, and with that
of the bfloat16 engine, up to the first token that differs; flips are those tokens over all that were compared. Errors
are of `engine.score` on one text, the float32 engine's completions: what a trainer that recomputes in bfloat16 or
float32 finds off, and has to correct for. All but the bfloat16 engine compute in float32 what isn't quantised.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from examples.smollm2 import fetch
from rollout_spec import DraftConfig, EngineConfig, RolloutEngine, SamplingParams
from rollout_spec.loading import load_model

FOLDER = Path(__file__).parent
REFERENCES = ("float32", "bfloat16")
WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8 weights": {"weight_dtype": "int8"},
    "fp8 weights": {"weight_dtype": "fp8"},
    "int8 cache": {"cache_dtype": "int8"},
    "fp8 cache": {"cache_dtype": "fp8"},
    "int8 weights and cache": {"weight_dtype": "int8", "cache_dtype": "int8"},
    "fp8 weights and cache": {"weight_dtype": "fp8", "cache_dtype": "fp8"},
    "bfloat16": {},
}


@dataclasses.dataclass(frozen=True)
class Played:
    """One way's greedy completions, and its log-probabilities of the float32 engine's."""

    texts: list[list[int]]
    logprobs: NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Distance:
    """Of one way from a reference. Errors are of natural log-probabilities."""

    way: str
    reference: str
    flips: int
    tokens_compared: int
    mean_error: float
    largest_error: float
    bias: float
    """The mean of this way's log-probabilities less the reference's."""

    @property
    def flip_rate(self) -> float:
        return self.flips / self.tokens_compared


def play(way: str, prompts: list[str], max_tokens: int, scored: list[list[int]] | None) -> Played:
    """scored: the text whose log-probabilities are taken; None is the way's own."""
    loaded = load_model(fetch(), "bfloat16" if way == "bfloat16" else "float32")
    config = EngineConfig(
        max_seqs=16, max_seq_len=512, max_batch_tokens=64, draft=DraftConfig(kind="none"), **WAYS[way]
    )
    engine = RolloutEngine(loaded.config, loaded.params, tokenizer=loaded.tokenizer, config=config)
    chats: Any = [[{"role": "user", "content": prompt}] for prompt in prompts]
    outputs = engine.generate(chats, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    texts = [output.completions[0].token_ids.tolist() for output in outputs]
    logprobs = engine.score(chats, texts if scored is None else scored)
    engine.close()
    return Played(texts, np.concatenate(logprobs))


def distance(way: str, reference: str, played: dict[str, Played]) -> Distance:
    flips = compared = 0
    for ours, theirs in zip(played[way].texts, played[reference].texts, strict=True):
        same = 0
        while same < min(len(ours), len(theirs)) and ours[same] == theirs[same]:
            same += 1
        differs = ours != theirs
        flips, compared = flips + differs, compared + same + differs
    errors = played[way].logprobs - played[reference].logprobs
    return Distance(
        way,
        reference,
        flips,
        compared,
        mean_error=float(np.abs(errors).mean()),
        largest_error=float(np.abs(errors).max()),
        bias=float(errors.mean()),
    )


def print_table(distances: list[Distance], console: Console) -> None:
    table = Table(title="SmolLM2-135M, greedy", title_justify="left")
    for column in ("way", "against", "flips / tokens", "flip rate", "mean |error|", "largest", "bias"):
        table.add_column(column, justify="left" if column in ("way", "against") else "right")
    for one in distances:
        table.add_row(
            one.way,
            one.reference,
            f"{one.flips} / {one.tokens_compared}",
            f"{one.flip_rate:.2%}",
            f"{one.mean_error:.4f}",
            f"{one.largest_error:.3f}",
            f"{one.bias:+.4f}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=40)
    arguments = parser.parse_args()
    lines = (FOLDER / "data" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[: arguments.prompts]]
    played: dict[str, Played] = {}
    console = Console()
    for way in WAYS:
        scored = played["float32"].texts if played else None
        played[way] = play(way, prompts, arguments.max_tokens, scored)
        console.print(f"{way}: {sum(map(len, played[way].texts))} tokens")
    distances = [
        distance(way, reference, played) for way in WAYS for reference in REFERENCES if way != reference
    ]
    print_table(distances, console)
    result = {
        "machine": machine.describe(),
        "prompts": len(prompts),
        "max_tokens": arguments.max_tokens,
        "distances": [{**dataclasses.asdict(one), "flip_rate": one.flip_rate} for one in distances],
    }
    (FOLDER / "results" / "quantisation.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""A real model beside transformers, in float32 and with the same weights: greedy text, and speed of plain decoding.

    python -m benchmarks.real_models --gguf MODEL.gguf [--prompts 10] [--max-tokens 64] [--rounds 5]

Needs torch and transformers (`make test-torch` makes .venv-torch, which has them). For models of the families llama,
qwen2 and gemma3. A completion that differs is shown with the gap between the two logits where it first does, so that a
tie can be told from a fault. Figures are medians over rounds in turns, one request, prompt included.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.huggingface_folder import save_huggingface
from benchmarks.rival_process import RivalProcess, transformers_process
from rollout_spec import DraftConfig, EngineConfig, RolloutEngine, SamplingParams
from rollout_spec.loading import load_model

PROMPTS = Path(__file__).parent / "data" / "prompts.jsonl"


@dataclasses.dataclass(frozen=True)
class Settings:
    """prompts: compared. max_tokens: of each completion. rounds: turns that are timed."""

    prompts: int
    max_tokens: int
    rounds: int


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a run found. Speeds in tokens/s, at one request."""

    model: str
    architecture: str
    prompts: int
    same_text: int
    largest_gap: float
    """Of the log-probabilities of the two tokens where a completion first differs; 0 without differences."""
    plain_tokens_per_s: float
    transformers_tokens_per_s: float
    ratio: float
    first_warm_up_s: float


def measure(gguf: Path, count: int, max_tokens: int, rounds: int) -> Figures:
    """Greedy completions of `count` prompts by both, then both speeds in turns."""
    model = load_model(gguf)
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    config = EngineConfig(max_seqs=1, max_seq_len=1024, prefix_cache=False, draft=DraftConfig(kind="none"))
    engine = RolloutEngine(model.config, model.params, tokenizer=model.tokenizer, config=config)
    started = time.perf_counter()
    engine.warm_up()
    warm_up_s = time.perf_counter() - started
    assert model.tokenizer is not None
    prompts = [list(model.tokenizer.encode(text)) for text in texts]
    prompts = [prompt for prompt in prompts if len(prompt) + max_tokens <= 1024][:count]
    with tempfile.TemporaryDirectory() as scratch:
        save_huggingface(model.config, model.params, Path(scratch))
        with transformers_process(Path(scratch), machine.cores()) as rival:
            same, gaps = 0, [0.0]
            for prompt in prompts:
                mine, theirs = (
                    _mine(engine, prompt, max_tokens, True)[1],
                    _theirs(rival, prompt, max_tokens, True)[1],
                )
                same += mine == theirs
                if mine != theirs:
                    gaps.append(_gap(engine, prompt, mine, theirs))
            times: list[tuple[float, float]] = []
            for _ in range(rounds):
                ours = _mine(engine, prompts[0], max_tokens, False)[0]
                times.append((ours, _theirs(rival, prompts[0], max_tokens, False)[0]))
    engine.close()
    return Figures(
        model=gguf.name,
        architecture=model.config.architecture,
        prompts=len(prompts),
        same_text=same,
        largest_gap=max(gaps),
        plain_tokens_per_s=max_tokens / statistics.median(mine for mine, _ in times),
        transformers_tokens_per_s=max_tokens / statistics.median(theirs for _, theirs in times),
        ratio=statistics.median(theirs / mine for mine, theirs in times),
        first_warm_up_s=warm_up_s,
    )


def _mine(
    engine: RolloutEngine, prompt: list[int], max_tokens: int, stop_at_eos: bool
) -> tuple[float, list[int]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=not stop_at_eos)
    started = time.perf_counter()
    (output,) = engine.generate([prompt], sampling)
    return time.perf_counter() - started, output.completions[0].token_ids.tolist()


def _theirs(
    rival: RivalProcess, prompt: list[int], max_tokens: int, stop_at_eos: bool
) -> tuple[float, list[int]]:
    run = rival.generate([prompt], max_tokens, stop_at_eos=stop_at_eos)
    return run.seconds, run.tokens[0]


def _gap(engine: RolloutEngine, prompt: list[int], mine: list[int], theirs: list[int]) -> float:
    """How much likelier our model finds its own token than the other's, where the two part."""
    at = next(
        index
        for index in range(max(len(mine), len(theirs)))
        if mine[index : index + 1] != theirs[index : index + 1]
    )
    scores = engine.score([prompt] * 2, [mine[: at + 1], theirs[: at + 1]])
    return float(np.float64(scores[0][at]) - np.float64(scores[1][at]))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gguf", type=Path, nargs="+", required=True)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/real_models.json"))
    options = parser.parse_args(arguments)
    described = machine.describe()
    found = [measure(path, options.prompts, options.max_tokens, options.rounds) for path in options.gguf]
    table = Table(
        "model", "same greedy text", "plain", "transformers", "ratio", title="tokens/s at 1 request"
    )
    for one in found:
        table.add_row(
            one.model,
            f"{one.same_text} of {one.prompts} (gap {one.largest_gap:.1e})",
            f"{one.plain_tokens_per_s:.1f}",
            f"{one.transformers_tokens_per_s:.1f}",
            f"{one.ratio:.2f}",
        )
    Console().print(table)
    machine.write_results(
        options.output,
        described,
        Settings(options.prompts, options.max_tokens, options.rounds),
        {one.model: dataclasses.asdict(one) for one in found},
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

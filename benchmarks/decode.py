"""Decoding speed on SmolLM2-135M in float32: drafting on, drafting off, and transformers.

    make bench        or        python -m benchmarks.decode [--rounds N] [--quick]

All rivals run in turns on one machine, each round in the opposite order of the last; figures are medians over the
rounds. Times hold the whole call, prompt included. Nothing is carried from one call to the next: the prefix cache is
off and the drafter's history is emptied before every prompt, so it knows no more than prompt lookup does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from benchmarks import machine
from benchmarks.huggingface_folder import save_huggingface
from benchmarks.rival_process import Run, transformers_process
from benchmarks.tables import print_results
from examples.smollm2 import fetch
from rollout_spec import DraftConfig, EngineConfig, RolloutEngine, SamplingParams
from rollout_spec.loading import load_model

FOLDER = Path(__file__).parent
PROMPT_LOOKUP_TOKENS = 10


@dataclasses.dataclass(frozen=True)
class Settings:
    """rounds: turns of every rival. max_tokens: of each completion. batch: requests at once in that part."""

    rounds: int = 5
    max_tokens: int = 128
    batch: int = 16
    max_seq_len: int = 512


class CompileCounter:
    """Counts XLA compilations in this process from its creation on."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


class Subject:
    """An engine under measurement: it starts every call with an empty history."""

    def __init__(self, engine: RolloutEngine, scratch: Path) -> None:
        self.engine = engine
        started = time.perf_counter()
        engine.warm_up()
        self.warm_up_s = time.perf_counter() - started
        self._empty_history = scratch / "empty_history" if engine.config.draft.kind != "none" else None
        if self._empty_history is not None:
            engine.save_history(self._empty_history)
        self.stats: dict[str, list[Any]] = {}  # per part: what each call counted

    def generate(
        self, part: str, prompts: Sequence[Sequence[int]], max_tokens: int, *, stop_at_eos: bool
    ) -> Run:
        """Greedy completions, timed."""
        if self._empty_history is not None:
            self.engine.load_history(self._empty_history)
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=not stop_at_eos)
        self.engine.reset_stats()
        started = time.perf_counter()
        outputs = self.engine.generate(prompts, sampling)
        seconds = time.perf_counter() - started
        self.stats.setdefault(part, []).append(self.engine.stats())
        return Run(seconds, [output.completions[0].token_ids.tolist() for output in outputs])

    def host_share(self, part: str) -> float:
        """Share of the time in steps that was spent outside the device call, median over calls."""
        return statistics.median(stats.host_share for stats in self.stats[part])


def in_turns(rounds: int, rivals: dict[str, Callable[[], list[Run]]]) -> dict[str, list[list[Run]]]:
    """Runs of each rival, one list a round; each round in the opposite order of the one before."""
    runs: dict[str, list[list[Run]]] = {name: [] for name in rivals}
    for number in range(rounds):
        for name in list(rivals)[:: 1 if number % 2 == 0 else -1]:
            runs[name].append(rivals[name]())
    return runs


def summarise(runs: dict[str, list[list[Run]]]) -> dict[str, Any]:
    """Median tokens/s of each rival, all rounds' figures, and how many completions equal the first rival's."""
    reference = [tokens for run in next(iter(runs.values()))[0] for tokens in run.tokens]
    summary = {}
    for name, rounds in runs.items():
        speeds = [
            sum(run.num_tokens for run in calls) / sum(run.seconds for run in calls) for calls in rounds
        ]
        completions = [tokens for run in rounds[0] for tokens in run.tokens]
        summary[name] = {
            "tokens_per_s": statistics.median(speeds),
            "tokens_per_s_of_rounds": speeds,
            "tokens": sum(map(len, completions)),
            "completions": len(completions),
            "completions_as_first_rival": sum(map(list.__eq__, completions, reference)),
        }
    return summary


def read_prompts(engine: RolloutEngine) -> dict[str, list[list[int]]]:
    """Token ids of the prompts by kind, each as a chat's only message."""
    assert engine.tokenizer is not None
    prompts: dict[str, list[list[int]]] = {}
    for line in (FOLDER / "data" / "prompts.jsonl").read_text().splitlines():
        entry = json.loads(line)
        ids = engine.tokenizer.apply_chat_template([{"role": "user", "content": entry["prompt"]}])
        prompts.setdefault(entry["kind"], []).append(ids)
    return prompts


def benchmark(settings: Settings, scratch: Path, console: Console) -> dict[str, Any]:
    """All measurements."""
    compilations = CompileCounter()
    model = load_model(fetch())
    save_huggingface(model.config, model.params, scratch / "model")
    config = EngineConfig(max_seqs=settings.batch, max_seq_len=settings.max_seq_len, prefix_cache=False)
    plain_config = dataclasses.replace(config, draft=DraftConfig(kind="none"))
    console.print("Compiling ...")
    subjects = {
        name: Subject(
            RolloutEngine(model.config, model.params, tokenizer=model.tokenizer, config=one), scratch
        )
        for name, one in (("speculative", config), ("plain", plain_config))
    }
    speculative, plain = subjects["speculative"], subjects["plain"]
    compiled = compilations.count
    prompts = read_prompts(plain.engine)
    single, batch, grounded = prompts["math"][:1], prompts["math"][: settings.batch], prompts["grounded"]
    tokens = settings.max_tokens

    with transformers_process(scratch / "model", machine.cores()) as rival:
        rival.generate(single, 8, stop_at_eos=False)  # loads and warms up
        for subject in subjects.values():
            subject.generate("warm-up", single, 8, stop_at_eos=False)
        console.print("One request ...")
        one_request = in_turns(
            settings.rounds,
            {
                "plain": lambda: [plain.generate("one request", single, tokens, stop_at_eos=False)],
                "transformers": lambda: [rival.generate(single, tokens, stop_at_eos=False)],
            },
        )
        console.print(f"{settings.batch} requests ...")
        many_requests = in_turns(
            settings.rounds,
            {
                "plain": lambda: [plain.generate("many requests", batch, tokens, stop_at_eos=False)],
                "speculative": lambda: [
                    speculative.generate("many requests", batch, tokens, stop_at_eos=False)
                ],
                "transformers": lambda: [rival.generate(batch, tokens, stop_at_eos=False)],
            },
        )
        console.print(f"{len(grounded)} grounded prompts, one request at a time ...")
        one_by_one = in_turns(
            settings.rounds,
            {
                "plain": lambda: [
                    plain.generate("grounded prompts", [p], tokens, stop_at_eos=True) for p in grounded
                ],
                "speculative": lambda: [
                    speculative.generate("grounded prompts", [p], tokens, stop_at_eos=True) for p in grounded
                ],
                "transformers prompt lookup": lambda: [
                    rival.generate([p], tokens, stop_at_eos=True, prompt_lookup=PROMPT_LOOKUP_TOKENS)
                    for p in grounded
                ],
            },
        )
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    step_s = statistics.median(stats.device_s / stats.steps for stats in plain.stats["one request"])
    bandwidth = {str(threads): machine.copy_bandwidth(threads) for threads in (1, machine.cores())}
    grounded_stats = speculative.stats["grounded prompts"]
    return {
        "one request": summarise(one_request),
        "many requests": summarise(many_requests),
        "grounded prompts": summarise(one_by_one),
        "acceptance length on grounded prompts": sum(stats.generated_tokens for stats in grounded_stats)
        / sum(stats.decode_steps for stats in grounded_stats),
        "host share of a step": {
            f"{name}, {part}": subject.host_share(part)
            for name, subject in subjects.items()
            for part in subject.stats
            if part != "warm-up"
        },
        "plain step": {
            "seconds": step_s,
            "weight_bytes": weight_bytes,
            "weight_bytes_per_s": weight_bytes / step_s,
            "copy_bytes_per_s_by_threads": bandwidth,
            "share_of_copy_bandwidth": weight_bytes / step_s / max(bandwidth.values()),
        },
        "warm-up": {
            "seconds": {name: subject.warm_up_s for name, subject in subjects.items()},
            "step_shapes": {name: subject.engine.stats().step_shapes for name, subject in subjects.items()},
            "compilations": compiled,
            "compilations_afterwards": compilations.count - compiled,
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=Settings.rounds, help=f"default: {Settings.rounds}")
    parser.add_argument("--quick", action="store_true", help="one short round, to see that it runs")
    parser.add_argument("--output", type=Path, default=FOLDER / "results" / "decode.json")
    parsed = parser.parse_args(arguments)
    settings = Settings(rounds=1, max_tokens=16) if parsed.quick else Settings(rounds=parsed.rounds)
    console = Console()
    described = machine.describe()
    with tempfile.TemporaryDirectory() as scratch:
        results = benchmark(settings, Path(scratch), console)
    print_results(results, console)
    machine.write_results(parsed.output, described, settings, results)
    console.print(f"Written to {parsed.output}", highlight=False)


if __name__ == "__main__":
    main()

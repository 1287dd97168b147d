"""The trie drafter: acceptance, calibration, speed on one core, stalls, memory.

    python -m benchmarks.drafter [--parts acceptance,drift,speed,memory] [--quick] [--rival]

Acceptance and calibration come from recorded completions (benchmarks/data/drafting). Speed and memory are measured with
1e5, 1e6 and 1e7 tokens of generated text held (benchmarks/drafter_text.py), on one core, all sizes in turn; figures are
medians over the rounds. Needs no JAX and no model. docs/benchmarks.md says what each number is.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import (
    drafter_acceptance,
    drafter_memory,
    drafter_rival,
    drafter_speed,
    drafter_tables,
    drift,
    machine,
)
from benchmarks.drafter_held import Held, make_trie
from benchmarks.drafter_measure import can_pin, power_of_ten
from benchmarks.drafter_rival import AS_SHIPPED, AS_TREE, LOOSENED, SuffixTreeDrafter, is_installed
from rollout_spec.draft import TrieDrafter

FOLDER = Path(__file__).parent
PARTS = ("acceptance", "drift", "speed", "memory")
RIVALS = {
    "suffix tree as shipped": lambda: SuffixTreeDrafter(AS_SHIPPED),
    "suffix tree, loosened": lambda: SuffixTreeDrafter(LOOSENED),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured, and how often. rival: the suffix tree too."""

    parts: tuple[str, ...] = PARTS
    rival: bool = False
    cases: tuple[drafter_acceptance.Case, ...] = drafter_acceptance.CASES
    speed: drafter_speed.SpeedSettings = drafter_speed.FULL
    aged: tuple[str, ...] = drift.WORKLOADS
    memory: drafter_memory.MemorySettings = drafter_memory.FULL


QUICK = Settings(
    cases=drafter_acceptance.QUICK_CASES,
    aged=("rollouts_qwen",),
    speed=drafter_speed.QUICK,
    memory=drafter_memory.QUICK,
)


def benchmark(settings: Settings, console: Console) -> dict[str, Any]:
    """All measurements of the parts asked for, as `drafter_tables.print_results` takes them."""
    results: dict[str, Any] = {}

    def say(text: str) -> None:
        console.print(text, highlight=False)

    if "acceptance" in settings.parts:
        rivals = RIVALS if settings.rival else {}
        results["acceptance"] = _plain(drafter_acceptance.measure(settings.cases, rivals, say))
    if "drift" in settings.parts:
        results["drift"] = _plain(drift.measure(drift.DEFAULT_DECAYS, settings.aged, say))
    if "speed" in settings.parts or "memory" in settings.parts:
        drafter_speed.warm_up()
        helds: list[Held[TrieDrafter]] = []
        rival_helds: list[Held[SuffixTreeDrafter]] = []
        for tokens in settings.speed.held:
            say(f"Learning {power_of_ten(tokens)} tokens ...")
            helds.append(Held(tokens, make_trie))
            if settings.rival:
                rival_helds.append(Held(tokens, lambda _: SuffixTreeDrafter(AS_TREE), "suffix tree"))
        everyone: list[Held[Any]] = [*helds, *rival_helds]
    if "memory" in settings.parts:
        figures = drafter_memory.held_memory(everyone)  # before anything else is learnt
        say("Memory ...")
        figures += drafter_memory.measure_memory(settings.memory)
        results["memory"] = _plain(figures)
        files = drafter_memory.measure_files(_nearest(helds, settings.memory.saved), settings.memory.rounds)
        results["files"] = _plain(files)
    if "speed" in settings.parts:
        filling = drafter_speed.filling(everyone)
        speed = drafter_speed.measure_held(everyone, settings.speed, say)
        results["learning"] = _plain([*filling, *speed["learning"]])
        results["proposing"] = _plain(speed["proposing"])
        results["cores"] = _plain(drafter_speed.measure_cores(helds[-1], settings.speed))
        say("Stalls ...")
        results["stalls"] = _plain(drafter_speed.measure_stalls(helds[-1], settings.speed))
    return results


def _nearest(helds: Sequence[Held[TrieDrafter]], tokens: int) -> Held[TrieDrafter]:
    return min(helds, key=lambda held: abs(held.tokens - tokens))


def _plain(measured: Sequence[Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(one) for one in measured]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="which to measure, separated by commas")
    parser.add_argument(
        "--quick", action="store_true", help="few and small measurements, to see that it runs"
    )
    parser.add_argument(
        "--rival",
        action="store_true",
        help="the suffix tree that vLLM ships too, see benchmarks/drafter_rival.py",
    )
    parser.add_argument("--output", type=Path, default=FOLDER / "results" / "drafter.json")
    parsed = parser.parse_args(arguments)
    parts = tuple(parsed.parts.split(","))
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    settings = dataclasses.replace(QUICK if parsed.quick else Settings(), parts=parts, rival=parsed.rival)
    if parsed.rival and not is_installed():
        parser.error(
            "--rival: arctic-inference can't be imported; benchmarks/drafter_rival.py says how to get it"
        )
    console = Console()
    described = machine.describe() | {"speed_on_one_core": can_pin()}
    if parsed.rival:
        described["versions"][drafter_rival.PACKAGE] = importlib.metadata.version(drafter_rival.PACKAGE)
    started = time.perf_counter()
    results = benchmark(settings, console)
    drafter_tables.print_results(results, console)
    console.print(f"{time.perf_counter() - started:.0f} s in all", highlight=False)
    machine.write_results(parsed.output, described, settings, results)
    console.print(f"Written to {parsed.output}", highlight=False)


if __name__ == "__main__":
    main()

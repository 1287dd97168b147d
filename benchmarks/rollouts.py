"""Rollouts with drafting on and off: never slower, the right budget, RL rollouts, grounded work, overheads, others.

    python -m benchmarks.rollouts [--quick] [--parts 1,2,3,5,7] [--slots 1,8,16] [--rounds N]

Parts: 1 text that never repeats, 2 the budget against fixed numbers of nodes, 3 RL rollouts of SmolLM2-135M, 4 RL
rollouts of the reasoner, 5 grounded work, 6 other engines (wants --tunix-python, see benchmarks/rollouts_rivals.py),
7 overheads. All subjects of a cell (a workload and a number of slots) play the same requests in turns, in the opposite
order every round, and figures are medians over the rounds. A cell is stored as soon as it is measured, and replaces
the one of an earlier run alone. docs/benchmarks.md says what each number is.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks import (
    machine,
    rollouts_budget,
    rollouts_grounded,
    rollouts_novel,
    rollouts_overheads,
    rollouts_training,
)
from benchmarks.rollouts_play import TINY, Bench, smollm2, untrained
from benchmarks.rollouts_results import PATH, Results, goal_text


class Part(NamedTuple):
    """A measurement, and its settings by mode."""

    title: str
    measure: Callable[[Any, Bench, Callable[[str, dict[str, Any]], None]], None]
    full: Any
    quick: Any
    smoke: Any


PARTS = {
    number: Part(module.TITLE, module.measure, module.FULL, module.QUICK, module.SMOKE)
    for number, module in {
        "1": rollouts_novel,
        "2": rollouts_budget,
        "3": rollouts_training,
        "5": rollouts_grounded,
        "7": rollouts_overheads,
    }.items()
}
MODES = ("full", "quick", "smoke")


def benchmark(parts: dict[str, Any], bench: Bench, results: Results) -> None:
    """Measures the parts, each by its settings, and stores their cells."""
    for number, settings in parts.items():
        part = PARTS[number]
        started = time.perf_counter()
        bench.say(f"Part {number}: {part.title}")

        def save(cell: str, measured: dict[str, Any], number: str = number, settings: Any = settings) -> None:
            results.put(number, PARTS[number].title, cell, dataclasses.asdict(settings), measured)
            goals = "; ".join(f"{one['name']} {goal_text(one)}" for one in measured["goals"])
            same = measured.get("same")
            differing = (
                f"; only {same['identical']} of {same['completions']} completions identical"
                if (same is not None and same["identical"] != same["completions"])
                else ""
            )
            bench.say(f"  {cell}: {goals or 'measured'}{differing}")

        part.measure(settings, bench, save)
        bench.say(f"  {time.perf_counter() - started:.0f} s")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help=f"default: {','.join(PARTS)}")
    parser.add_argument(
        "--quick", dest="mode", action="store_const", const="quick", default="full", help="about ten minutes"
    )
    parser.add_argument(
        "--smoke",
        dest="mode",
        action="store_const",
        const="smoke",
        help="seconds, with a tiny model: to see that it runs",
    )
    parser.add_argument("--slots", type=_numbers, help="only these numbers of slots or requests, as 1,8")
    parser.add_argument("--rounds", type=int, help="turns of every subject")
    parser.add_argument("--output", type=Path, default=PATH)
    parsed = parser.parse_args(arguments)
    numbers = parsed.parts.split(",")
    if unknown := sorted(set(numbers) - set(PARTS)):
        parser.error(f"--parts: expected some of {', '.join(PARTS)}, got {', '.join(unknown)}")
    changes: dict[str, Any] = {}
    if parsed.slots:
        changes["slots"] = parsed.slots
    if parsed.rounds:
        changes["rounds"] = parsed.rounds
    settings = {
        number: dataclasses.replace(getattr(PARTS[number], parsed.mode), **changes) for number in numbers
    }
    console = Console()
    results = Results(parsed.output, machine.describe())
    with tempfile.TemporaryDirectory() as scratch:
        policy = untrained(TINY) if parsed.mode == "smoke" else smollm2()
        bench = Bench(policy, Path(scratch), lambda text: console.print(text, highlight=False))
        benchmark(settings, bench, results)
    console.print(f"Written to {parsed.output}", highlight=False)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


if __name__ == "__main__":
    main()

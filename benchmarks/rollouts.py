"""Rollouts with drafting on and off: never slower, the right budget, RL rollouts, grounded work, overheads, others.

    python -m benchmarks.rollouts [--quick] [--parts 1,2,3,4,5,7] [--slots 1,8,16] [--rounds N]

Parts: 1 text that never repeats, 2 the budget against fixed numbers of nodes, 3 RL rollouts of SmolLM2-135M, 4 RL
rollouts of the reasoner, 5 grounded work, 6 other engines (they must be installed, see benchmarks/rollouts_rivals.py),
7 overheads. All subjects of a cell (a workload and a number of slots) play the same requests in turns, in the opposite
order every round, and figures are medians over the rounds. A cell is stored as soon as it is measured, and replaces
the one of an earlier run alone. docs/benchmarks.md says what each number is.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import machine, rollouts_plots, rollouts_tables
from benchmarks.rollouts_play import TINY, Bench, smollm2, untrained
from benchmarks.rollouts_results import PATH, Results, goal_text

MODULES = {
    "1": "rollouts_novel",
    "2": "rollouts_budget",
    "3": "rollouts_training",
    "4": "rollouts_reasoner",
    "5": "rollouts_grounded",
    "6": "rollouts_rivals",
    "7": "rollouts_overheads",
}
"""Each has a TITLE, its settings FULL, QUICK and SMOKE, and `measure(settings, bench, save)`."""
DEFAULT_PARTS = "1,2,3,4,5,7"


def benchmark(
    numbers: Sequence[str], mode: str, changes: dict[str, Any], bench: Bench, results: Results
) -> None:
    """Measures the parts and stores their cells.

    mode: "full", "quick" or "smoke". changes: to the settings of all parts that have such a field.
    """
    for number in numbers:
        module = importlib.import_module(f"benchmarks.{MODULES[number]}")
        settings = getattr(module, mode.upper())
        fields = {field.name for field in dataclasses.fields(settings)}
        settings = dataclasses.replace(settings, **{k: v for k, v in changes.items() if k in fields})
        started = time.perf_counter()
        bench.say(f"Part {number}: {module.TITLE}")
        save = functools.partial(_save, results, bench, number, module.TITLE, settings)
        module.measure(settings, bench, save)
        bench.close()
        bench.say(f"  {time.perf_counter() - started:.0f} s")


def _save(
    results: Results,
    bench: Bench,
    number: str,
    title: str,
    settings: Any,
    cell: str,
    measured: dict[str, Any],
) -> None:
    results.put(number, title, cell, dataclasses.asdict(settings), measured)
    goals = "; ".join(f"{one['name']} {goal_text(one)}" for one in measured["goals"])
    bench.say(f"  {cell}: {goals or 'measured'}{rollouts_tables.differing(measured)}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=DEFAULT_PARTS, help=f"default: {DEFAULT_PARTS}")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--quick", action="store_true", help="about ten minutes")
    modes.add_argument("--smoke", action="store_true", help="seconds, with a tiny model: to see that it runs")
    parser.add_argument("--slots", type=_numbers, help="only these numbers of slots or requests, as 1,8")
    parser.add_argument("--rounds", type=int, help="turns of every subject")
    parser.add_argument("--output", type=Path, default=PATH)
    parser.add_argument("--plots", type=Path, help="folder to draw the stored results into, as PNG")
    parsed = parser.parse_args(arguments)
    numbers = [number for number in parsed.parts.split(",") if number]
    if unknown := sorted(set(numbers) - set(MODULES)):
        parser.error(f"--parts: expected some of {', '.join(MODULES)}, got {', '.join(unknown)}")
    given = {"slots": parsed.slots, "rounds": parsed.rounds}
    changes = {name: value for name, value in given.items() if value is not None}
    mode = "quick" if parsed.quick else "smoke" if parsed.smoke else "full"
    console = Console(soft_wrap=True)
    results = Results(parsed.output, machine.describe())
    if numbers:
        with tempfile.TemporaryDirectory() as scratch:
            policy = untrained(TINY) if parsed.smoke else smollm2()
            bench = Bench(policy, Path(scratch), lambda text: console.print(text, highlight=False))
            benchmark(numbers, mode, changes, bench, results)
        console.print(f"Written to {parsed.output}", highlight=False)
    rollouts_tables.print_results(results.parts, console)
    if parsed.plots is not None:
        for path in rollouts_plots.draw(results.parts, parsed.plots):
            console.print(f"Drawn {path}", highlight=False)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


if __name__ == "__main__":
    main()

"""Results of benchmarks/rollouts_rivals.py as tables.

    python -m benchmarks.rivals_tables

prints the stored ones as markdown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

PATH = Path(__file__).parent / "results" / "rivals.json"
OURS = "speculative"
TITLES = {
    "plain": "ours, drafting off",
    OURS: "ours",
    "transformers": "transformers `generate`",
    "transformers, prompt lookup": "transformers, `prompt_lookup_num_tokens=10`",
    "Tunix": "Tunix `Sampler`",
}

Cells = dict[str, dict[str, Any]]


class Row(NamedTuple):
    """A subject of a cell. ratio: ours by it, in words. verdict: whether what is wanted is met, or we even lose."""

    title: str
    speed: str
    ratio: str
    wanted: str
    verdict: str


def rows(cell: dict[str, Any]) -> Iterator[Row]:
    """A row for each subject; those with a goal have the ratio that it is about, a median over the rounds."""
    goals = {one["name"].removeprefix(f"{OURS} / "): one for one in cell["goals"]}
    ours = cell["subjects"][OURS]["tokens_per_s"]
    for name, figures in cell["subjects"].items():
        speed, goal = figures["tokens_per_s"], goals.get(name)
        if name == OURS:
            yield Row(TITLES[name], f"{speed:.1f}", "", "", "")
        elif goal is None:
            yield Row(
                TITLES[name], f"{speed:.1f}", f"{ours / speed:.2f}x", "", "we lose" if ours < speed else ""
            )
        else:
            verdict = "met" if goal["met"] else "missed" if goal["value"] >= 1 else "we lose"
            yield Row(TITLES[name], f"{speed:.1f}", f"{goal['value']:.2f}x", f"{goal['goal']:g}x", verdict)


def print_cells(cells: Cells, console: Console) -> None:
    """On the terminal."""
    for title, cell in cells.items():
        table = Table("engine", title=title, title_justify="left")
        for column in ("tokens/s", "ours / it", "wanted", ""):
            table.add_column(column, justify="right")
        for row in rows(cell):
            table.add_row(*row)
        console.print(table)
        console.print(versions(cell), highlight=False)


def versions(cell: dict[str, Any]) -> str:
    """As "google-tunix 0.1.7, jax 0.12.0, ... on Python 3.12.1", for each rival."""
    described = []
    for name, rival in cell["rivals"].items():
        packages = ", ".join(f"{package} {version}" for package, version in rival["versions"].items())
        described.append(f"{name}: {packages} on Python {rival['python']}")
    return "; ".join(described)


def markdown(cells: Cells) -> str:
    """A table for each cell, and on what it was measured."""
    sections = []
    for title, cell in cells.items():
        lines = [f"| {title} | tokens/s | ours / it | wanted | |", "|---|---|---|---|---|"]
        lines += ["| " + " | ".join(row) + " |" for row in rows(cell)]
        machine, rounds = cell["machine"], len(cell["subjects"][OURS]["tokens_per_s_of_rounds"])
        lines += [
            "",
            f"At most {cell['settings']['max_tokens']} tokens each; medians of {rounds} rounds in turns; "
            f"{machine['cores']} cores ({machine['processor']}). Ours: jax {machine['versions']['jax']} on Python "
            f"{machine['python']}. {versions(cell)}.",
        ]
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


if __name__ == "__main__":
    stored = json.loads(PATH.read_text())
    print("\n\n".join(markdown(part["cells"]) for part in stored["parts"].values()))

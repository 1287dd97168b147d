"""The drafter benchmark's results as tables for the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.drafter_acceptance import CALIBRATION_GOAL

TITLES = {
    "learning": "Learning, one core",
    "proposing": "One proposal in a batch, one core",
    "cores": "A whole batch",
    "stalls": "Stalls, one core, CPU time",
    "memory": "Memory",
    "files": "History files",
}


def print_results(results: dict[str, Any], console: Console) -> None:
    """Every part that was measured."""
    if "acceptance" in results:
        console.print(acceptance_table(results["acceptance"]))
    for part, title in TITLES.items():
        if results.get(part):
            console.print(figures_table(title, results[part]))


def acceptance_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("workload", title="Recorded workloads, tokens per verify step", title_justify="left")
    for column in ("epoch", "at most nodes", "nodes a step", "tokens a step", "goal", "calibration error"):
        table.add_column(column, justify="right")
    for row in rows:
        name = row["workload"] + (", group at once" if row["order"] == "group" else "")
        nodes = str(row["nodes"])
        if row["equal_nodes"]:
            nodes += f", each at least {row['min_prob']:.3f}"
        goal = "" if row["goal"] is None else f"{row['goal']:.2f}"
        met = None if row["goal"] is None else row["tokens_per_step"] >= row["goal"]
        error = row["calibration_error"]
        table.add_row(
            name,
            str(row["epoch"]),
            nodes,
            f"{row['nodes_per_step']:.2f}",
            _coloured(f"{row['tokens_per_step']:.3f}", met),
            goal,
            _coloured(f"{error:.4f}", error <= CALIBRATION_GOAL),
        )
    return table


def figures_table(title: str, figures: list[dict[str, Any]]) -> Table:
    """Figures with their goals; goals met in green, missed in red."""
    table = Table("", title=title, title_justify="left")
    for column in ("measured", "rounds", "goal"):
        table.add_column(column, justify="right")
    for figure in figures:
        goal, value = figure["goal"], figure["value"]
        met = None if goal is None else (value >= goal if figure["at_least"] else value <= goal)
        rounds = figure["rounds"]
        table.add_row(
            figure["name"],
            _coloured(f"{_number(value)} {figure['unit']}".rstrip(), met),
            f"{_number(min(rounds))} to {_number(max(rounds))}" if rounds else "",
            "" if goal is None else f"{'at least' if figure['at_least'] else 'at most'} {_number(goal)}",
        )
    return table


def _coloured(text: str, met: bool | None) -> str:
    return text if met is None else f"[{'green' if met else 'red'}]{text}[/]"


def _number(value: float) -> str:
    """Three significant digits or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

"""The drafter benchmark's results as tables for the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import drift
from benchmarks.drafter_acceptance import CALIBRATION_GOAL
from benchmarks.drafter_measure import power_of_ten

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
    if "drift" in results:
        console.print(drift.table([drift.Aged(**one) for one in results["drift"]]))
    for part, title in TITLES.items():
        if results.get(part):
            console.print(figures_table(title, results[part]))


def acceptance_table(rows: list[dict[str, Any]]) -> Table:
    """A row for each replay of an epoch with our drafter, with a column for each rival."""
    rivals = list(dict.fromkeys(row["drafter"] for row in rows if row["drafter"] != "trie"))
    table = Table("workload", title="Recorded workloads, tokens per verify step", title_justify="left")
    for column in ("nodes", "epoch", "nodes/step", "tokens/step", "goal", "calibration error", *rivals):
        table.add_column(column, justify="right")
    same = {_key(row): row for row in rows}
    for row in rows:
        if row["drafter"] != "trie":
            continue
        goal, tokens, error = row["goal"], row["tokens_per_step"], row["calibration_error"]
        name = row["workload"] + (", group at once" if row["order"] == "group" else "")
        if row["equal_nodes"]:
            name += f", min_prob {row['min_prob']:.3f}"
        others = [same.get(_key(row | {"drafter": rival})) for rival in rivals]
        table.add_row(
            name,
            str(row["nodes"]),
            str(row["epoch"]),
            f"{row['nodes_per_step']:.2f}",
            _coloured(f"{tokens:.3f}", None if goal is None else tokens >= goal),
            "" if goal is None else f"{goal:.2f}",
            _coloured(f"{error:.4f}", error <= CALIBRATION_GOAL),
            *("" if other is None else f"{other['tokens_per_step']:.3f}" for other in others),
        )
    return table


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("drafter", "workload", "order", "nodes", "epoch", "equal_nodes"))


def figures_table(title: str, figures: list[dict[str, Any]]) -> Table:
    """A row for each thing and drafter, a column for each number of tokens held; goals met in green, missed in red."""
    columns = sorted({figure["held"] for figure in figures if figure["held"] is not None})
    table = Table("", title=title, title_justify="left")
    for held in columns or [None]:
        table.add_column("measured" if held is None else f"{power_of_ten(held)} held", justify="right")
    table.add_column("goal", justify="right")
    rows: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for figure in figures:
        rows.setdefault((figure["name"], figure["drafter"], figure["unit"]), []).append(figure)
    names = list(dict.fromkeys(name for name, _, _ in rows))
    for (name, drafter, unit), row in sorted(rows.items(), key=lambda item: names.index(item[0][0])):
        cells = {figure["held"]: _cell(figure) for figure in row}
        if None in cells and columns:  # not measured by tokens held: any column will do
            cells = {columns[0]: cells[None]}
        table.add_row(
            (name if drafter == "trie" else f"  {drafter}") + (f" ({unit})" if unit else ""),
            *(cells.get(held, "") for held in columns or [None]),
            goals_text(row),
        )
    return table


def _cell(figure: dict[str, Any]) -> str:
    goal, value = figure["goal"], figure["value"]
    met = None if goal is None else (value >= goal if figure["at_least"] else value <= goal)
    return _coloured(number_text(value), met)


def goals_text(row: list[dict[str, Any]]) -> str:
    """What is asked for, at which number of tokens held if not at every one."""
    goals = {figure["held"]: figure["goal"] for figure in row if figure["goal"] is not None}
    if not goals:
        return ""
    word = "at least" if row[0]["at_least"] else "at most"
    if len(goals) == len(row) and len(set(goals.values())) == 1:
        return f"{word} {number_text(row[0]['goal'])}"
    return f"{word} " + ", ".join(
        f"{number_text(goal)} at {power_of_ten(held)}" for held, goal in goals.items()
    )


def _coloured(text: str, met: bool | None) -> str:
    return text if met is None else f"[{'green' if met else 'red'}]{text}[/]"


def number_text(value: float) -> str:
    """Three significant digits, or all those before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

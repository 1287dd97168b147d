"""The drafter benchmark's results as tables for docs/drafting.md."""

from __future__ import annotations

from typing import Any

from benchmarks.drafter_acceptance import CALIBRATION_GOAL
from benchmarks.drafter_measure import power_of_ten
from benchmarks.drafter_tables import TITLES, goals_text, number_text

WORKLOADS = {
    "easy": "documents, 4% of places vary",
    "hard": "documents, 12% vary",
    "natural": "natural text, 300,000 unrelated tokens learnt before",
    "rollouts": "SmolLM2-135M-Instruct, temperature 1",
    "rollouts_t06": "the same, temperature 0.6",
    "rollouts_qwen": "Qwen2.5-Coder-0.5B-Instruct, temperature 1",
}
"""Titles of the recorded ones."""
PREFIXES = {"learning": "learning, ", "memory": "memory, ", "files": "history file: "}
"""What the names of some parts' figures leave out."""


def drafter_markdown(stored: dict[str, Any]) -> str:
    """docs/drafting.md's tables of a stored run, of the parts it has; of speed and memory what has a goal."""
    results, described = stored["results"], stored["machine"]
    sections: list[list[str]] = []
    if "acceptance" in results:
        sections.append(_acceptance_rows(results["acceptance"]))
    figures = [figure for part in TITLES for figure in _wanted(part, results.get(part, []))]
    held = sorted({figure["held"] for figure in figures if figure["held"] is not None})
    if held:
        columns = [f"{power_of_ten(tokens)} held" for tokens in held]
        rows = [figure for figure in figures if figure["held"] is not None]
        sections.append(_figure_rows(rows, dict(zip(held, columns, strict=True))))
    if rows := [figure for figure in figures if figure["held"] is None]:
        sections.append(_figure_rows(rows, {None: "measured"}))
    if "drift" in results:
        sections.append(_drift_rows(results["drift"]))
    machine = f"{described['cores']} cores ({described['processor']}), Python {described['python']}"
    sections.append([f"{machine}, numba {described['versions']['numba']} (`python -m benchmarks.drafter`)."])
    return "\n\n".join("\n".join(lines) for lines in sections)


def _wanted(part: str, figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of which some number is asked for, and all of a batch on several cores, named in full."""
    names = {figure["name"] for figure in figures if figure["goal"] is not None or part == "cores"}
    return [
        figure | {"name": PREFIXES.get(part, "") + figure["name"], "unit": figure["unit"] or "times"}
        for figure in figures
        if figure["name"] in names
    ]


def _acceptance_rows(rows: list[dict[str, Any]]) -> list[str]:
    """A row for each case, with both of its epochs."""
    rivals = list(dict.fromkeys(row["drafter"] for row in rows if row["drafter"] != "trie"))
    cases: dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        case = tuple(row[name] for name in ("workload", "order", "nodes", "equal_nodes"))
        cases.setdefault(case, {}).setdefault(row["drafter"], []).append(row)
    head = ["tokens per verify step", "most nodes", "epoch 1", "goal", "epoch 2", "goal"]
    head += [f"calibration error (at most {CALIBRATION_GOAL})", *rivals]
    lines = _head(head)
    for (workload, order, nodes, equal_nodes), by_drafter in cases.items():
        ours = {row["epoch"]: row for row in by_drafter["trie"]}
        title = WORKLOADS[workload] + (", a group at once" if order == "group" else "")
        if equal_nodes:
            last = max(ours)
            title += f", {ours[last]['nodes_per_step']:.1f} nodes proposed a step in epoch {last}"
        cells = [title, str(nodes)]
        for epoch in (1, 2):
            cells += (
                [f"{ours[epoch]['tokens_per_step']:.2f}", _goal(ours[epoch])] if epoch in ours else ["", ""]
            )
        cells.append(", ".join(f"{row['calibration_error']:.3f}" for row in ours.values()))
        for rival in rivals:
            cells.append(", ".join(f"{row['tokens_per_step']:.2f}" for row in by_drafter.get(rival, [])))
        lines.append(_line(cells))
    return lines


def _goal(row: dict[str, Any]) -> str:
    return "" if row["goal"] is None else f"{row['goal']:.2f}"


def _figure_rows(figures: list[dict[str, Any]], columns: dict[int | None, str]) -> list[str]:
    """A row for each thing and drafter, a column for each number of tokens held."""
    rows: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for figure in figures:
        rows.setdefault((figure["name"], figure["drafter"], figure["unit"]), []).append(figure)
    lines = _head(["", *columns.values(), "goal"])
    for (name, drafter, unit), row in rows.items():
        values = {figure["held"]: number_text(figure["value"]) for figure in row}
        title = f"{name} ({unit})" if drafter == "trie" else f"{name}, {drafter} ({unit})"
        lines.append(_line([title, *(values.get(held, "") for held in columns), goals_text(row)]))
    return lines


def _drift_rows(rows: list[dict[str, Any]]) -> list[str]:
    """A row for each workload, a column for each `version_decay`."""
    decays = sorted({row["version_decay"] for row in rows}, reverse=True)
    lines = _head(["tokens per verify step", *(f"`version_decay` {decay:g}" for decay in decays)])
    for workload in dict.fromkeys(row["workload"] for row in rows):
        by_decay = {row["version_decay"]: row for row in rows if row["workload"] == workload}
        cells = [
            f"{row['tokens_per_step']:.3f}" + ("" if decay == 1 else f" ({row['ratio'] - 1:+.1%})")
            for decay, row in ((decay, by_decay[decay]) for decay in decays)
        ]
        lines.append(_line([WORKLOADS.get(workload, workload), *cells]))
    return lines


def _head(cells: list[str]) -> list[str]:
    return [_line(cells), "|---" * len(cells) + "|"]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"

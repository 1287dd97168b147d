"""The rollouts benchmark's stored results as tables: markdown for docs/benchmarks.md, and on the terminal.

    python -m benchmarks.rollouts_tables

rewrites the tables in docs/benchmarks.md from benchmarks/results/rollouts.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import rivals_tables
from benchmarks.rollouts_results import PATH

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
BEGIN, END = f"<!-- from benchmarks/results/{PATH.name} -->", "<!-- end -->"

Cells = dict[str, dict[str, Any]]


def print_results(parts: dict[str, Any], console: Console) -> None:
    """Every goal, what was measured, and whether it is met."""
    table = Table("part", "cell", "what", title="Goals", title_justify="left")
    for column in ("measured", "goal"):
        table.add_column(column, justify="right")
    for number, part in parts.items():
        for cell, measured in part["cells"].items():
            for one in measured["goals"]:
                colour = "green" if one["met"] else "red"
                word = "at least" if one["at_least"] else "at most"
                table.add_row(
                    number,
                    cell,
                    one["name"],
                    f"[{colour}]{one['value']:.3g}[/]",
                    f"{word} {one['goal']:g}",
                )
    console.print(table)


def differing(cell: dict[str, Any]) -> str:
    """A remark for a cell in which not all subjects gave the same tokens."""
    same = cell.get("same", {})
    if "identical" not in same or same["identical"] == same["completions"]:
        return ""
    return f"; only {same['identical']} of {same['completions']} completions identical"


def markdown(parts: dict[str, Any]) -> str:
    """All tables of the parts that were measured."""
    sections = []
    for number, part in parts.items():
        rows = TABLES[number](part["cells"])
        sections += [f"### {number}. {part['title']}", "\n".join(rows), _footer(part["cells"])]
    return "\n\n".join(sections)


def novel_rows(cells: Cells) -> list[str]:
    """A row for each text: speculative over plain, and plain tokens/s, by requests."""
    requests = sorted({cell["slots"] for cell in cells.values()})
    lines = _head(["speculative / plain (plain tokens/s)", *(f"{n} requests" for n in requests)])
    for text in dict.fromkeys(cell["text"] for cell in cells.values()):
        by_requests = {cell["slots"]: cell for cell in cells.values() if cell["text"] == text}
        lines.append(
            _line(
                [
                    f"{text}, at least {next(iter(by_requests.values()))['goals'][0]['goal']:g}",
                    *(_ratio_and_plain(by_requests[n]) if n in by_requests else "" for n in requests),
                ]
            )
        )
    return lines


def _ratio_and_plain(cell: dict[str, Any]) -> str:
    return f"{_value(cell['goals'][0])} ({cell['subjects']['plain']['tokens_per_s']:.0f})"


def budget_rows(cells: Cells) -> list[str]:
    """A row for each workload and number of slots: tokens/s by fixed number of nodes, and ours."""
    fixed = sorted({int(name) for cell in cells.values() for name in cell["subjects"] if name != "ours"})
    lines = _head(["tokens/s", "slots", *map(str, fixed), "ours", "nodes a step", "ours / best", "goal"])
    for cell in cells.values():
        ours = cell["subjects"]["ours"]
        speeds = []
        for nodes in fixed:
            figures = cell["subjects"].get(str(nodes))
            text = "" if figures is None else f"{figures['tokens_per_s']:.0f}"
            speeds.append(f"**{text}**" if nodes == cell["best_fixed"] else text)
        (only,) = cell["goals"]
        lines.append(
            _line(
                [
                    cell["workload"],
                    str(cell["slots"]),
                    *speeds,
                    f"{ours['tokens_per_s']:.0f}",
                    f"{ours['nodes_per_step']:.1f}",
                    _value(only),
                    f"{only['goal']:g}",
                ]
            )
        )
    return lines


def training_rows(cells: Cells) -> list[str]:
    """A row for each temperature, number of slots and epoch."""
    columns = ["slots", "epoch", "plain", "speculative", "ratio", "goal", "acceptance length", "nodes a step"]
    lines = _head(["temperature", *columns, "ratio in the tail"])
    for cell in cells.values():
        goals = {one["name"]: one for one in cell["goals"]}
        for epoch, figures in cell["epochs"].items():
            plain, speculative = (figures["subjects"][name] for name in ("plain", "speculative"))
            whole = goals[f"epoch {epoch}, speculative / plain"]
            tail = goals.get(f"epoch {epoch}, tail, speculative / plain")
            lines.append(
                _line(
                    [
                        f"{cell['temperature']:g}",
                        str(cell["slots"]),
                        epoch,
                        f"{plain['tokens_per_s']:.1f}",
                        f"{speculative['tokens_per_s']:.1f}",
                        _value(whole),
                        f"{whole['goal']:g}",
                        f"{speculative['acceptance_length']:.2f}",
                        f"{speculative['nodes_per_step']:.1f}",
                        "" if tail is None else _value(tail),
                    ]
                )
            )
    return lines


def reasoner_rows(cells: Cells) -> list[str]:
    """A row for each number of slots and epoch, and one for all epochs from the second on."""
    columns = ["epoch", "mean reward", "plain", "speculative", "ratio", "goal"]
    lines = _head(["slots", *columns, "acceptance length", "nodes a step"])
    for cell in cells.values():
        for epoch, figures in cell["epochs"].items():
            plain, speculative = (figures["subjects"][name] for name in ("plain", "speculative"))
            lines.append(
                _line(
                    [
                        str(cell["slots"]),
                        epoch,
                        f"{figures['mean_reward']:.2f}",
                        f"{plain['tokens_per_s']:.0f}",
                        f"{speculative['tokens_per_s']:.0f}",
                        f"{figures['ratio']:.2f}",
                        "",
                        f"{speculative['acceptance_length']:.2f}",
                        f"{speculative['nodes_per_step']:.1f}",
                    ]
                )
            )
        for one in cell["goals"]:
            lines.append(
                _line(
                    [str(cell["slots"]), "2 and later", "", "", "", _value(one), f"{one['goal']:g}", "", ""]
                )
            )
    return lines


def grounded_rows(cells: Cells) -> list[str]:
    """A row for each temperature and number of slots."""
    columns = ["slots", "plain", "speculative", "ratio", "goal", "acceptance length", "nodes a step"]
    lines = _head(["temperature", *columns])
    for cell in cells.values():
        plain, speculative = (cell["subjects"][name] for name in ("plain", "speculative"))
        goals = cell["goals"]
        lines.append(
            _line(
                [
                    f"{cell['temperature']:g}",
                    str(cell["slots"]),
                    f"{plain['tokens_per_s']:.1f}",
                    f"{speculative['tokens_per_s']:.1f}",
                    _value(goals[0]) if goals else f"{cell['ratio']:.2f}",
                    f"{goals[0]['goal']:g}" if goals else "",
                    f"{speculative['acceptance_length']:.2f}",
                    f"{speculative['nodes_per_step']:.1f}",
                ]
            )
        )
    return lines


def overhead_rows(cells: Cells) -> list[str]:
    """A row for each thing."""
    lines = _head(["", "measured", "goal"])
    for name, cell in cells.items():
        if name.startswith("host time"):
            goals = {one["name"]: one for one in cell["goals"]}
            for subject, figures in cell["subjects"].items():
                one = goals.get(f"{subject}, host share of a step")
                text = f"{figures['host_ms']:.2f} ms of {figures['step_ms']:.1f} ms ({figures['host_share']:.1%})"
                wanted = "" if one is None else f"at most {one['goal']:.0%}{'' if one['met'] else ', missed'}"
                lines.append(_line([f"{name}, {subject}: a step", text, wanted]))
        elif name == "time to first token":
            for state, seconds in cell["seconds"].items():
                text = f"{1e3 * seconds:.0f} ms"
                lines.append(_line([f"{name}, {cell['prompt_tokens']:.0f} tokens, engine {state}", text, ""]))
        elif name == "memory":
            for one in cell["goals"]:
                wanted = f"at most {one['goal']:.0%}{'' if one['met'] else ', missed'}"
                lines.append(_line([one["name"], f"{one['value']:.2%}", wanted]))
        else:
            text = f"{cell['warm_up_s']:.0f} s, {cell['step_shapes']} sizes"
            lines.append(_line([f"warm-up, {cell['slots']} slots", text, ""]))
            lines.append(_line(["loading the model", f"{cell['load_s']:.1f} s", ""]))
    return lines


def rival_rows(cells: Cells) -> list[str]:
    """As the rivals' own program shows them."""
    return rivals_tables.markdown(cells).splitlines()


TABLES: dict[str, Callable[[Cells], list[str]]] = {
    "1": novel_rows,
    "2": budget_rows,
    "3": training_rows,
    "4": reasoner_rows,
    "5": grounded_rows,
    "6": rival_rows,
    "7": overhead_rows,
}


def _value(one: dict[str, Any]) -> str:
    return f"{one['value']:.2f}{'' if one['met'] else ' (missed)'}"


def _footer(cells: Cells) -> str:
    """When and on what the cells were measured, and whether the tokens were the same."""
    days = sorted({cell["measured_at"][:10] for cell in cells.values()})
    machines = dict.fromkeys(
        f"{one['cores']} cores ({one['processor']}), jax {one['versions']['jax']}"
        for one in (cell["machine"] for cell in cells.values())
    )
    rounds = sorted({cell["settings"]["rounds"] for cell in cells.values() if "rounds" in cell["settings"]})
    text = f"{' and '.join(machines)}; {', '.join(days)}; rounds: {', '.join(map(str, rounds))}."
    total, same = (sum(one[key] for one in _compared(cells)) for key in ("completions", "identical"))
    return text + (f" Identical tokens: {same} of {total} completions." if total else "")


def _compared(cells: Cells) -> Iterable[dict[str, int]]:
    for cell in cells.values():
        for holder in (cell, *cell.get("epochs", {}).values()):
            if "identical" in holder.get("same", {}):
                yield holder["same"]


def replace_tables(page: str, parts: dict[str, Any]) -> str:
    """docs/benchmarks.md with the tables between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"expected the marks {BEGIN} and {END} in {PAGE.name}, found not both")
    return f"{before}{BEGIN}\n{markdown(parts)}\n{END}{after}"


def _head(cells: list[str]) -> list[str]:
    return [_line(cells), "|---" * len(cells) + "|"]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    if PATH.exists():
        PAGE.write_text(replace_tables(PAGE.read_text(), json.loads(PATH.read_text())["parts"]))

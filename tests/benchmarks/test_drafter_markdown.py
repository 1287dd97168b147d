"""docs/drafting.md shows the stored run of the drafter benchmark, every figure beside its goal."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.drafter_acceptance import Acceptance
from benchmarks.drafter_markdown import drafter_markdown
from benchmarks.drafter_measure import Figure
from benchmarks.drift import Aged


def replayed(epoch: int, tokens_per_step: float, goal: float | None, **others: Any) -> Acceptance:
    values: dict[str, Any] = {
        "drafter": "trie",
        "workload": "hard",
        "order": "staggered",
        "nodes": 16,
        "min_prob": 0.001,
        "equal_nodes": False,
        "nodes_per_step": 12.34,
        "calibration_error": 0.01 * epoch,
    }
    return Acceptance(epoch=epoch, tokens_per_step=tokens_per_step, goal=goal, **(values | others))


def figure(name: str, value: float, goal: float | None = None, **others: Any) -> Figure:
    return dataclasses.replace(Figure(name, value, "us", goal), **others)


def stored(**parts: list[Any]) -> dict[str, Any]:
    """A run as it is written to JSON."""
    results = {part: [dataclasses.asdict(one) for one in measured] for part, measured in parts.items()}
    described = {"cores": 2, "processor": "a processor", "python": "3.11", "versions": {"numba": "0.6"}}
    return json.loads(json.dumps({"machine": described, "results": results}))


def cells(run: dict[str, Any], title: str) -> list[str]:
    """What follows a row's title in the tables of a run."""
    (row,) = (line for line in drafter_markdown(run).splitlines() if line.startswith(f"| {title} |"))
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


def test_a_case_is_a_row_with_both_epochs_goals_and_calibration_errors() -> None:
    run = stored(
        acceptance=[
            replayed(1, 3.456, 3.4),
            replayed(2, 6.0, 5.9),
            replayed(1, 2.1, None, order="group"),
            replayed(1, 2.2, 2.1, workload="natural", calibration_error=0.0314),
            replayed(1, 4.0, None, equal_nodes=True),
            replayed(2, 5.0, 4.9, equal_nodes=True, nodes_per_step=6.04),
        ]
    )
    assert cells(run, "documents, 12% vary") == ["16", "3.46", "3.40", "6.00", "5.90", "0.010, 0.020"]
    assert cells(run, "documents, 12% vary, a group at once") == ["16", "2.10", "", "", "", "0.010"]
    natural = "natural text, 300,000 unrelated tokens learnt before"
    assert cells(run, natural) == ["16", "2.20", "2.10", "", "", "0.031"]
    equal = "documents, 12% vary, 6.0 nodes proposed a step in epoch 2"
    assert cells(run, equal) == ["16", "4.00", "", "5.00", "4.90", "0.010, 0.020"]


def test_rivals_get_a_column() -> None:
    rival = {"drafter": "suffix tree", "min_prob": None}
    ours = [replayed(1, 3, None), replayed(2, 4, None), replayed(1, 1, None, nodes=63)]
    theirs = [replayed(1, 2.5, None, **rival), replayed(2, 3.5, None, **rival)]
    run = stored(acceptance=[*ours, *theirs])
    assert "| suffix tree |" in drafter_markdown(run)
    title = "| documents, 12% vary | 16 |"
    (row,) = (line for line in drafter_markdown(run).splitlines() if line.startswith(title))
    assert row.endswith("| 2.50, 3.50 |")


def test_figures_are_rows_by_tokens_held_and_those_without_a_goal_are_left_out() -> None:
    run = stored(
        learning=[
            figure("held prompts", 700_000, 600_000, unit="tokens/s", at_least=True, held=10**5),
            figure("held prompts", 400_000, unit="tokens/s", at_least=True, held=10**7),
            figure("from none held", 1, held=10**5),
        ],
        proposing=[figure("a proposal", held / 10**6, 20, held=held) for held in (10**5, 10**7)],
        cores=[figure("a batch, speed-up", 1.9, unit="", held=10**7)],
        stalls=[figure("longest", 0.5, 1.0, unit="ms")],
    )
    learning = "learning, held prompts (tokens/s)"
    assert cells(run, learning) == ["700,000", "400,000", "at least 600,000 at 1e5"]
    assert cells(run, "a proposal (us)") == ["0.1", "10", "at most 20"]
    assert cells(run, "a batch, speed-up (times)") == ["", "1.9", ""]
    assert cells(run, "longest (ms)") == ["0.5", "at most 1"]
    assert "from none held" not in drafter_markdown(run)


def test_ageing_is_compared_with_none() -> None:
    run = stored(drift=[Aged("gentle drift", 1.0, 3.0, 1.0), Aged("gentle drift", 0.85, 3.3, 1.1)])
    assert cells(run, "gentle drift") == ["3.000", "3.300 (+10.0%)"]


def test_the_tables_replace_what_is_between_the_marks() -> None:
    marks = tables.BEGIN.format("drafter.json"), tables.END
    page = f"before\n{marks[0]}\nold\n{marks[1]}\nafter {marks[1]}\n"
    run = stored(acceptance=[replayed(1, 3, None)])
    replaced = tables.replace_drafter_tables(page, run)
    assert replaced == f"before\n{marks[0]}\n{drafter_markdown(run)}\n{marks[1]}\nafter {marks[1]}\n"
    assert tables.replace_drafter_tables(replaced, run) == replaced
    with pytest.raises(ValueError, match="marks"):
        tables.replace_drafter_tables("no marks", run)


def test_the_tables_in_the_page_are_the_stored_measurement() -> None:
    page = tables.DRAFTING_PAGE.read_text()
    if tables.DRAFTER_RESULTS.exists():
        run = json.loads(tables.DRAFTER_RESULTS.read_text())
        assert page == tables.replace_drafter_tables(page, run)
    else:
        assert page != tables.replace_drafter_tables(page, stored())

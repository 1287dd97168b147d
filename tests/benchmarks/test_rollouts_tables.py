"""docs/benchmarks.md shows the stored run of the rollouts benchmark, every figure beside its goal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rollouts, rollouts_plots, rollouts_tables
from benchmarks.rollouts_results import PATH, goal

MACHINE = {"cores": 2, "processor": "a processor", "versions": {"jax": "0.10"}}


def cell(goals: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
    measured = {"measured_at": "2026-12-01T03:00:00+00:00", "machine": MACHINE, "settings": {"rounds": 3}}
    return measured | {"goals": goals} | others


def subject(tokens_per_s: float, **others: Any) -> dict[str, Any]:
    return {"tokens_per_s": tokens_per_s, "nodes_per_step": 2.34, "acceptance_length": 1.5} | others


def part(number: str, **cells: dict[str, Any]) -> dict[str, Any]:
    return {number: {"title": "A title", "cells": cells}}


def row(parts: dict[str, Any], title: str) -> list[str]:
    lines = rollouts_tables.markdown(parts).splitlines()
    (line,) = (line for line in lines if line.startswith(f"| {title} |"))
    return [text.strip() for text in line.strip("|").split("|")][1:]


def test_texts_that_never_repeat_are_rows_by_requests() -> None:
    parts = part(
        "1",
        **{
            f"{text}{n}": cell(
                [goal("speculative / plain", ratio, 0.97)],
                text=text,
                slots=n,
                subjects={"plain": subject(99.6), "speculative": subject(98)},
            )
            for text, n, ratio in (("hot", 1, 0.991), ("hot", 16, 0.9), ("cold", 16, 1.0))
        },
    )
    assert row(parts, "hot, at least 0.97") == ["0.99 (100)", "0.90 (missed) (100)"]
    assert row(parts, "cold, at least 0.97") == ["", "1.00 (100)"]


def test_fixed_numbers_of_nodes_are_columns_and_the_best_stands_out() -> None:
    subjects = {"ours": subject(61.0), "0": subject(50.0), "16": subject(60.0)}
    one = cell(
        [goal("ours / best", 61 / 60, 0.95)], slots=8, workload="math", subjects=subjects, best_fixed=16
    )
    other = cell([goal("ours / best", 0.5, 1.0)], slots=1, workload="m", subjects=subjects, best_fixed=0)
    parts = part("2", a=one, b=other)
    assert row(parts, "math") == ["8", "50", "**60**", "61", "2.3", "1.02", "0.95"]
    assert row(parts, "m") == ["1", "**50**", "60", "61", "2.3", "0.50 (missed)", "1"]


def test_epochs_are_rows_and_tails_a_column() -> None:
    subjects = {"plain": subject(50.0), "speculative": subject(75.0)}
    goals = [
        goal("epoch 2, speculative / plain", 1.5, 1.45),
        goal("epoch 2, tail, speculative / plain", 0.9, 0.98),
    ]
    same = {"completions": 8, "identical": 8}
    epochs = {"2": {"subjects": subjects, "same": same}}
    parts = part("3", a=cell(goals, slots=1, temperature=0.6, epochs=epochs))
    expected = ["1", "2", "50.0", "75.0", "1.50", "1.45", "1.50", "2.3", "0.90 (missed)"]
    assert row(parts, "0.6") == expected
    assert "Identical tokens: 8 of 8 completions." in rollouts_tables.markdown(parts)


def test_the_reasoners_epochs_are_rows_and_so_is_what_is_wanted_of_them() -> None:
    subjects = {"plain": subject(2500.0), "speculative": subject(7500.0)}
    epochs = {"1": {"subjects": subjects, "ratio": 3.0, "mean_reward": 0.6, "same": {}}}
    goals = [goal("from epoch 2 on, speculative / plain", 2.4, 2.5)]
    lines = rollouts_tables.markdown(part("4", a=cell(goals, slots=1, epochs=epochs))).splitlines()
    assert "| 1 | 1 | 0.60 | 2500 | 7500 | 3.00 |  | 1.50 | 2.3 |" in lines
    assert "| 1 | 2 and later |  |  |  | 2.40 (missed) | 2.5 |  |  |" in lines


def test_grounded_work_shows_a_ratio_with_or_without_a_goal() -> None:
    subjects = {"plain": subject(50.0), "speculative": subject(100.0)}
    parts = part(
        "5",
        a=cell([goal("speculative / plain", 2, 1.9)], slots=1, temperature=0.0, subjects=subjects, ratio=2.0),
        b=cell([], slots=1, temperature=1.0, subjects=subjects, ratio=1.234),
    )
    assert row(parts, "0") == ["1", "50.0", "100.0", "2.00", "1.9", "1.50", "2.3"]
    assert row(parts, "1") == ["1", "50.0", "100.0", "1.23", "", "1.50", "2.3"]


def test_overheads() -> None:
    figures = {"host_ms": 1.234, "step_ms": 20.0, "host_share": 0.0617}
    share = goal("plain, host share of a step", 0.0617, 0.05, at_least=False)
    growth = goal("growth of memory over 10,000 requests", 0.0012, 0.01, at_least=False)
    parts = part(
        "7",
        **{
            "host time, 16 slots": cell([share], subjects={"plain": figures}),
            "time to first token": cell([], seconds={"idle": 0.123}, prompt_tokens=90),
            "memory": cell([growth], looks=[]),
            "start-up": cell([], slots=16, warm_up_s=61.2, step_shapes=20, load_s=1.23),
        },
    )
    assert row(parts, "host time, 16 slots, plain: a step") == [
        "1.23 ms of 20.0 ms (6.2%)",
        "at most 5%, missed",
    ]
    assert row(parts, "time to first token, 90 tokens, engine idle") == ["123 ms", ""]
    assert row(parts, "growth of memory over 10,000 requests") == ["0.12%", "at most 1%"]
    assert row(parts, "warm-up, 16 slots") == ["61 s, 20 sizes", ""]


def test_every_part_has_a_table() -> None:
    assert set(rollouts_tables.TABLES) == set(rollouts.MODULES)


def test_differing_tokens_are_remarked() -> None:
    assert rollouts_tables.differing({"same": {"completions": 4, "identical": 4}}) == ""
    assert "3 of 4" in rollouts_tables.differing({"same": {"completions": 4, "identical": 3}})
    assert rollouts_tables.differing({}) == ""


def test_nothing_is_drawn_from_nothing(tmp_path: Path) -> None:
    assert rollouts_plots.draw({}, tmp_path) == []


def test_the_tables_replace_what_is_between_the_marks() -> None:
    page = f"before\n{rollouts_tables.BEGIN}\nold\n{rollouts_tables.END}\nafter {rollouts_tables.END}\n"
    parts = part("5")
    replaced = rollouts_tables.replace_tables(page, parts)
    assert replaced.startswith("before\n")
    assert replaced.endswith(f"after {rollouts_tables.END}\n")
    assert rollouts_tables.markdown(parts) in replaced
    assert "old" not in replaced
    assert rollouts_tables.replace_tables(replaced, parts) == replaced
    with pytest.raises(ValueError, match="marks"):
        rollouts_tables.replace_tables("no marks", parts)


def test_the_tables_in_the_page_are_the_stored_measurement() -> None:
    page = rollouts_tables.PAGE.read_text()
    assert rollouts_tables.BEGIN in page
    if PATH.exists():
        assert page == rollouts_tables.replace_tables(page, json.loads(PATH.read_text())["parts"])

"""The drafter benchmark: its text, what a drafter holds, goals, one core, and a small run of everything."""

from __future__ import annotations

import dataclasses
import io
import json
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks import (
    drafter,
    drafter_acceptance,
    drafter_held,
    drafter_measure,
    drafter_memory,
    drafter_rival,
    drafter_speed,
    drafter_tables,
)
from benchmarks.drafter_text import LENGTH, PROMPT_LENGTH, VOCABULARY, RolloutText, Variation

TINY = drafter.Settings(
    cases=(drafter_acceptance.Case("rollouts_qwen", (None, 3.08)),),
    aged=(),
    speed=drafter_speed.SpeedSettings(
        held=(9_000,),
        rounds=1,
        calls=2,
        first_touches=1,
        stall_capacity=2_000,
        stall_calls=2_000,
        cache_bytes=2**20,
    ),
    memory=drafter_memory.MemorySettings(
        workloads=("rollouts_qwen",), random=(2_000,), resident=20_000, cap=2_000, saved=9_000, rounds=1
    ),
)


def test_text_is_seeded() -> None:
    one, same, other = RolloutText(3), RolloutText(3), RolloutText(3, seed=1)
    assert one.prompts.shape == (3, PROMPT_LENGTH)
    assert one.completions(1, 2).shape == (3, LENGTH)
    assert np.array_equal(one.prompts, same.prompts)
    assert np.array_equal(one.completions(1, 2), same.completions(1, 2))
    assert not np.array_equal(one.completions(1, 2), other.completions(1, 2))
    assert 0 <= one.completions(0, 0).min() < one.completions(0, 0).max() < VOCABULARY


def test_samples_of_a_prompt_differ_by_the_shares_given() -> None:
    def alike(**shares: float) -> float:
        text = RolloutText(50, variation=Variation(**({"places": 0, "noise": 0, "drift": 0} | shares)))
        return float(np.mean(text.completions(0, 0) == text.completions(0, 1)))

    assert alike() == 1
    assert alike(noise=0.1) == pytest.approx(0.9**2, abs=0.02)
    assert alike(places=0.1, preference=1.0) == 1
    assert 0.7 < alike(places=0.1, preference=0.6) < 0.95


def test_drift_comes_between_epochs_only() -> None:
    text = RolloutText(20, variation=Variation(places=0.1, noise=0, preference=1.0, drift=0.5))
    assert np.array_equal(text.completions(1, 0), text.completions(1, 5))
    assert not np.array_equal(text.completions(0, 0), text.completions(1, 0))


def test_a_drafter_holds_the_tokens_asked_for_and_is_filled_anew_once_it_has_grown() -> None:
    held = drafter_held.Held(20_000, drafter_held.make_trie)
    first = held.drafter
    assert first.tokens_learnt == 20_000
    held.refill()
    assert held.drafter is first
    for sample in held.of_held_prompts(10):
        drafter_held.learn(held.drafter, sample)
    held.refill()
    assert held.drafter is not first
    assert held.drafter.tokens_learnt == 20_000


def test_new_prompts_are_new_and_held_ones_are_held() -> None:
    held = drafter_held.Held(20_000, drafter_held.make_trie)
    again, new, newer = held.of_held_prompts(5), held.of_new_prompts(5), held.of_new_prompts(5)
    groups = {("held", number) for number in range(len(held.text.prompts))}
    assert {sample.group_id for sample in again} <= groups
    assert not {sample.group_id for sample in new} & {sample.group_id for sample in newer}
    assert not {sample.group_id for sample in [*new, *newer]} & groups


def test_a_batch_spends_its_whole_budget() -> None:
    held = drafter_held.Held(20_000, drafter_held.make_trie)
    batch = drafter_held.Batch(held, 8, 16)
    assert batch.propose() == 8 * 16
    batch.finish()


def test_goals_are_bounds_from_either_side() -> None:
    figure = drafter_measure.Figure("x", 2.0, "s")
    assert figure.met is None
    assert dataclasses.replace(figure, goal=2.0).met
    assert not dataclasses.replace(figure, goal=1.0).met
    assert dataclasses.replace(figure, goal=1.0, at_least=True).met
    assert not dataclasses.replace(figure, goal=3.0, at_least=True).met
    assert drafter_measure.median_figure("x", [3.0, 1.0, 2.0], "s").value == 2.0


@pytest.mark.skipif(not drafter_measure.can_pin(), reason="this system can't keep a process on a core")
def test_one_core_is_kept_to_and_given_back() -> None:
    before = os.sched_getaffinity(0)
    with drafter_measure.one_core():
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


def test_the_threshold_is_found_that_spends_as_many_nodes_as_asked_for() -> None:
    case = drafter_acceptance.Case("rollouts_qwen", (None, None), spend=6.0)
    config = drafter_acceptance.spending(case, 6.0, tolerance=0.05)
    (_, last) = drafter_acceptance.measure_with(case, config)
    assert last.nodes_per_step == pytest.approx(6, rel=0.05)
    assert last.min_prob == config.min_prob


def test_a_small_run_measures_every_part_and_fits_the_tables_and_json() -> None:
    console = Console(file=io.StringIO(), width=160)
    results = drafter.benchmark(TINY, console)
    json.dumps(results)
    (first, second) = results["acceptance"]
    assert (first["epoch"], second["epoch"]) == (1, 2)
    assert second["tokens_per_step"] > first["tokens_per_step"] > 1
    for part in ("learning", "proposing", "stalls", "memory", "files"):
        assert results[part]
        assert all(figure["value"] > 0 for figure in results[part]), part
    nodes = [figure for figure in results["proposing"] if figure["unit"] == "nodes"]
    assert [figure["value"] for figure in nodes] == [16]
    drafter_tables.print_results(results, console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "rollouts_qwen" in printed
    assert all(title in printed for title in drafter_tables.TITLES.values())


def test_a_table_shows_each_size_in_its_column_and_goals_where_they_hold() -> None:
    figures = [
        drafter_measure.Figure("learning", 700_000, "tokens/s", 600_000, True, held=10**5),
        drafter_measure.Figure("learning", 200_000, "tokens/s", held=10**6),
        drafter_measure.Figure("learning", 1.5, "tokens/s", held=10**6, drafter="other"),
    ]
    console = Console(file=io.StringIO(), width=120)
    console.print(drafter_tables.figures_table("Speed", [dataclasses.asdict(figure) for figure in figures]))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    lines = printed.splitlines()
    (ours,) = [line for line in lines if "700,000" in line]
    assert ours.index("700,000") < ours.index("200,000") < ours.index("at least 600,000 at 1e5")
    (theirs,) = [line for line in lines if "other" in line]
    assert "1.5" in theirs


class FakeCache:
    """What `SuffixTreeDrafter` calls of arctic-inference."""

    def __init__(self, max_tree_depth: int, max_cached_requests: int) -> None:
        self.started: list[int] = []
        self.contexts: list[list[int]] = []

    def start_request(self, number: int, prompt: np.ndarray) -> None:
        self.started.append(number)

    def add_active_response(self, number: int, tokens: np.ndarray) -> None:
        assert tokens.dtype == np.int32

    def speculate(self, number: int, context: np.ndarray, **settings: Any) -> SimpleNamespace:
        self.contexts.append(context.tolist())
        return SimpleNamespace(token_ids=[5, 6], parents=[-1, 0], probs=[0.5, 0.25])

    def stop_request(self, number: int) -> None: ...


def test_the_rival_sees_the_latest_tokens_and_never_a_name_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        drafter_rival.importlib, "import_module", lambda _: SimpleNamespace(SuffixDecodingCache=FakeCache)
    )
    settings = drafter_rival.SuffixTreeSettings(4, 1.0, 0.0, 0.1, use_tree_spec=False)
    rival = drafter_rival.SuffixTreeDrafter(settings)
    text = np.arange(200, dtype=np.int32)
    for _ in range(2):
        rival.start("same name", text[:3])
        for at in range(3, 200):
            rival.extend("same name", text[at : at + 1])
            (tree,) = rival.propose(["same name"], [16])
            assert rival._cache.contexts[-1] == list(range(at - 3, at + 1))
        rival.finish("same name")
    assert tree.validate().tokens.tolist() == [5, 6]
    assert rival.tokens_learnt == 2 * 197
    assert len(set(rival._cache.started)) == 2

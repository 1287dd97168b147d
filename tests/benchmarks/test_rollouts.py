"""The rollouts benchmark runs whole on a tiny model, and what it stores is what it measured."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    rollouts,
    rollouts_budget,
    rollouts_changing,
    rollouts_grounded,
    rollouts_novel,
    rollouts_overheads,
    rollouts_tables,
    rollouts_training,
)
from benchmarks.rollouts_play import (
    PLAIN,
    SPECULATIVE,
    TINY,
    UNTRAINED,
    Bench,
    Play,
    Step,
    Work,
    identical,
    in_order,
    median_ratio,
    smollm2,
    summary,
    untrained,
)
from benchmarks.rollouts_results import Results, goal, goal_text
from rollout_spec import DraftConfig, SamplingParams
from rollout_spec.stats import EngineStats

MACHINE = {"cores": 2, "processor": "a processor", "versions": {"jax": "0.10"}}
POLICY = untrained(TINY)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(POLICY, tmp_path_factory.mktemp("bench"), lambda text: None)


def play(seconds: float, *tokens: list[int], steps: tuple[Step, ...] = ()) -> Play:
    return Play(seconds, list(tokens), EngineStats(decode_steps=1, generated_tokens=1), steps)


class Saved(dict[str, dict[str, Any]]):
    """What a part saves, and that it is JSON."""

    def __call__(self, cell: str, measured: dict[str, Any]) -> None:
        assert cell not in self
        self[cell] = json.loads(json.dumps(measured))


def check_same(same: dict[str, int]) -> None:
    assert same["identical"] == same["completions"] > 0


# Each part, whole


def test_text_that_never_repeats(bench: Bench) -> None:
    saved = Saved()
    rollouts_novel.measure(rollouts_novel.SMOKE, bench, saved)
    assert len(saved) == 4
    for cell in saved.values():
        check_same(cell["same"])
        (one,) = cell["goals"]
        assert (one["goal"], one["at_least"]) == (0.97, True)
        assert set(cell["subjects"]) == {"plain", "speculative"}


def test_the_budget_against_fixed_numbers_of_nodes(bench: Bench) -> None:
    saved = Saved()
    rollouts_budget.measure(rollouts_budget.SMOKE, bench, saved)
    assert len(saved) == 6
    for cell in saved.values():
        check_same(cell["same"])
        speeds = {name: figures["tokens_per_s"] for name, figures in cell["subjects"].items()}
        assert set(speeds) == {"ours", "0", "2"}
        (one,) = cell["goals"]
        assert one["value"] == pytest.approx(speeds["ours"] / speeds[str(cell["best_fixed"])])
        assert cell["subjects"]["0"]["nodes_per_step"] == 0
    assert saved["math, temperature 0.6, 2 slots"]["subjects"]["2"]["nodes_per_step"] > 0.5


def test_rl_rollouts(bench: Bench) -> None:
    saved = Saved()
    rollouts_training.measure(rollouts_training.SMOKE, bench, saved)
    assert set(saved) == {f"temperature {t}, {slots} slots" for t in ("1", "0.6") for slots in (1, 2)}
    for cell in saved.values():
        for epoch in cell["epochs"].values():
            check_same(epoch["same"])
    goals = {one["name"]: one["goal"] for one in saved["temperature 0.6, 1 slots"]["goals"]}
    assert goals == {"epoch 1, speculative / plain": 0.98, "epoch 2, speculative / plain": 1.45}
    two_slots = saved["temperature 1, 2 slots"]
    assert two_slots["epochs"]["1"]["subjects"]["plain"]["tail"]["tokens"] > 0
    assert max(two_slots["timelines"]["plain"]["sequences"]) == 2


def test_grounded_work(bench: Bench) -> None:
    saved = Saved()
    rollouts_grounded.measure(rollouts_grounded.SMOKE, bench, saved)
    for cell in saved.values():
        check_same(cell["same"])
    assert [one["goal"] for one in saved["temperature 0, 1 slots"]["goals"]] == [1.9]
    assert saved["temperature 1, 1 slots"]["goals"] == []


def test_the_hosts_time_and_the_time_to_first_token(bench: Bench) -> None:
    settings = rollouts_overheads.SMOKE
    cell = rollouts_overheads.host_time(settings, bench, 2)
    for figures in cell["subjects"].values():
        assert 0 < figures["host_ms"] < figures["step_ms"]
    seconds = rollouts_overheads.first_token(settings, bench)["seconds"]
    assert set(seconds) == {"idle", "busy"}
    assert min(seconds.values()) > 0


def test_memory_is_looked_at_ten_times() -> None:
    looks = rollouts_overheads.resident_memory(500)["looks"]
    assert [look["requests"] for look in looks] == list(range(50, 501, 50))


def test_growth_of_memory_is_measured_from_the_second_look() -> None:
    found = {"looks": [{"requests": n, "bytes": size} for n, size in ((1, 50), (2, 100), (3, 103))]}
    cell = rollouts_overheads._memory_cell(found)
    assert cell["growth"] == pytest.approx(0.03)
    assert not cell["goals"][0]["met"]


def test_the_program_measures_stores_and_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "rollouts.json"
    arguments = ["--smoke", "--output", str(output), "--plots", str(tmp_path)]
    rollouts.main([*arguments, "--parts", "3", "--rounds", "1"])
    before = json.loads(output.read_text())["parts"]["3"]["cells"]
    rollouts.main([*arguments, "--parts", "5", "--slots", "1"])
    parts = json.loads(output.read_text())["parts"]
    assert parts["3"]["cells"] == before  # another part's measurement is kept
    assert set(parts["5"]["cells"]) == {"temperature 0, 1 slots", "temperature 1, 1 slots"}
    assert parts["5"]["cells"]["temperature 0, 1 slots"]["settings"]["slots"] == [1]
    assert "speculative / plain" in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("*.png")} >= {
        "rollouts_throughput.png",
        "rollouts_timeline.png",
    }
    assert "### 5. " in rollouts_tables.markdown(parts)


def test_a_part_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rollouts.main(["--parts", "1,9", "--smoke"])
    assert "got 9" in capsys.readouterr().err


# What they share


def test_all_engines_share_compiled_steps(bench: Bench) -> None:
    configs = [
        bench.subject(2, draft, warm_up=False).engine
        for draft in (PLAIN, SPECULATIVE, DraftConfig(gate=False, max_nodes=32))
    ]
    widths = {engine._core.executor.pages_per_sequence for engine in configs}
    assert len(widths) == 1
    assert len({engine._core.executor.num_pages for engine in configs}) == 1


def test_a_play_from_a_stored_history_starts_from_that_history(bench: Bench, tmp_path: Path) -> None:
    subject = bench.subject(1, DraftConfig(gate=False, max_nodes=8), warm_up=False)
    works = [Work(POLICY.prompts["math"][0], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))]
    subject.forget()
    subject.play(works)
    subject.engine.save_history(tmp_path / "history")
    known = [subject.play_compiled(works, tmp_path / "history") for _ in range(2)]
    unknown = subject.play_compiled(works, None)
    assert known[0].stats.accepted == known[1].stats.accepted > unknown.stats.accepted
    assert known[0].tokens == unknown.tokens


def test_a_trace_adds_up_to_the_play(bench: Bench) -> None:
    subject = bench.subject(2, PLAIN)
    sampling = SamplingParams(max_tokens=6, ignore_eos=True, n=3, seed=1)
    traced = subject.play([Work(POLICY.prompts["math"][0], sampling)], trace=True)
    assert sum(step.tokens for step in traced.steps) == traced.num_tokens == 18
    assert [step.end_s for step in traced.steps] == sorted(step.end_s for step in traced.steps)
    assert traced.steps[-1].running == traced.steps[-1].waiting == 0


def test_the_tail_begins_when_nobody_waits_and_a_slot_is_free() -> None:
    steps = tuple(
        Step(float(end), tokens=running, drafted=0, sequences=running, running=running, waiting=waiting)
        for end, running, waiting in ((1, 2, 1), (2, 1, 1), (3, 2, 0), (4, 1, 0), (5, 1, 0), (7, 0, 0))
    )
    assert play(7.0, steps=steps).tail(2) == (1, 3.0)
    assert play(7.0, steps=steps[:3]).tail(2) == (0, 0.0)
    assert play(7.0).tail(2) == (0, 0.0)


def test_rounds_alternate_who_goes_first() -> None:
    assert [in_order(["a", "b", "c"], number) for number in range(3)] == [
        ["a", "b", "c"],
        ["c", "b", "a"],
        ["a", "b", "c"],
    ]


def test_ratios_are_taken_within_rounds() -> None:
    ours = [play(1.0, [1, 2]), play(4.0, [1, 2]), play(1.0, [1, 2])]
    others = [play(2.0, [1, 2]), play(8.0, [1, 2]), play(0.5, [1, 2])]
    assert median_ratio(ours, others) == 2.0
    assert summary(ours)["tokens_per_s"] == 2.0


def test_completions_are_identical_when_all_subjects_agree() -> None:
    played = {
        "one": [play(1.0, [1, 2], [3]), play(1.0, [4])],
        "two": [play(1.0, [1, 2], [9]), play(1.0, [4])],
        "three": [play(1.0, [1, 2], [3]), play(1.0, [4])],
    }
    assert identical(played) == {"completions": 3, "identical": 2}


def test_a_timeline_holds_all_tokens() -> None:
    steps = tuple(Step(0.1 * (n + 1), 2, 3, 2, 2, 0) for n in range(10))
    lines = rollouts_training.timeline(play(1.0, steps=steps), bins=4)
    assert lines["sequences"] == [2.0] * 4
    assert lines["nodes"] == [1.5] * 4
    assert lines["tokens_per_s"] == pytest.approx([20.0] * 4)


def test_depths_are_added_up() -> None:
    stats = [
        EngineStats(drafted_by_depth=[3, 2], accepted_by_depth=[1]),
        EngineStats(),
        EngineStats(drafted_by_depth=[1], accepted_by_depth=[1]),
    ]
    assert rollouts_training.by_depth(stats) == {"drafted_by_depth": [4, 2], "accepted_by_depth": [2]}


def test_batches_that_change() -> None:
    slots, works, history = rollouts_changing.long_tail(POLICY, 96)
    lengths = [work.sampling.max_tokens for work in works]
    assert (len(works), slots, lengths[0], lengths[-1]) == (16, 16, 12, 192)
    assert lengths == sorted(lengths)
    assert not {work.sampling.seed for work in works} & {work.sampling.seed for work in history}
    slots, works, history = rollouts_changing.novel_then_repetitive(POLICY, 96)
    novel, known = works[:slots], works[slots:]
    assert all(work.sampling.temperature == 1.5 for work in novel)
    assert {tuple(work.prompt) for work in known} == {tuple(work.prompt) for work in history}
    assert not {tuple(work.prompt) for work in novel} & {tuple(work.prompt) for work in history}


def test_prompts_of_the_untrained_policy_have_nothing_in_common() -> None:
    prompts = untrained(dataclasses.replace(UNTRAINED, num_layers=1)).prompts["math"]
    pairs = [pair for prompt in prompts for pair in itertools.pairwise(prompt)]
    assert len(pairs) == len(set(pairs))
    assert {len(prompt) for prompt in prompts} <= set(range(16, 49))


@pytest.mark.model
def test_the_policy_of_the_issue_has_its_prompts() -> None:
    policy = smollm2()
    assert {kind: len(prompts) for kind, prompts in policy.prompts.items()} == {
        "math": 56,
        "grounded": 7,
        "grounded, again": 7,
    }
    longest = max(len(prompt) for prompts in policy.prompts.values() for prompt in prompts)
    assert longest + 2 * rollouts_budget.FULL.max_tokens <= policy.max_seq_len


# Results


def test_goals_say_whether_they_are_met() -> None:
    assert goal("x", 1.0, 0.97)["met"]
    assert not goal("x", 0.0501, 0.05, at_least=False)["met"]
    assert goal_text(goal("x", 0.9, 0.97)) == "0.9 (at least 0.97, missed)"
    assert goal_text(goal("x", 0.01, 0.05, at_least=False)) == "0.01 (at most 0.05)"


def test_a_cell_replaces_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first = Results(path, MACHINE)
    first.put("1", "One", "a", {"rounds": 1}, {"goals": [], "value": 1})
    first.put("1", "One", "b", {"rounds": 1}, {"goals": [], "value": 2})
    Results(path, MACHINE).put("1", "One", "b", {"rounds": 9}, {"goals": [], "value": 3})
    cells = json.loads(path.read_text())["parts"]["1"]["cells"]
    assert {name: cell["value"] for name, cell in cells.items()} == {"a": 1, "b": 3}
    assert cells["a"]["settings"]["rounds"] == 1
    assert cells["b"]["settings"]["rounds"] == 9
    assert cells["b"]["machine"] == MACHINE

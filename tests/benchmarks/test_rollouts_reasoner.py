"""Part 4 of the rollouts benchmark, on a single problem."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rollouts_reasoner
from benchmarks.rollouts_play import TINY, Bench, Play, untrained
from rollout_spec.stats import EngineStats


def test_epochs_are_measured_and_weights_change(tmp_path: Path) -> None:
    saved: dict[str, dict[str, Any]] = {}
    bench = Bench(untrained(TINY), tmp_path, lambda text: None)
    rollouts_reasoner.measure(rollouts_reasoner.SMOKE, bench, saved.__setitem__)
    versions = {subject.engine.weight_version for subject in bench._subjects.values()}
    bench.close()
    (cell,) = json.loads(json.dumps(list(saved.values())))
    assert list(saved) == ["2 slots"]
    assert versions == {3}  # the checkpoint, and a step after each of the two epochs
    assert cell["goals"] == []
    for epoch in cell["epochs"].values():
        assert epoch["same"] == {"completions": 2, "identical": 2}
        assert 0 <= epoch["mean_reward"] <= 1
    assert cell["epochs"]["2"]["subjects"]["speculative"]["acceptance_length"] > 1.5
    assert cell["epochs"]["2"]["subjects"]["plain"]["nodes_per_step"] == 0


def play(seconds: float) -> Play:
    return Play(seconds, [[1, 2]], EngineStats(decode_steps=1, generated_tokens=2))


def test_the_first_epoch_is_left_out_of_the_goal() -> None:
    played = {
        "plain": [[play(1.0)], [play(4.0)], [play(2.0)]],
        "speculative": [[play(9.0)], [play(1.0)], [play(2.0)]],
    }
    cell = rollouts_reasoner.make_cell(played, [[0.5], [0.6], [0.7]], slots=8, num_problems=1)
    assert cell["epochs"]["2"]["ratio"] == pytest.approx(4.0)
    assert cell["ratio"] == pytest.approx(2.0)
    assert cell["goals"][0]["met"]
    assert cell["epochs"]["3"]["mean_reward"] == 0.7

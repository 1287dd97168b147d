"""The projection: the real engine on a simulated clock, whose plain steps take exactly their rooflines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from rollout_spec.chips import parse_slice
from rollout_spec.cli import project as command
from rollout_spec.cli.main import main
from rollout_spec.draft.config import DraftConfig
from rollout_spec.errors import HistoryError
from rollout_spec.fitting import roofline
from rollout_spec.projection import Projected, project
from rollout_spec.recorded import Recorded, Workload
from rollout_spec.sharding import MeshLayout
from rollout_spec.step_inputs import StepShape
from tests.helpers.tiny_models import CONFIGS

WHERE = parse_slice("v5e-1")


@pytest.fixture(scope="module")
def layout() -> MeshLayout:
    return MeshLayout(Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("expert", "model")), CONFIGS["llama"])


def rollouts(*, epochs: int, prompts: int, samples: int, length: int, repeats: bool) -> Workload:
    """Completions that are the same for all samples and epochs of a prompt, or have nothing in common."""
    random, made = np.random.default_rng(0), []
    for number in range(prompts):
        prompt = random.integers(0, 41, 8).astype(np.int32)
        own = random.integers(0, 41, length).astype(np.int32)
        for epoch in range(epochs):
            for sample in range(samples):
                tokens = own if repeats else random.integers(0, 41, length).astype(np.int32)
                made.append(Recorded(epoch, number, sample, prompt, tokens))
    return Workload("made", tuple(made), np.empty(0, np.int32))


def projected(layout: MeshLayout, workload: Workload, *slots: int) -> list[Projected]:
    # Without the gate: beside steps of a tiny model the host takes for ever, and the budget would draft nothing.
    return list(project(layout, WHERE, workload, slots, DraftConfig(max_nodes=7, gate=False)))


def test_a_plain_sequence_takes_the_roofline_of_each_of_its_steps(layout: MeshLayout) -> None:
    workload = rollouts(epochs=1, prompts=1, samples=1, length=20, repeats=False)
    (found,) = projected(layout, workload, 1)
    one = roofline(layout, WHERE, StepShape(1, 1, 1))
    decoding = sum(one.seconds(8 + emitted) for emitted in range(1, 20))
    prompt = roofline(layout, WHERE, StepShape(8, 1, 8)).seconds(8)
    assert found.plain.tokens == 20
    assert found.plain.acceptance_length == 1.0
    assert found.plain.seconds - found.plain.host_s == pytest.approx(decoding + prompt, rel=0.02)


def test_what_repeats_is_projected_in_fewer_steps_and_the_same_tokens(layout: MeshLayout) -> None:
    workload = rollouts(epochs=2, prompts=3, samples=2, length=40, repeats=True)
    for found in projected(layout, workload, 1, 4):
        assert found.plain.tokens == found.speculative.tokens == 3 * 2 * 40
        assert found.speculative.acceptance_length > 2.0
        assert found.plain.nodes_per_step == 0.0


def test_a_long_tail_is_the_time_with_few_running(layout: MeshLayout) -> None:
    even = rollouts(epochs=1, prompts=4, samples=1, length=30, repeats=False)
    *others, long = even.completions
    cut = [dataclasses.replace(one, tokens=one.tokens[:5]) for one in others]
    for workload, low, high in ((Workload("tailed", (*cut, long), even.warm), 0.5, 1.0), (even, 0.0, 0.2)):
        (found,) = projected(layout, workload, 4)
        assert low <= found.plain.tail_s / found.plain.seconds <= high


def test_rollouts_of_another_vocabulary_are_refused(layout: MeshLayout) -> None:
    one = Recorded(0, 0, 0, np.array([1], np.int32), np.array([5000], np.int32))
    with pytest.raises(HistoryError, match="token 5000"):
        projected(layout, Workload("foreign", (one,), np.empty(0, np.int32)), 1)


def test_every_line_says_projected(
    layout: MeshLayout, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_spec.fitting.slice_devices", lambda where: None)
    monkeypatch.setattr("rollout_spec.fitting.choose_mesh", lambda model, devices: layout)
    model = Path(command.__file__).parents[2] / "benchmarks" / "models" / "qwen3-8b.json"
    history = tmp_path / "rollouts.jsonl"
    history.write_text(json.dumps({"prompt_token_ids": [1, 2], "completions": [[3, 4, 5]] * 2}))
    arguments = ["--model", str(model), "--chip", "v5e-1", "--history", str(history), "--slots", "1", "2"]
    for extra, lines in (([], 3), (["--json"], 2)):
        assert main(["project", *arguments, *extra]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert len(printed) == lines
        assert all("projected" in line for line in printed)

"""The workload with policy drift: what drifts, and what is reported of it."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import drift, replay
from rollout_spec.draft import TrieDrafter
from rollout_spec.recorded import Recorded


def agreement(name: str, one: int, other: int) -> float:
    """Share of tokens that are the same in two versions' completions, of all prompts and samples."""
    made = drift.drifting(name, drift.STRENGTHS[name], versions=4)
    return float(
        np.mean([a.tokens == b.tokens for a, b in zip(made.epoch(one), made.epoch(other), strict=True)])
    )


def test_what_drifts_stays_drifted_and_more_so_the_stronger() -> None:
    still, gentle, strong = (agreement(name, 0, 3) for name in drift.STRENGTHS)
    assert still > gentle + 0.02 > strong + 0.05
    assert agreement("strong drift", 0, 1) > strong


def test_without_drift_versions_differ_as_samples_do() -> None:
    assert agreement("no drift", 0, 3) == pytest.approx(agreement("no drift", 1, 2), abs=0.01)


def test_the_same_text_is_made_every_time() -> None:
    one, two = (drift.drifting("x", 0.4, versions=2) for _ in range(2))
    for a, b in zip(one.completions, two.completions, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()


def test_each_version_is_announced_before_its_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []

    class Listening(TrieDrafter):
        def new_version(self, version: int) -> None:
            told.append(version)
            super().new_version(version)

    def replayed(drafter: replay.ReplayDrafter, completions: list[Recorded]) -> replay.Replay:
        told.append("replay")
        steps = 10 * (completions[0].epoch + 1)
        return replay.Replay(steps, 120, 0, 0.0, 0.0, 0.0)

    monkeypatch.setattr(drift, "TrieDrafter", Listening)
    monkeypatch.setattr(replay, "replay", replayed)
    made = drift.drifting("x", 0.4, versions=4)
    # The last half of the versions, 2 and 3, take 30 and 40 steps for 120 tokens each.
    assert drift.last_tokens_per_step(made, 0.9) == pytest.approx(240 / 70)
    assert told == [0, "replay", 1, "replay", 2, "replay", 3, "replay"]


def test_ratios_are_to_no_ageing() -> None:
    never, aged = drift.measure([1.0, 0.5], ["rollouts_qwen"], lambda _: None)
    assert (never.version_decay, never.ratio) == (1.0, 1.0)
    assert aged.ratio == pytest.approx(aged.tokens_per_step / never.tokens_per_step)
    assert drift.table([never, aged]).row_count == 1

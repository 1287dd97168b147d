"""Plots of rollouts where nothing was drafted: a normal answer, so they must be drawn too."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rollouts_plots import _acceptance


@pytest.mark.parametrize("drafted", [[], [0, 0], [3, 1]])
def test_acceptance_is_drawn_whatever_was_drafted(drafted: list[int], tmp_path: Path) -> None:
    by_depth = {"drafted_by_depth": drafted, "accepted_by_depth": [0] * len(drafted)}
    cell = {"slots": 1, "temperature": 1.0, "by_depth": by_depth}
    assert _acceptance([cell], tmp_path / "plot.png").stat().st_size > 0

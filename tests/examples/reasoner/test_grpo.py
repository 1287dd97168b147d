"""The run itself, shortened, and what its rows are padded to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.reasoner import grpo


def test_rows_hold_whole_solutions_and_the_longest_text() -> None:
    assert grpo.row_lengths(240) == (199, 238, 282)
    assert grpo.row_lengths(196) == (199, 238)


def test_a_short_run_keeps_tokens_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert grpo.main(["--quick", "--steps", "2", "--output", str(tmp_path)]) == 0
    assert "Right answers to held-out problems" in capsys.readouterr().out
    assert (tmp_path / "reasoner.png").is_file()
    stored = json.loads((tmp_path / "reasoner.json").read_text())
    assert set(stored["settings"]["pass_rates"]["training"]) == {"before", "after"}
    first, second = stored["steps"]
    assert first["tokens_identical"]
    assert second["tokens_identical"]
    assert second["logprob_gap"] < 1e-3
    assert (first["epoch"], second["epoch"]) == (0, 1)
    assert second["acceptance_length"] >= 1.0  # by how much the budget decides, by times

"""The demo's report: whole-run figures weigh steps rightly, and the files are what they say."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from examples.report import StepRecord, print_table, save_json, save_plot


def record(
    step: int, *, tokens: int, rollout_s: float, acceptance: float, identical: bool = True
) -> StepRecord:
    return StepRecord(
        step=step,
        epoch=0,
        mean_reward=0.5,
        tokens=tokens,
        rollout_s=rollout_s,
        plain_s=4.0,
        acceptance_length=acceptance,
        tokens_identical=identical,
        train_s=1.0,
        update_weights_s=0.1,
        loss=0.0,
        logprob_gap=1e-6,
    )


def table(records: list[StepRecord]) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    print_table(records, console)
    return console.file.getvalue().splitlines()


def test_last_line_is_about_the_whole_run() -> None:
    lines = table(
        [
            record(0, tokens=100, rollout_s=1.0, acceptance=1.0),
            record(1, tokens=300, rollout_s=3.0, acceptance=3.0),
        ]
    )
    # 400 tokens in 4 s, of 100 + 100 sequence steps; plain 8 s.
    assert lines[-1].split() == ["all", "0.500", "400", "4.0", "100", "2.00", "8.0", "50", "2.00x", "yes"]
    assert not any("…" in line for line in lines)


def test_a_changed_token_stands_out() -> None:
    lines = table([record(0, tokens=9, rollout_s=1.0, acceptance=1.0, identical=False)])
    assert lines[-1].endswith("NO")


def test_plot_is_a_png_and_numbers_come_back(tmp_path: Path) -> None:
    records = [record(step, tokens=10, rollout_s=1.0, acceptance=1.5) for step in range(2)]
    save_plot(records, tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")
    save_json(records, {"epochs": 1}, tmp_path / "other" / "numbers.json")
    stored = json.loads((tmp_path / "other" / "numbers.json").read_text())
    assert stored["settings"] == {"epochs": 1}
    assert [StepRecord(**step) for step in stored["steps"]] == records

"""What the GRPO demo shows at its end: a table, a plot and the numbers as JSON."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """What one training step did. Times in seconds; `plain_s` is the same rollout with drafting off."""

    step: int
    epoch: int
    mean_reward: float
    tokens: int
    rollout_s: float
    plain_s: float
    acceptance_length: float
    tokens_identical: bool
    train_s: float
    update_weights_s: float
    loss: float
    logprob_gap: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.rollout_s

    @property
    def plain_tokens_per_s(self) -> float:
        return self.tokens / self.plain_s


def print_table(records: Sequence[StepRecord], console: Console) -> None:
    """One line a step, and a line for the whole run; 80 columns are enough."""
    table = Table(
        title="Trie drafting; plain: the same prompts and seeds without",
        box=None,
        collapse_padding=True,
        pad_edge=False,
        header_style="bold",
    )
    for column in ("step", "epoch", "mean\nreward", "tokens", "rollout\ns", "tokens\nper s"):
        table.add_column(column, justify="right")
    for column in ("accept.\nlength", "plain\ns", "tokens\nper s", "speed-\nup", "tokens\nidentical"):
        table.add_column(column, justify="right")
    for record in records:
        table.add_row(str(record.step), str(record.epoch), *_cells([record]))
    table.add_row("all", "", *_cells(records), style="bold")
    console.print(table)


def _cells(records: Sequence[StepRecord]) -> list[str]:
    tokens = sum(record.tokens for record in records)
    rollout_s, plain_s = (
        sum(getattr(record, name) for record in records) for name in ("rollout_s", "plain_s")
    )
    # Tokens a sequence and step, so steps are what averages.
    sequence_steps = sum(record.tokens / record.acceptance_length for record in records)
    return [
        f"{sum(record.mean_reward for record in records) / len(records):.3f}",
        str(tokens),
        f"{rollout_s:.1f}",
        f"{tokens / rollout_s:.0f}",
        f"{tokens / sequence_steps:.2f}",
        f"{plain_s:.1f}",
        f"{tokens / plain_s:.0f}",
        f"{plain_s / rollout_s:.2f}x",
        "yes" if all(record.tokens_identical for record in records) else "NO",
    ]


def save_plot(records: Sequence[StepRecord], path: Path) -> None:
    """Reward, throughput and acceptance length over the steps, as PNG; epochs are set apart by lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    reward, speed, acceptance = figure.subplots(1, 3)
    steps = [record.step for record in records]
    reward.plot(steps, [record.mean_reward for record in records], "o-", color="tab:green")
    reward.set(title="Mean reward", ylim=(0, None))
    speed.plot(steps, [record.tokens_per_s for record in records], "o-", label="trie drafting")
    speed.plot(steps, [record.plain_tokens_per_s for record in records], "s--", label="drafting off")
    speed.set(title="Rollout throughput (tokens/s)", ylim=(0, None))
    speed.legend()
    acceptance.plot(steps, [record.acceptance_length for record in records], "o-", color="tab:purple")
    acceptance.axhline(1.0, linestyle="--", color="gray")
    acceptance.set(title="Acceptance length (tokens a step)", ylim=(0.9, None))
    turns = [after.step - 0.5 for before, after in itertools.pairwise(records) if after.epoch > before.epoch]
    for axes in (reward, speed, acceptance):
        axes.set_xlabel("step (new weights each)")
        axes.grid(alpha=0.3, axis="y")
        for turn in turns:
            axes.axvline(turn, color="gray", linewidth=0.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def save_json(records: Sequence[StepRecord], settings: dict, path: Path) -> None:
    """Settings and all records."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"settings": settings, "steps": [dataclasses.asdict(record) for record in records]}
    path.write_text(json.dumps(content, indent=2) + "\n")

"""Plots of the rollouts benchmark's stored results: throughput over slots, acceptance by depth, a batch that drains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = {1.0: "tab:blue", 0.6: "tab:orange"}


def draw(parts: dict[str, Any], folder: Path) -> list[Path]:
    """Draws what the stored parts suffice for, as rollouts_*.png; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    training = list(parts.get("3", {"cells": {}})["cells"].values())
    if training:
        drawn.append(_throughput(parts, training, folder / "rollouts_throughput.png"))
    if any(cell["by_depth"]["drafted_by_depth"] for cell in training):
        drawn.append(_acceptance(training, folder / "rollouts_acceptance.png"))
    if any(cell["slots"] > 1 for cell in training):
        drawn.append(_timeline(training, folder / "rollouts_timeline.png"))
    return drawn


def _throughput(parts: dict[str, Any], training: list[dict[str, Any]], path: Path) -> Path:
    """Plain and speculative over slots: text that never repeats, and the second epoch of RL rollouts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    novel, rollouts = figure.subplots(1, 2)
    cells = [
        cell
        for cell in parts.get("1", {"cells": {}})["cells"].values()
        if cell["text"].startswith("temperature")
    ]
    cells.sort(key=lambda cell: cell["slots"])
    for name, style in (("plain", "s--"), ("speculative", "o-")):
        speeds = [cell["subjects"][name]["tokens_per_s"] for cell in cells]
        novel.plot([cell["slots"] for cell in cells], speeds, style, label=name)
    novel.set(title="Text that never repeats", xlabel="requests at once", ylabel="tokens/s")
    for temperature in sorted({cell["temperature"] for cell in training}, reverse=True):
        chosen = sorted(
            (cell for cell in training if cell["temperature"] == temperature), key=lambda c: c["slots"]
        )
        for name, style in (("plain", "s--"), ("speculative", "o-")):
            rollouts.plot(
                [cell["slots"] for cell in chosen],
                [cell["epochs"]["2"]["subjects"][name]["tokens_per_s"] for cell in chosen],
                style,
                color=COLOURS.get(temperature),
                label=f"{name}, temperature {temperature:g}",
            )
    rollouts.set(title="RL rollouts, second epoch", xlabel="slots", ylabel="tokens/s")
    for axes in (novel, rollouts):
        ticks = sorted({cell["slots"] for cell in (cells if axes is novel else training)})
        if not ticks:  # that part is not measured yet, and an axis without data can't be logarithmic
            continue
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)
    return path


def _acceptance(training: list[dict[str, Any]], path: Path) -> Path:
    """Share of the nodes verified at each depth that was accepted, and how many nodes there were."""
    from matplotlib.figure import Figure

    cells = [cell for cell in training if cell["by_depth"]["drafted_by_depth"]]
    figure = Figure(figsize=(11, 4), layout="constrained")
    share, counts = figure.subplots(1, 2)
    for cell in cells:
        drafted, accepted = (cell["by_depth"][name] for name in ("drafted_by_depth", "accepted_by_depth"))
        depths = range(1, len(drafted) + 1)
        label = f"{cell['slots']} slots, temperature {cell['temperature']:g}"
        rates = [a / d if d else float("nan") for a, d in zip(accepted, drafted, strict=False)]
        share.plot(depths, rates, "o-", label=label)
        counts.plot(depths, drafted, "o-", label=label)
    share.set(title="Accepted share of draft nodes", xlabel="depth below the root", ylim=(0, 1))
    counts.set(title="Draft nodes verified", xlabel="depth below the root", yscale="symlog")
    for axes in (share, counts):
        axes.grid(alpha=0.3)
    if cells:
        share.legend()
    figure.savefig(path, dpi=110)
    return path


def _timeline(training: list[dict[str, Any]], path: Path) -> Path:
    """A batch from its beginning to its end, of the cell with most slots and the lowest temperature."""
    from matplotlib.figure import Figure

    cell = max(training, key=lambda cell: (cell["slots"], -cell["temperature"]))
    figure = Figure(figsize=(9, 7), layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    for name, style in (("plain", "--"), ("speculative", "-")):
        lines = cell["timelines"][name]
        for axes, column in zip(panels, ("sequences", "nodes", "tokens_per_s"), strict=True):
            axes.plot(lines["seconds"], lines[column], style, label=name)
    titles = ("Running sequences", "Draft nodes a sequence and step", "Tokens/s")
    for axes, title in zip(panels, titles, strict=True):
        axes.set(title=title, ylim=(0, None))
        axes.grid(alpha=0.3)
    panels[0].legend()
    panels[-1].set_xlabel(
        f"seconds: a batch drains ({cell['slots']} slots, temperature {cell['temperature']:g}, second epoch)"
    )
    figure.savefig(path, dpi=110)
    return path

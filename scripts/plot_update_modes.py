"""Draws what happens to running and waiting requests in each mode of `update_weights`.

python -m scripts.plot_update_modes [docs/images/update_modes.png]
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

OLD, NEW, RECOMPUTE, WAIT = "#4c78a8", "#f58518", "#b279a2", "#e6e6e6"
MEANING = {
    OLD: "tokens of the old weights",
    NEW: "tokens of the new weights",
    RECOMPUTE: "its cache is computed again",
    WAIT: "waits",
}
CALLED, STAGED = 4.0, 5.5
# By mode: when the swap is, and bars (start, end, colour) of a request that runs, and of one that comes while staging.
BARS: dict[str, tuple[float, list[tuple[float, float, str]], list[tuple[float, float, str]]]] = {
    "drain": (8.0, [(0, 8, OLD)], [(4.6, 8, WAIT), (8, 12, NEW)]),
    "interrupt": (
        STAGED,
        [(0, CALLED, OLD), (CALLED, STAGED, WAIT)],
        [(4.6, STAGED, WAIT), (STAGED, 10, NEW)],
    ),
    "inflight": (
        STAGED,
        [(0, STAGED, OLD), (STAGED, 6.4, RECOMPUTE), (6.4, 11, NEW)],
        [(4.6, STAGED, OLD), (STAGED, 5.9, RECOMPUTE), (5.9, 11, NEW)],
    ),
    "inflight_keep": (
        STAGED,
        [(0, STAGED, OLD), (STAGED, 10.1, NEW)],
        [(4.6, STAGED, OLD), (STAGED, 10.5, NEW)],
    ),
}


def main(path: Path) -> None:
    figure, axes = plt.subplots(len(BARS), 1, figsize=(9, 6.2), sharex=True)
    for axis, (mode, (swap, running, coming)) in zip(axes, BARS.items(), strict=True):
        for row, bars in enumerate((coming, running)):
            for start, end, colour in bars:
                axis.barh(row, end - start, left=start, height=0.55, color=colour)
        axis.axvspan(CALLED, STAGED, color="black", alpha=0.08)
        axis.axvline(swap, color="black", linewidth=1.5)
        axis.text(swap + 0.08, 1.42, "swap", fontsize=8, va="bottom")
        axis.text(CALLED + 0.05, -0.62, "staging", fontsize=8, va="bottom")
        if mode == "interrupt":
            axis.text(STAGED + 0.1, 1, 'ends, finish_reason "abort"', fontsize=8, va="center")
        axis.set_yticks([0, 1], ["comes meanwhile", "runs"], fontsize=8)
        axis.set_ylim(-0.7, 1.75)
        axis.set_xlim(0, 12)
        axis.set_xticks([])
        axis.set_title(mode, loc="left", fontsize=10, family="monospace")
        for side in ("top", "right", "bottom"):
            axis.spines[side].set_visible(False)
    axes[-1].set_xlabel("time (not to scale)")
    handles = [Patch(color=colour, label=meaning) for colour, meaning in MEANING.items()]
    figure.legend(handles=handles, loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images/update_modes.png"))

"""Whether ageing the history by weight version helps while the policy drifts, and what it costs where it doesn't.

    python -m benchmarks.drift [--decays 1,0.9,0.8]

Made to drift: variants of twelve recorded documents, eight a version over six weight versions. From one version to the
next a share of the places with alternatives comes to prefer another one for good, so that what was learnt of them
misleads. The recorded workloads of two epochs are replayed too, with a weight update between the epochs, which their
text need not show. The same text goes through a drafter for each value of `DraftConfig.version_decay`; reported are the
tokens per step of the last versions, and their ratio to those of a drafter that never ages.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import replay
from benchmarks.drafter_text import ALTERNATIVES, Variants, Variation, workload
from rollout_spec.draft import DraftConfig, TrieDrafter
from rollout_spec.recorded import Workload, load_workload

LENGTH = 480
VERSIONS = 6
SAMPLES = 8
STRENGTHS = {"no drift": 0.0, "gentle drift": 0.1, "strong drift": 0.4}
"""Share of the places that come to prefer another alternative at an update."""

RECORDED = ("easy", "hard", "rollouts", "rollouts_t06", "rollouts_qwen")
WORKLOADS = (*STRENGTHS, *RECORDED)
WORST_RATIO = 0.99
NEVER = 1.0
DEFAULT_DECAYS = (NEVER, DraftConfig().version_decay)


@dataclass(frozen=True)
class Aged:
    """Tokens per step over the last versions of a workload; ratio: to no ageing."""

    workload: str
    version_decay: float
    tokens_per_step: float
    ratio: float


def drifting(name: str, drift: float, *, seed: int = 0, versions: int = VERSIONS) -> Workload:
    """Variants of the documents behind the workload "hard", with places taken from the text of "natural"."""
    recorded = load_workload(replay.FOLDER / "hard.npz")
    first = [one for one in recorded.epoch(0) if one.sample == 0]
    documents = np.stack([one.tokens[:LENGTH] for one in first])
    size = (ALTERNATIVES - 1) * documents.size
    others = load_workload(replay.FOLDER / "natural.npz").warm[:size].reshape(-1, *documents.shape)
    variation = Variation(places=0.12, noise=0.02, preference=0.8, drift=drift)
    text = Variants(np.concatenate([documents[None], others]), seed=seed, variation=variation)
    prompts = np.stack([one.prompt for one in first])
    return workload(name, prompts, text, samples=SAMPLES, epochs=versions)


def last_tokens_per_step(whole: Workload, version_decay: float) -> float:
    """Of the last half of the epochs, each under weights of its own."""
    drafter = TrieDrafter(DraftConfig(version_decay=version_decay))
    replays = []
    for version in whole.epochs:
        drafter.new_version(version)
        replays.append(replay.replay(drafter, whole.epoch(version)))
    last = replays[len(replays) // 2 :]
    return sum(one.tokens for one in last) / sum(one.steps for one in last)


def load(name: str) -> Workload:
    """One of `WORKLOADS`, made or recorded."""
    if name in STRENGTHS:
        return drifting(name, STRENGTHS[name])
    return load_workload(replay.FOLDER / f"{name}.npz")


def measure(decays: Sequence[float], workloads: Sequence[str], say: Callable[[str], None]) -> list[Aged]:
    """Every workload with every decay."""
    measured = []
    for name in workloads:
        say(f"Weight updates on {name} ...")
        whole = load(name)
        never = last_tokens_per_step(whole, NEVER)
        for decay in decays:
            reached = never if decay == NEVER else last_tokens_per_step(whole, decay)
            measured.append(Aged(name, decay, reached, reached / never))
    return measured


def table(measured: Sequence[Aged]) -> Table:
    """A row for each workload, a column for each decay: tokens per step and the ratio to no ageing."""
    decays = sorted({one.version_decay for one in measured}, reverse=True)
    whole = Table("workload", title="Ageing by weight version, tokens per step", title_justify="left")
    for decay in decays:
        whole.add_column(f"decay {decay:g}", justify="right")
    for name in dict.fromkeys(one.workload for one in measured):
        row = {one.version_decay: one for one in measured if one.workload == name}
        whole.add_row(name, *(_cell(row[decay]) for decay in decays))
    return whole


def _cell(one: Aged) -> str:
    if one.version_decay == NEVER:
        return f"{one.tokens_per_step:.3f}"
    colour = "green" if one.ratio >= WORST_RATIO else "red"
    return f"{one.tokens_per_step:.3f} [{colour}]{one.ratio - 1:+.1%}[/]"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--decays", default=",".join(map(str, DEFAULT_DECAYS)), help="values of version_decay, by commas"
    )
    parsed = parser.parse_args(arguments)
    console = Console()
    decays = [float(value) for value in parsed.decays.split(",")]
    measured = measure(decays, WORKLOADS, lambda text: console.print(text, highlight=False))
    console.print(table(measured))


if __name__ == "__main__":
    main()

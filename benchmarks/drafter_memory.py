"""Bytes that a token held takes, by the drafter's account and the system's; the cap; saving and loading.

Run as a program, this module is the process whose memory is looked at from outside.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import replay
from benchmarks.drafter_held import (
    EPOCHS,
    SAMPLES,
    SPARE,
    Held,
    Sample,
    endless,
    ever_new,
    fill,
    random_tokens,
)
from benchmarks.drafter_measure import Figure, median_figure, power_of_ten, resident_bytes, wall_seconds_of
from benchmarks.drafter_text import LENGTH, RolloutText
from rollout_spec.draft import DraftConfig, TrieDrafter
from rollout_spec.recorded import load_workload

GOAL_BYTES = 150.0
SAVE_GOAL_S = 1.0
TEXTS = ("rollout-like text", "random tokens")
RANDOM_SPARE = 2.0
"""Capacity over random tokens held: `capacity_tokens` is meant for text that repeats itself; these don't."""


@dataclass(frozen=True)
class MemorySettings:
    """workloads: recorded ones. random: numbers of random tokens. resident: tokens held in a process of their own.

    cap: capacity_tokens where the cap is looked at. saved: tokens held when saving and loading.
    """

    workloads: tuple[str, ...] = replay.WORKLOADS
    random: tuple[int, ...] = (10**5, 10**6)
    resident: int = 10**6
    cap: int = 10**5
    saved: int = 10**6
    rounds: int = 3


FULL = MemorySettings()
QUICK = MemorySettings(workloads=("rollouts_qwen",), random=(20_000,), resident=10**5, cap=20_000, rounds=1)


def held_memory(helds: Sequence[Held[Any]]) -> list[Figure]:
    """Of drafters right after they were filled."""
    return [
        Figure(
            "rollout-like text",
            held.drafter.memory_bytes / held.drafter.tokens_learnt,
            "bytes/token",
            GOAL_BYTES if held.name == "trie" else None,
            held=held.tokens,
            drafter=held.name,
        )
        for held in helds
    ]


def measure_memory(settings: MemorySettings) -> list[Figure]:
    """Recorded workloads after their replay; random tokens; both kinds by the system's account; the cap."""
    figures = []
    for name in settings.workloads:
        workload = load_workload(replay.FOLDER / f"{name}.npz")
        drafter = TrieDrafter(
            DraftConfig(capacity_tokens=int(SPARE * (workload.num_tokens + len(workload.warm))))
        )
        for _ in replay.replay_epochs(drafter, workload):
            pass
        figures.append(_per_token(f"recorded: {name}, {power_of_ten(drafter.tokens_learnt)} held", drafter))
    for tokens in settings.random:
        drafter = TrieDrafter(DraftConfig(capacity_tokens=int(RANDOM_SPARE * tokens)))
        fill(drafter, random_tokens(), tokens)
        figures.append(_per_token("random tokens", drafter, held=tokens))
    for text in TEXTS:
        grown = _resident_growth(text, settings.resident)
        if grown is not None:
            name = f"{text}, resident memory of a process"
            figures.append(Figure(name, grown / settings.resident, "bytes/token", held=settings.resident))
    for text, samples in zip(TEXTS, (ever_new(), random_tokens()), strict=True):
        figures.append(_cap(text, samples, settings.cap))
    return figures


def measure_files(held: Held[TrieDrafter], rounds: int) -> list[Figure]:
    """Saving and loading. Raises RuntimeError if what was loaded drafts otherwise."""
    save_s, load_s = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history"
        for _ in range(rounds):
            save_s.append(wall_seconds_of(functools.partial(held.drafter.save, path)))
            loaded = TrieDrafter(held.drafter.config)
            load_s.append(wall_seconds_of(functools.partial(loaded.load, path)))
        size = path.stat().st_size
        sample = held.of_held_prompts(1)[0]
        drafts = []
        for drafter in (held.drafter, loaded):
            drafter.start("compared", sample.prompt, sample.group_id)
            (tree,) = drafter.propose(["compared"], [16])
            drafter.finish("compared")
            drafts.append((tree.tokens.tolist(), tree.parents.tolist()))
        if drafts[0] != drafts[1]:
            raise RuntimeError("the history drafts otherwise after it was saved and loaded")
    return [
        median_figure("save", save_s, "s", goal=SAVE_GOAL_S, held=held.tokens),
        median_figure("load", load_s, "s", goal=SAVE_GOAL_S, held=held.tokens),
        Figure("file", size / held.drafter.tokens_learnt, "bytes/token", held=held.tokens),
    ]


def _per_token(name: str, drafter: TrieDrafter, held: int | None = None) -> Figure:
    return Figure(name, drafter.memory_bytes / drafter.tokens_learnt, "bytes/token", GOAL_BYTES, held=held)


def _cap(text: str, samples: Iterator[Sample], capacity: int) -> Figure:
    """The most memory at any time while four times the capacity is learnt, over the capacity."""
    drafter = TrieDrafter(DraftConfig(capacity_tokens=capacity))
    most = 0
    while drafter.tokens_learnt < 4 * capacity:
        fill(drafter, samples, drafter.tokens_learnt + LENGTH)
        most = max(most, drafter.memory_bytes)
    name = f"{text}, most memory in learning 4 times the capacity of {power_of_ten(capacity)} tokens"
    return Figure(name, most / capacity, "bytes/token of capacity", GOAL_BYTES)


def _resident_growth(text: str, tokens: int) -> int | None:
    """Bytes that a process of its own grows by in filling a drafter."""
    command = [sys.executable, "-m", "benchmarks.drafter_memory", text, str(tokens)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    return json.loads(ended.stdout)


def _fill(text: str, tokens: int) -> int | None:
    """The same in this process."""
    if text == TEXTS[1]:
        spare, samples = RANDOM_SPARE, random_tokens()
    else:
        spare, samples = SPARE, endless(RolloutText(max(1, tokens // (EPOCHS * SAMPLES * LENGTH))))
    ready = list(itertools.islice(samples, 1 + tokens // LENGTH))
    fill(TrieDrafter(DraftConfig(capacity_tokens=LENGTH)), iter(ready), LENGTH)  # compiles
    before = resident_bytes()
    drafter = TrieDrafter(DraftConfig(capacity_tokens=int(spare * tokens)))
    fill(drafter, iter(ready), tokens)
    after = resident_bytes()
    return None if before is None or after is None else after - before


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", choices=TEXTS)
    parser.add_argument("tokens", type=int)
    parsed = parser.parse_args(arguments)
    print(json.dumps(_fill(parsed.text, parsed.tokens)))


if __name__ == "__main__":
    main()

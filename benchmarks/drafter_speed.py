"""How fast the drafter learns and proposes, by the number of tokens held, and the longest that a call stalls."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.drafter_held import (
    Batch,
    Held,
    LearningDrafter,
    Sample,
    endless,
    ever_new,
    fill,
    learn,
    make_trie,
)
from benchmarks.drafter_measure import (
    CACHE_BYTES,
    Caches,
    Figure,
    can_pin,
    cpu_seconds_of,
    median_figure,
    one_core,
    power_of_ten,
    wall_seconds_of,
)
from benchmarks.drafter_text import LENGTH, RolloutText
from rollout_spec.draft import DraftConfig, TrieDrafter

BATCH = 64
NODES = 16
ACCEPTED = 8
"""Tokens a call when a request's tokens are learnt as they are accepted."""

COMPLETIONS_LEARNT = 10
"""In each measurement of learning; few, so that the number of tokens held stays about the same."""

LEARNING_GOALS = {10**5: 600_000.0, 10**7: 300_000.0}
WARM_GOAL_US = 20.0
FIRST_TOUCH_GOAL_US = 60.0
STALL_GOAL_MS = 1.0

WARM, FIRST_TOUCH, PROPOSED = "a proposal, warm", "a proposal at first touch", "nodes of a proposal"
UNITS = {WARM: "us", FIRST_TOUCH: "us", PROPOSED: "nodes"}

SMALL = 20_000
"""Tokens held by the drafter that brings the code back to emptied caches."""


@dataclass(frozen=True)
class SpeedSettings:
    """held: tokens held. rounds: turns of every size. calls: of propose in a turn, on warm contexts.

    first_touches: calls in a turn that each come after the caches were emptied. stall_capacity: capacity_tokens where
    stalls are looked for. stall_calls: single-token calls at that capacity. cache_bytes: streamed through to empty
    the caches.
    """

    held: tuple[int, ...] = (10**5, 10**6, 10**7)
    rounds: int = 5
    calls: int = 20
    first_touches: int = 3
    stall_capacity: int = 500_000
    stall_calls: int = 200_000
    cache_bytes: int = CACHE_BYTES


FULL = SpeedSettings()
QUICK = SpeedSettings(
    held=(20_000, 10**5), rounds=2, calls=5, first_touches=1, stall_capacity=20_000, stall_calls=20_000
)


def learning_speed(drafter: LearningDrafter, samples: Sequence[Sample], piece: int | None) -> float:
    """Tokens a second of `extend`, whole completions at once or in pieces, those of all requests in turn.

    What `start` does with the prompts isn't counted, neither in tokens nor in time.
    """
    names = [("learning", number) for number in range(len(samples))]
    for name, sample in zip(names, samples, strict=True):
        drafter.start(name, sample.prompt, sample.group_id)
    step = piece or LENGTH
    calls = [
        (name, sample.tokens[at : at + step])
        for at in range(0, LENGTH, step)
        for name, sample in zip(names, samples, strict=True)
    ]
    started = time.process_time()
    for name, tokens in calls:
        drafter.extend(name, tokens)
    seconds = time.process_time() - started
    for name in names:
        drafter.finish(name)
    return sum(len(sample.tokens) for sample in samples) / seconds


def measure_held(
    helds: Sequence[Held[Any]], settings: SpeedSettings, say: Callable[[str], None]
) -> dict[str, list[Figure]]:
    """Learning and proposing, all drafters and sizes in turn in every round, all on one core, in CPU time."""
    measured: dict[str, dict[tuple[str, str, int], list[float]]] = {"learning": {}, "proposing": {}}
    caches = Caches(settings.cache_bytes)
    small = {held.name: held for held in helds}  # of each kind one, to bring the code back to emptied caches
    others = {name: Batch(held.sibling(SMALL), BATCH, NODES) for name, held in small.items()}
    for number in range(settings.rounds):
        say(f"Speed, round {number + 1} of {settings.rounds} ...")
        for held in helds[:: 1 if number % 2 == 0 else -1]:
            held.refill()
            batch = Batch(held, BATCH, NODES)
            learning = _learning(held)  # before the caches are emptied
            proposing = _proposing(batch, others[held.name], caches, settings)
            batch.finish()
            for part, figures in (("learning", learning), ("proposing", proposing)):
                for what, value in figures.items():
                    measured[part].setdefault((what, held.name, held.tokens), []).append(value)
    return {
        part: [
            median_figure(
                what,
                values,
                UNITS.get(what, "tokens/s"),
                goal=_goal(what, tokens) if name == "trie" else None,
                at_least=part == "learning",
                held=tokens,
                drafter=name,
            )
            for (what, name, tokens), values in figures.items()
        ]
        for part, figures in measured.items()
    }


def filling(helds: Sequence[Held[Any]]) -> list[Figure]:
    """Learning from nothing to the number of tokens held: what it costs the history to grow is in it too."""
    return [
        Figure(
            "from none held, on average",
            held.tokens / held.fill_s,
            "tokens/s",
            held=held.tokens,
            drafter=held.name,
        )
        for held in helds
    ]


def _proposing(batch: Batch, other: Batch, caches: Caches, settings: SpeedSettings) -> dict[str, float]:
    with one_core():
        nodes = batch.propose() / BATCH
        warm = statistics.median(cpu_seconds_of(batch.propose) for _ in range(settings.calls))
        first = []
        for _ in range(settings.first_touches):
            caches.empty()
            other.propose()  # the code is warm again, what the drafter holds isn't
            first.append(cpu_seconds_of(batch.propose))
    return {WARM: 1e6 * warm / BATCH, FIRST_TOUCH: 1e6 * statistics.median(first) / BATCH, PROPOSED: nodes}


def _learning(held: Held[Any]) -> dict[str, float]:
    again, pieces = (held.of_held_prompts(COMPLETIONS_LEARNT) for _ in range(2))
    new = held.of_new_prompts(COMPLETIONS_LEARNT)
    with one_core():
        return {
            "held prompts, a completion a call": learning_speed(held.drafter, again, None),
            "new prompts, a completion a call": learning_speed(held.drafter, new, None),
            f"held prompts, {ACCEPTED} tokens a call": learning_speed(held.drafter, pieces, ACCEPTED),
        }


def _goal(what: str, tokens: int) -> float | None:
    if what in UNITS:
        return {WARM: WARM_GOAL_US, FIRST_TOUCH: FIRST_TOUCH_GOAL_US}.get(what)
    return None if what.endswith("tokens a call") else LEARNING_GOALS.get(tokens)


def measure_cores(held: Held[TrieDrafter], settings: SpeedSettings) -> list[Figure]:
    """A whole batch's proposal on one core and on all, in turns."""
    if not can_pin():
        return []
    batch = Batch(held, BATCH, NODES)
    one: list[float] = []
    every: list[float] = []
    batch.propose()
    for _ in range(settings.rounds):
        with one_core():
            one.append(1e6 * statistics.median(wall_seconds_of(batch.propose) for _ in range(settings.calls)))
        every.append(1e6 * statistics.median(wall_seconds_of(batch.propose) for _ in range(settings.calls)))
    batch.finish()
    name = f"propose for {BATCH} requests"
    ratio = statistics.median(one) / statistics.median(every)
    return [
        median_figure(f"{name}, one core", one, "us", held=held.tokens),
        median_figure(f"{name}, {machine.cores()} cores", every, "us", held=held.tokens),
        Figure(f"{name}, speed-up", ratio, "", held=held.tokens),
    ]


def measure_stalls(held: Held[TrieDrafter], settings: SpeedSettings) -> list[Figure]:
    """Single-token calls of `extend`, while the history grows and while it forgets; and one `new_version`.

    CPU time leaves out what other processes take; wall time is what a step would wait.
    """
    capacity = settings.stall_capacity
    drafter = TrieDrafter(DraftConfig(capacity_tokens=capacity))
    growing = endless(RolloutText(max(1, capacity // (16 * LENGTH)), seed=1), "growing")
    forgetting = ever_new()
    with one_core():
        figures = _stalls("grows", _single_tokens(drafter, growing, capacity))
        fill(drafter, forgetting, 4 * capacity)
        figures += _stalls("forgets", _single_tokens(drafter, forgetting, settings.stall_calls))
        seconds = cpu_seconds_of(lambda: held.drafter.new_version(1))
    name = f"new_version, {power_of_ten(held.tokens)} held"
    return [*figures, Figure(name, 1e3 * seconds, "ms", STALL_GOAL_MS)]


def _single_tokens(drafter: TrieDrafter, samples: Iterator[Sample], calls: int) -> np.ndarray:
    """float64[calls, 2]: CPU and wall seconds of each call."""
    times = np.empty((calls, 2))
    done = 0
    gc.collect()
    gc.disable()  # a collection would be counted as the drafter's
    try:
        while done < calls:
            sample = next(samples)
            drafter.start("single", sample.prompt, sample.group_id)
            for at in range(min(LENGTH, calls - done)):
                token = sample.tokens[at : at + 1]
                wall, cpu = time.perf_counter(), time.thread_time()
                drafter.extend("single", token)
                times[done] = time.thread_time() - cpu, time.perf_counter() - wall
                done += 1
            drafter.finish("single")
    finally:
        gc.enable()
    return times


def _stalls(doing: str, times: np.ndarray) -> list[Figure]:
    cpu, wall = 1e3 * times.T
    name = f"extend by one token while the history {doing}"
    return [
        Figure(f"{name}, median", float(np.median(cpu)), "ms"),
        Figure(f"{name}, 99.9%", float(np.quantile(cpu, 0.999)), "ms"),
        Figure(f"{name}, longest", float(cpu.max()), "ms", STALL_GOAL_MS),
        Figure(f"{name}, longest by the wall clock", float(wall.max()), "ms"),
    ]


def warm_up() -> None:
    """Compiles what the drafter compiles, so that no measurement does."""
    held = Held(2 * LENGTH, make_trie)
    batch = Batch(held, 2, 4)
    learn(held.drafter, held.of_new_prompts(1)[0])
    batch.propose()
    batch.finish()
    held.drafter.new_version(1)

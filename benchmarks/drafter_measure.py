"""What the parts of benchmarks/drafter.py measure with: figures with goals, one core, cold caches, resident memory."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CACHE_BYTES = 512 * 2**20
"""Streamed to empty the processor's caches; more than the last level of any server processor that we know of."""

_THREADS = Path("/proc/self/task")
_MEMORY = Path("/proc/self/statm")


@dataclass(frozen=True)
class Figure:
    """One measured number.

    goal: what it should be at most, or, with `at_least`, at least. rounds: what it is the median of. held: tokens that
    the drafter held, where it was measured by that.
    """

    name: str
    value: float
    unit: str
    goal: float | None = None
    at_least: bool = False
    rounds: tuple[float, ...] = ()
    held: int | None = None
    drafter: str = "trie"

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None without a goal."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.at_least else self.value <= self.goal


def median_figure(name: str, values: Sequence[float], unit: str, **others: Any) -> Figure:
    """The median of `values`; others: further fields of the figure."""
    return Figure(name, statistics.median(values), unit, rounds=tuple(values), **others)


def wall_seconds_of(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def cpu_seconds_of(call: Callable[[], object]) -> float:
    """CPU time of all threads of this process: on one core that nothing else uses, the time it takes."""
    started = time.process_time()
    call()
    return time.process_time() - started


def can_pin() -> bool:
    return hasattr(os, "sched_setaffinity")


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Keeps every thread of this process on one core, where the system can do that."""
    if not can_pin():
        yield
        return
    before = os.sched_getaffinity(0)
    _pin({max(before)})  # interrupts are mostly served by the first core
    try:
        yield
    finally:
        _pin(before)


def _pin(cores: set[int]) -> None:
    os.sched_setaffinity(0, cores)
    if _THREADS.is_dir():  # Linux: pool threads that run already don't follow the calling one
        for thread in _THREADS.iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread.name), cores)


class Caches:
    """Empties the processor's caches by streaming through a large array."""

    def __init__(self, size_bytes: int) -> None:
        self._array = np.ones(size_bytes // 8, np.int64)

    def empty(self) -> None:
        self._array += 1


def resident_bytes() -> int | None:
    """Physical memory of this process; None where the system doesn't say."""
    if not _MEMORY.is_file():
        return None
    return int(_MEMORY.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def power_of_ten(tokens: int) -> str:
    """100000 as "1e5", 130000 as "1.3e5"."""
    mantissa, _, exponent = f"{tokens:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"

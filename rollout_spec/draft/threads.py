"""Work that releases the GIL, spread over the cores this process may use."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

MOST_THREADS = 8


def run_in_parts(work: Callable[[int, slice], None], count: int, least: int) -> None:
    """Calls work(number, slice) on slices that make up range(count), at least `least` long each, on several cores."""
    parts = max(1, min(_cores(), count // least))
    bounds = [count * i // parts for i in range(parts + 1)]
    slices = [slice(begin, end) for begin, end in itertools.pairwise(bounds)]
    others = [_executor(os.getpid()).submit(work, n, slices[n]) for n in range(1, parts)]
    work(0, slices[0])
    for other in others:
        other.result()


def _cores() -> int:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(available, MOST_THREADS)


@functools.cache
def _executor(process: int) -> ThreadPoolExecutor:
    """One for each process, since threads don't survive a fork."""
    return ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="rollout_spec-draft")

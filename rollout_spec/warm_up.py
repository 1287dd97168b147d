"""Compiling every size of step before the first request, and measuring it for the draft budget."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from .core import EngineCore
from .draft.config import DraftConfig
from .draft.trie import TrieDrafter
from .progress import Progress
from .step_inputs import HostBatch, StepShape, batch_layout
from .weights import staging

_LEAST_ROUNDS, _MOST_ROUNDS = 5, 11
_MEASURING_S = 2.0  # after the least number of rounds
_FEW_CACHED, _MANY_CACHED = 16, 512  # tokens of each sequence, in turns, so that their cost is learnt too


def warm_up(core: EngineCore, progress: bool) -> None:
    """Compiles and measures; leaves requests, cache and history as they were."""
    with Progress(progress, "compiling", len(core.shapes)) as bar:
        for shape in core.shapes:
            core.executor.run(shape, batch_layout(shape, core.executor.pages_per_sequence).new())
            bar.advance(1)
    core.executor.warm_up_tables()
    staging.warm_up(core.executor.layout, core.executor.params, core.executor.quantizer)
    if core.planner.trie is not None:
        _compile_drafter(core.config.draft)
    if core.drafter is not None:
        measure(core)


def measure(core: EngineCore) -> None:
    """Runs all sizes in turns, full of sequences, so that what slows the machine for a while slows them alike."""
    few = _FEW_CACHED
    many = max(few, min(_MANY_CACHED, core.executor.slots.pages_per_sequence * core.config.page_size // 2))
    pool = core.scheduler.pool
    wanted = core.config.max_seqs * core.scheduler.pages_needed(many + 1)
    pages = pool.allocate(min(wanted, pool.num_free))
    if not pages:  # what is cached may not be overwritten: sizes are measured as they are used
        return
    taken: dict[StepShape, tuple[list[float], list[float]]] = {shape: ([], []) for shape in core.shapes}
    try:
        started = time.perf_counter()
        for turn in range(_MOST_ROUNDS):
            if turn >= _LEAST_ROUNDS and time.perf_counter() - started > _MEASURING_S:
                break
            for shape in core.shapes:
                batch = _full_step(core, shape, pages, (few, many)[turn % 2])
                seconds = core.executor.run(shape, batch).seconds
                if turn > 0:  # the first time is still slower
                    taken[shape][turn % 2].append(seconds)
    finally:
        pool.release(pages)
    times = core.planner.times
    for sequences in {shape.sequences for shape in core.shapes}:
        full = [shape for shape in core.shapes if shape.sequences == sequences <= shape.tokens]
        ratios = [min(taken[shape][1]) / min(taken[shape][0]) for shape in full]
        times.compare_cached(sequences, few * sequences, many * sequences, ratios)
    for turn in range(len(taken[core.shapes[0]][0])):
        for shape in core.shapes:
            cached = few * min(shape.sequences, shape.tokens)
            times.record(shape, taken[shape][0][turn], cached)


def _full_step(core: EngineCore, shape: StepShape, pages: list[int], cached: int) -> HostBatch:
    """A step of that shape in which nothing is sampled, each of its sequences with so many tokens cached.

    All keys and values go to `pages`, which are nobody's.
    """
    slots = core.executor.slots
    packed = batch_layout(shape, slots.pages_per_sequence).new()
    batch: Any = packed.arrays
    sequences = min(shape.sequences, shape.tokens)
    tokens = shape.tokens // sequences
    batch.cu_q_lens[:] = tokens * np.minimum(np.arange(shape.sequences + 1), sequences)
    batch.kv_lens[:sequences] = cached + tokens
    batch.positions[: tokens * sequences] = np.tile(cached + np.arange(tokens), sequences)
    batch.page_table[:] = np.resize(pages, batch.page_table.shape)
    batch.num_seqs[0] = sequences
    batch.row_tokens[:] = np.arange(shape.rows)
    return packed


def _compile_drafter(config: DraftConfig) -> None:
    """Compiled code is shared by all drafters, so one of its own spares the engine's from learning anything."""
    scratch = TrieDrafter(config)
    scratch.start(0, [0, 1])
    scratch.extend(0, [0, 1, 0])
    scratch.propose([0], [1])
    scratch.extend(0, [1])
    scratch.finish(0)

"""Recorded completions replayed through a drafter: what it would have saved, and how far its probabilities are right.

A workload is a set of prompts with several completions each, in one or more epochs, with nothing of the model that
wrote them. The drafter is driven as the engine drives it: start, then propose and extend until the completion ends,
then finish. A verify step emits the longest path of the proposed tree that the completion follows, and one token more.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollout_spec.recorded import Order, Recorded, Workload
from rollout_spec.tree import DraftTree

FOLDER = Path(__file__).parent / "data" / "drafting"
WORKLOADS = ("easy", "hard", "natural", "rollouts", "rollouts_t06", "rollouts_qwen")

BINS = 10
"""Bins of equal width over [0, 1] for the expected calibration error."""

WARM_TOKENS_A_REQUEST = 2048


class ReplayDrafter(Protocol):
    """What a replay asks of a drafter: the first four calls of `rollout_spec.draft.Drafter`."""

    def start(self, request_id: Hashable, prompt: NDArray[np.int32], group_id: Hashable = None) -> None: ...

    def extend(self, request_id: Hashable, tokens: NDArray[np.int32]) -> None: ...

    def propose(self, request_ids: Sequence[Hashable], budgets: Sequence[int]) -> list[DraftTree]: ...

    def finish(self, request_id: Hashable) -> None: ...


@dataclass(frozen=True)
class Replay:
    """What a replay came to. Times are CPU seconds of the calling thread."""

    steps: int
    tokens: int
    nodes: int
    calibration_error: float
    propose_s: float
    learn_s: float

    @property
    def tokens_per_step(self) -> float:
        """The acceptance length, the bonus token included."""
        return self.tokens / self.steps

    @property
    def nodes_per_step(self) -> float:
        return self.nodes / self.steps


def learn_warm(drafter: ReplayDrafter, workload: Workload) -> None:
    """Teaches the unrelated text, in requests that belong to no other's group."""
    for at in range(0, len(workload.warm), WARM_TOKENS_A_REQUEST):
        name, text = ("warm", at), workload.warm[at : at + WARM_TOKENS_A_REQUEST]
        drafter.start(name, text[:1], group_id=name)
        drafter.extend(name, text[1:])
        drafter.finish(name)


def replay(
    drafter: ReplayDrafter, completions: Sequence[Recorded], *, nodes: int = 16, slots: int = 16
) -> Replay:
    """Replays completions in their order, `slots` at a time, with a budget of `nodes` nodes for each.

    Raises ValueError for a malformed tree or one over its budget.
    """
    waiting = list(reversed(completions))
    running: dict[Hashable, tuple[Recorded, int]] = {}  # and how many of its tokens are emitted
    steps = tokens = proposed = 0
    clock = _Clock()
    calibration = Calibration()
    while waiting or running:
        while waiting and len(running) < slots:
            one = waiting.pop()
            name: Hashable = (one.epoch, one.prompt_number, one.sample)
            with clock.learning:
                drafter.start(name, one.prompt, group_id=one.prompt_number)
            running[name] = (one, 0)
        with clock.proposing:
            trees = drafter.propose(list(running), [nodes] * len(running))
        for (name, (one, done)), tree in zip(list(running.items()), trees, strict=True):
            tree.validate(max_nodes=nodes)
            path = tree.accepted(one.tokens[done:].tolist())
            calibration.add(tree.probs, path)
            emitted = min(len(path) + 1, len(one.tokens) - done)
            with clock.learning:
                drafter.extend(name, one.tokens[done : done + emitted])
            steps, tokens, proposed = steps + 1, tokens + emitted, proposed + len(tree)
            running[name] = (one, done + emitted)
        for ended in [name for name, (one, done) in running.items() if done >= len(one.tokens)]:
            drafter.finish(ended)
            del running[ended]
    return Replay(
        steps=steps,
        tokens=tokens,
        nodes=proposed,
        calibration_error=calibration.expected_error,
        propose_s=clock.proposing.seconds,
        learn_s=clock.learning.seconds,
    )


def replay_epochs(
    drafter: ReplayDrafter,
    workload: Workload,
    *,
    nodes: int = 16,
    slots: int = 16,
    order: Order = "staggered",
) -> Iterator[Replay]:
    """Each epoch's replay, one after the other; the warm text, where there is some, is learnt before."""
    learn_warm(drafter, workload)
    for number in workload.epochs:
        yield replay(drafter, workload.epoch(number, order), nodes=nodes, slots=slots)


class Calibration:
    """Counts nodes by bin of the probability given to them: how many, the sum of it, how many were accepted."""

    def __init__(self) -> None:
        self._nodes = np.zeros(BINS, np.int64)
        self._given = np.zeros(BINS)
        self._accepted = np.zeros(BINS, np.int64)

    def add(self, probs: NDArray[np.float32], path: Sequence[int]) -> None:
        """probs: float32[N], of a tree's nodes. path: which of them were accepted."""
        bins = np.minimum((BINS * probs.astype(np.float64)).astype(np.int64), BINS - 1)
        self._nodes += np.bincount(bins, minlength=BINS)
        self._given += np.bincount(bins, probs, BINS)
        self._accepted += np.bincount(bins[list(path)], minlength=BINS)

    @property
    def expected_error(self) -> float:
        """Mean over nodes of |mean probability given - share accepted| of the node's bin; 0 without nodes."""
        return float(np.abs(self._given - self._accepted).sum() / max(1, self._nodes.sum()))


class _Stopwatch:
    """CPU seconds of this thread spent inside `with` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._entered = 0.0

    def __enter__(self) -> None:
        self._entered = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.thread_time() - self._entered


class _Clock:
    def __init__(self) -> None:
        self.proposing = _Stopwatch()
        self.learning = _Stopwatch()

"""What an engine did, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .batch import StepEntry
from .drafting import StepPlan
from .executor import StepOutcome
from .kernels.sampling import TreeSample
from .step_inputs import StepBatch


@dataclass
class EngineStats:
    """Counts since the engine was made or `reset_stats` was called. Times in seconds."""

    requests_finished: int = 0
    requests_failed: int = 0
    generated_tokens: int = 0
    """Tokens of completions, finished or not."""
    prompt_tokens_computed: int = 0
    """Prompt tokens (and, after a preemption, output tokens) run through the model."""
    prompt_tokens_cached: int = 0
    """Those taken from the prefix cache instead."""
    prompt_tokens_from_host: int = 0
    """Those of the cached ones whose pages had to come back from host memory."""
    host_cache_bytes: int = 0
    """What the host keeps of the prefix cache."""
    steps: int = 0
    steps_with_drafts: int = 0
    steps_without_drafts: Counter[str] = field(default_factory=Counter)
    """The other steps by the reason why they verified none."""
    decode_steps: int = 0
    """Steps of a sequence that emitted at least one token: the forward passes plain decoding would count."""
    drafted: int = 0
    accepted: int = 0
    drafted_by_depth: list[int] = field(default_factory=list)
    """Draft nodes verified 1, 2, 3, ... tokens below the root, as deep as there were any."""
    accepted_by_depth: list[int] = field(default_factory=list)
    """Those of them that were accepted, also behind the token that ended a completion."""
    preemptions: int = 0
    step_shapes: int = 0
    """Sizes that steps have been compiled for in this engine's life."""
    device_s: float = 0.0
    """From the call of a step to the arrival of its results."""
    host_s: float = 0.0
    """The rest of the step: scheduling, drafting, packing, learning, bookkeeping."""
    predicted_s: float = 0.0
    """What the steps of known sizes were expected to take on the device."""
    predicted_steps_s: float = 0.0
    """What those steps took."""
    compared_s: float = 0.0
    """Time, host included, of steps that only decoded while the time of a plain step was known."""
    compared_plain_s: float = 0.0
    """What plain steps would have taken for the tokens of those steps."""
    pages_held: int = 0
    pages: int = 0
    running: int = 0
    waiting: int = 0
    drafter_bytes: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per sequence and verify step, the bonus token included."""
        return self.generated_tokens / self.decode_steps if self.decode_steps else 0.0

    @property
    def nodes_per_step(self) -> float:
        """Draft nodes verified per sequence and step."""
        return self.drafted / self.decode_steps if self.decode_steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of stepping."""
        total = self.device_s + self.host_s
        return self.generated_tokens / total if total else 0.0

    @property
    def host_share(self) -> float:
        """Share of the steps' time spent outside the device call."""
        total = self.device_s + self.host_s
        return self.host_s / total if total else 0.0

    @property
    def estimated_speedup(self) -> float:
        """Time that plain steps would have taken over the time taken; 1 while there is nothing to compare.

        Plain steps as this engine would run them: its own expectation of them, learnt from those it ran lately.
        """
        return self.compared_plain_s / self.compared_s if self.compared_s else 1.0

    @property
    def prediction_error(self) -> float:
        """Predicted over measured time of steps, less 1."""
        return self.predicted_s / self.predicted_steps_s - 1.0 if self.predicted_steps_s else 0.0

    def count_step(
        self, plan: StepPlan, entries: Sequence[StepEntry], batch: StepBatch, sample: TreeSample
    ) -> None:
        """A step ran: whether it verified drafts, and which of them were accepted."""
        self.steps += 1
        if plan.no_drafts_because is not None:
            self.steps_without_drafts[plan.no_drafts_because] += 1
            return
        self.steps_with_drafts += 1
        rows = batch.rows
        drafted = np.flatnonzero(np.asarray(rows.parents) >= 0)
        roots = np.asarray(rows.positions)[[entry.first_row for entry in entries]]
        depths = rows.positions[drafted] - roots[rows.sequences[drafted]]
        _add(self.drafted_by_depth, np.bincount(depths)[1:])
        _add(self.accepted_by_depth, np.bincount(depths, sample.accepted[drafted])[1:])

    def count_tokens(self, sequences: int, emitted: int, drafted: int) -> None:
        """So many sequences emitted so many tokens together, with so many draft nodes."""
        self.decode_steps += sequences
        self.generated_tokens += emitted
        self.drafted += drafted
        self.accepted += emitted - sequences

    def count_time(self, plan: StepPlan, outcome: StepOutcome, host_s: float, emitted: float) -> None:
        """The time of a step in which each sequence emitted so many tokens on average."""
        self.device_s += outcome.seconds
        self.host_s += host_s
        if outcome.first_of_its_shape:
            return
        if plan.predicted_s is not None:
            self.predicted_s += plan.predicted_s
            self.predicted_steps_s += outcome.seconds
        if plan.plain_s is not None:
            self.compared_s += outcome.seconds + host_s
            self.compared_plain_s += plan.plain_s * emitted


def _add(totals: list[int], counts: NDArray) -> None:
    totals += [0] * (len(counts) - len(totals))
    for depth, count in enumerate(counts.tolist()):
        totals[depth] += int(count)

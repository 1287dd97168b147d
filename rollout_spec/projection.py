"""What speculation would gain on a TPU slice: recorded rollouts, replayed through the real engine on a simulated clock.

Everything but the device is the engine's own: scheduler, pages, drafter, draft budget. The device is played by a
record: at each row it "samples" the token that the policy wrote there, and a step takes its roofline on the slice.
The host's part is measured on this machine and added.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from .chips import Slice
from .config import EngineConfig
from .core import EngineCore
from .draft.config import DraftConfig
from .draft.drafter import make_drafter
from .errors import HistoryError
from .executor import Executor, StepOutcome
from .fitting import PAGE_SIZE, Roofline, memory, roofline
from .intake import Intake
from .kernels.sampling import TreeSample
from .recorded import Recorded, Workload
from .requests import Request
from .sampling import SamplingParams
from .scheduler import Scheduler
from .sharding import MeshLayout
from .slots import SlotTable
from .step_inputs import HostBatch, StepShape
from .tree import DraftTree
from .warm_up import measure


@dataclass(frozen=True)
class Played:
    """An epoch's completions, generated on the simulated clock."""

    tokens: int
    seconds: float
    host_s: float
    """Of `seconds`, measured on this machine."""
    acceptance_length: float
    nodes_per_step: float
    tail_s: float
    """From the moment when fewer than half of the slots were running and nothing waited, to the end."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Projected:
    """The same completions at one number of slots, with drafting off and on."""

    slots: int
    plain: Played
    speculative: Played

    @property
    def speedup(self) -> float:
        return self.plain.seconds / self.speculative.seconds


def project(
    layout: MeshLayout, where: Slice, workload: Workload, slots: Sequence[int], draft: DraftConfig
) -> Iterator[Projected]:
    """The last epoch of `workload`, after the earlier ones were learnt, at each number of slots.

    layout: of the model over the slice, as from `choose_mesh`; its devices need not be there.

    Raises HistoryError where the record has token ids that the model hasn't, CapacityError where the slice is too
    small.
    """
    model = layout.config
    largest = max(int(max(one.prompt.max(), one.tokens.max())) for one in workload.completions)
    if largest >= model.vocab_size:
        raise HistoryError(
            f"{workload.name} has token {largest}, outside the model's vocabulary of {model.vocab_size}; "
            "record rollouts of a model with the same tokenizer"
        )
    for count in slots:
        plain, speculative = (
            _play(layout, where, workload, count, chosen) for chosen in (DraftConfig(kind="none"), draft)
        )
        yield Projected(count, plain, speculative)


def _play(layout: MeshLayout, where: Slice, workload: Workload, slots: int, draft: DraftConfig) -> Played:
    longest = 1 + max(len(one.prompt) + len(one.tokens) for one in workload.completions)
    pages_per_sequence = -(-(longest + draft.max_nodes) // PAGE_SIZE)
    _, _, pages = memory(layout, where, slots * pages_per_sequence, pages_per_sequence)
    config = EngineConfig(
        max_seqs=slots,
        max_seq_len=longest,
        page_size=PAGE_SIZE,
        kv_pages=pages,
        max_batch_tokens=max(256, 8 * slots),
        draft=draft,
    )
    device = RecordedDevice(layout, where, config, pages_per_sequence)
    core = EngineCore(
        layout.config,
        {},
        config,
        max_seq_len=longest,
        tokenizer=None,
        drafter=make_drafter(draft),
        executor=cast(Executor, device),
        clock=device.clock,
    )
    device.scheduler = core.scheduler
    measure(core)
    intake = Intake(
        layout.config, None, max_seq_len=longest, cache_tokens=pages * PAGE_SIZE, seed=config.seed
    )
    for number in workload.epochs:
        if number != workload.epochs[0]:
            core.weight_version += 1
            core.scheduler.new_version(core.weight_version)
            if core.drafter is not None:
                core.planner.new_version(core.weight_version)
        played = _play_epoch(core, device, intake, workload.epoch(number, "group"), slots)
    return played


def _play_epoch(
    core: EngineCore, device: RecordedDevice, intake: Intake, completions: Sequence[Recorded], slots: int
) -> Played:
    """Runs the completions to their ends; raises RuntimeError should one come out otherwise than recorded."""
    core.stats = type(core.stats)()
    requests: list[Request] = []
    for one in completions:
        request_id = (one.epoch, one.prompt_number, one.sample)
        device.records[request_id] = one
        request = intake.request(
            one.prompt,
            SamplingParams(max_tokens=len(one.tokens), ignore_eos=True, seed=0),
            request_id=request_id,
            group_id=one.prompt_number,
        )
        requests.append(request)
        core.enqueue(request)
    tail_from = 0.0
    while core.scheduler.has_work:
        core.advance()
        if core.scheduler.waiting or 2 * len(core.scheduler.running) >= slots:
            tail_from = core.stats.device_s + core.stats.host_s
    for one, request in zip(completions, requests, strict=True):
        if request.error is not None:
            raise request.error
        if not np.array_equal(request.completions[0].token_ids, one.tokens):
            raise RuntimeError(f"request {request.request_id} came out otherwise than recorded")
    core.ended.clear()
    stats = core.stats
    seconds = stats.device_s + stats.host_s
    return Played(
        tokens=stats.generated_tokens,
        seconds=seconds,
        host_s=stats.host_s,
        acceptance_length=stats.acceptance_length,
        nodes_per_step=stats.nodes_per_step,
        tail_s=seconds - tail_from,
    )


class RecordedDevice:
    """Stands where `Executor` stands; steps take their roofline, and "sample" what was recorded."""

    def __init__(
        self, layout: MeshLayout, where: Slice, config: EngineConfig, pages_per_sequence: int
    ) -> None:
        assert config.kv_pages is not None
        self.num_pages = config.kv_pages
        self.pages_per_sequence = pages_per_sequence
        self.slots = SlotTable(config.max_seqs, pages_per_sequence)
        self.look_ahead = None
        self.records: dict[Hashable, Recorded] = {}
        self.scheduler: Scheduler | None = None
        self._layout, self._where = layout, where
        self._roofs: dict[StepShape, Roofline] = {}
        self._simulated_s = 0.0

    def clock(self) -> float:
        """Seconds: this machine's, and those that simulated steps took."""
        return time.perf_counter() + self._simulated_s

    def recover(self) -> bool:
        """Nothing is held that a failure could lose."""
        return False

    def run(self, shape: StepShape, packed: HostBatch) -> StepOutcome:
        """A step of that shape, whose sequences are the scheduler's running ones in their order."""
        if shape not in self._roofs:
            self._roofs[shape] = roofline(self._layout, self._where, shape)
        started = time.perf_counter()
        batch: Any = packed.arrays
        seconds = self._roofs[shape].seconds(float(batch.kv_lens.sum()))
        sample = _nothing_sampled(shape.rows)
        in_use = np.flatnonzero(batch.row_in_use)
        for number in np.unique(batch.rows.sequences[in_use]):
            rows = in_use[batch.rows.sequences[in_use] == number]
            self._sample(int(number), rows, batch.rows, sample)
        # What playing the record took is nobody's time.
        self._simulated_s += seconds - (time.perf_counter() - started)
        return StepOutcome(sample, seconds, first_of_its_shape=False)

    def _sample(self, number: int, rows: np.ndarray, of_rows: Any, sample: TreeSample) -> None:
        """Fills in what one sequence's rows, a root and nodes below it, sample."""
        assert self.scheduler is not None
        sequence = self.scheduler.running[number]
        ahead = self.records[sequence.request.request_id].tokens[sequence.num_generated :]
        tokens = np.asarray(of_rows.token_ids[rows[1:]], np.int32)
        parents = np.asarray(of_rows.parents[rows[1:]], np.int32) - (rows[0] + 1)
        path = DraftTree(tokens, parents, np.zeros(len(tokens), np.float32)).accepted(ahead.tolist())
        for depth, row in enumerate([0, *(node + 1 for node in path)]):
            if depth < len(ahead):
                sample.tokens[rows[row]] = ahead[depth]
            sample.accepted[rows[row]] = True


def _nothing_sampled(rows: int) -> Any:
    zeros = [np.zeros(rows, np.float32) for _ in range(4)]
    return TreeSample(np.zeros(rows, np.int32), *zeros, np.zeros(rows, bool))

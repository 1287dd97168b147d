"""The engine's loop: plan a step, run it, take its results in, and end what is done."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from .batch import StepEntry, pack
from .config import EngineConfig
from .draft.drafter import Drafter
from .drafting import DraftPlanner, StepPlan
from .executor import Executor, StepOutcome
from .models import ModelConfig
from .outputs import RolloutOutput
from .requests import Request, Sequence
from .scheduler import Scheduler
from .shapes import step_shapes
from .sharding import MeshLayout
from .stats import EngineStats
from .stopping import append_until_end, end
from .tokenizer import Tokenizer

_log = logging.getLogger(__name__)


class EngineCore:
    """Unfinished requests, and everything that moves them. The API above it checks what comes in."""

    def __init__(
        self,
        model_config: ModelConfig,
        params: dict,
        config: EngineConfig,
        *,
        max_seq_len: int,
        tokenizer: Tokenizer | None,
        drafter: Drafter | None,
        mesh_layout: MeshLayout | None = None,
        executor: Executor | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """executor, clock: others than the device's and the machine's, for simulations."""
        self.config = config
        self.clock = clock
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.shapes = step_shapes(config)
        self.executor = executor or Executor(model_config, params, config, max_seq_len, mesh_layout)
        self.scheduler = Scheduler(
            config,
            self.executor.num_pages,
            self.shapes[-1],
            tokens_behind=self._tokens_behind(model_config),
            window=model_config.widest_window,
        )
        self.planner = DraftPlanner(config.draft, drafter, self.shapes, model_config.vocab_size)
        self.requests: dict[Hashable, Request] = {}
        self.ended: list[Request] = []
        """Submitted requests that ended, not yet handed out by `RolloutEngine.step`."""
        self.stats = EngineStats()
        self.weight_version = 0

    def _tokens_behind(self, model_config: ModelConfig) -> int:
        """On how many tokens behind a page its content depends: one for each head that drafts."""
        if self.executor.look_ahead is None or model_config.mtp is None:
            return 0
        return model_config.mtp.num_heads

    # Requests

    def enqueue(self, request: Request) -> None:
        """Takes a checked request in."""
        self.requests[request.request_id] = request
        for sequence in request.sequences:
            if sequence.finish_reason is None and sequence.room == 0 and sequence.score_from is None:
                end(sequence, self.tokenizer, "length", None)
            if sequence.finish_reason is None:
                self.scheduler.waiting.append(sequence)
        self._finish_if_done(request)

    def abort(self, request: Request) -> None:
        """Ends the request with what it has."""
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self._withdraw(sequence)
                end(sequence, self.tokenizer, "abort", None)
        self._finish_if_done(request)

    def fail(self, request: Request, error: Exception) -> None:
        """Ends the request with an error."""
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self._withdraw(sequence)
        request.status, request.error = "failed", error
        self.stats.requests_failed += 1
        self._end(request)

    def requeue_running(self) -> int:
        """Preempts all running sequences; they go on in their order, recomputed. How many they are."""
        count = len(self.scheduler.running)
        while self.scheduler.running:
            self.scheduler.preempt(self.scheduler.running[-1])
        return count

    def _withdraw(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            self.scheduler.publish(sequence)
            self.scheduler.release(sequence)
        elif sequence in self.scheduler.waiting:
            self.scheduler.waiting.remove(sequence)
        if sequence.drafting:
            sequence.drafting = False
            self.planner.finish(sequence.key)

    def _finish_if_done(self, request: Request) -> None:
        if any(sequence.finish_reason is None for sequence in request.sequences):
            return
        request.status = "finished"
        request.output = RolloutOutput(
            prompt_token_ids=request.prompt_token_ids,
            completions=[sequence.completion() for sequence in request.sequences],
            group_id=request.group_id,
            request_id=request.request_id,
            index=request.index,
        )
        self.stats.requests_finished += 1
        self._end(request)

    def _end(self, request: Request) -> None:
        self.requests.pop(request.request_id, None)
        (self.ended if request.ended_list is None else request.ended_list).append(request)

    @property
    def begun(self) -> list[Request]:
        """Unfinished requests that have run, whether they run now or were preempted."""
        return [request for request in self.requests.values() if request.begun]

    def swap_weights(
        self, params: dict, unmerged: dict[int, Any], version: int, *, keeps_cache: bool = False
    ) -> None:
        """Serves checked weights from now on; nothing cached under the old ones is found again.

        keeps_cache: running sequences go on with what they have cached.
        """
        self.executor.serve(params, unmerged, keeps_cache=keeps_cache)
        self.weight_version = version
        self.scheduler.new_version(version)
        if self.drafter is not None:
            try:
                self.planner.new_version(version)
            except Exception:  # the weights are swapped; a drafter that goes on as before costs speed only
                _log.exception("the drafter failed to take note of version %r", version)

    # Steps

    def advance(self, *, only_begun: bool = False) -> None:
        """One step, if there is anything to compute. only_begun: admit no request that has not run yet."""
        started = self.clock()
        if not self.scheduler.has_work:
            return
        try:
            done = self._step(only_begun)
        except BaseException as error:
            self._fail_running(error)
            if not isinstance(error, Exception):
                raise
            return
        if done is None:
            return
        plan, outcome, emitted = done
        host_s = max(0.0, self.clock() - started - outcome.seconds)
        if not outcome.first_of_its_shape:
            self.planner.measured_host(plan, host_s)
        self.stats.count_time(plan, outcome, host_s, emitted)

    def _step(self, only_begun: bool) -> tuple[StepPlan, StepOutcome, float] | None:
        """One step's plan and outcome, and the tokens that a sequence emitted on average; None if nothing ran."""
        self.scheduler.admit(only_begun=only_begun)
        entries = self.scheduler.plan()
        if not entries:
            self._move_pages()
            return None
        for entry in entries:
            self._prepare(entry.sequence)
        plan = self.planner.plan(entries, self.scheduler)
        packed = pack(
            entries, plan.shape, self.executor.slots, for_heads=self.executor.look_ahead is not None
        )
        self._move_pages()
        outcome = self.executor.run(plan.shape, packed)
        if not outcome.first_of_its_shape:  # a compilation teaches nothing about what a step costs
            self.planner.measured(plan, outcome.seconds)
        self.stats.count_step(plan, entries, packed.arrays, outcome.sample)
        return plan, outcome, self._take_in(entries, outcome)

    def _move_pages(self) -> None:
        """Pages go to host memory and come back from there before a step overwrites or reads them."""
        if self.scheduler.host_cache is not None:
            self.scheduler.host_cache.carry_out(self.executor)

    def _prepare(self, sequence: Sequence) -> None:
        if sequence.score_from is not None:
            return
        if sequence.sampling.changes_logits and not sequence.tables_written:
            self.executor.write_tables(sequence)
        if self.drafter is not None and not sequence.drafting:
            request = sequence.request
            self.planner.start(sequence.key, request.prompt_token_ids, request.group_id)
            sequence.drafting = True
            if sequence.num_generated:
                self.planner.learn([sequence.key], [sequence.output])

    def _take_in(self, entries: SequenceOf[StepEntry], outcome: StepOutcome) -> float:
        """Takes a step's results in; returns the tokens that a sequence emitted on average.

        Whatever fails on the way, sequences that ended are handed out.
        """
        sampled = [entry for entry in entries if entry.samples]
        for entry in entries:
            if entry.count > 1 or not entry.samples:
                self._take_prompt(entry, outcome)
        if not sampled:
            return 0.0
        rows: list[list[int]] = []
        try:
            for entry in sampled:
                rows.append(self._take_tokens(entry, outcome))
            emitted, drafted = sum(map(len, rows)), sum(entry.num_nodes for entry in sampled)
            self.stats.count_tokens(len(sampled), emitted, drafted)
            self.planner.verified(sampled, [len(accepted) - 1 for accepted in rows])
            self.planner.learn(
                [entry.sequence.key for entry in sampled],
                [outcome.sample.tokens[accepted] for accepted in rows],
            )
            if outcome.draft_tokens is not None and outcome.draft_probs is not None:
                self.planner.offer(entries, outcome.draft_tokens, outcome.draft_probs)
        finally:
            done: dict[int, Request] = {}  # of several sequences that end at once, the request ends once
            for entry in sampled:
                self.scheduler.publish(entry.sequence)
                self.scheduler.give_back_passed(entry.sequence)
                if entry.sequence.finish_reason is not None:
                    self._withdraw(entry.sequence)
                    done[id(entry.sequence.request)] = entry.sequence.request
            for request in done.values():
                self._finish_if_done(request)
        return emitted / len(sampled)

    def _take_prompt(self, entry: StepEntry, outcome: StepOutcome) -> None:
        """A part of a prompt was computed, or of a text that is scored."""
        sequence = entry.sequence
        if sequence.score_from is not None:
            self._take_scores(entry, outcome)
            return
        self.stats.prompt_tokens_computed += entry.count
        if not entry.samples:
            sequence.cached += entry.count
            self.scheduler.publish(sequence)
            self.scheduler.give_back_passed(sequence)

    def _take_scores(self, entry: StepEntry, outcome: StepOutcome) -> None:
        sequence, scored = entry.sequence, entry.scored
        found = outcome.sample.target_logprobs[entry.first_row : entry.first_row + len(scored)]
        first = scored.start - sequence.prompt_len
        sequence.logprobs[first : first + len(scored)] = found
        sequence.cached += entry.count
        self.scheduler.publish(sequence)
        self.scheduler.give_back_passed(sequence)
        if sequence.uncached == 0:
            self._withdraw(sequence)
            sequence.finish_reason = "length"
            self._finish_if_done(sequence.request)

    def _take_tokens(self, entry: StepEntry, outcome: StepOutcome) -> list[int]:
        """Appends the tokens of the accepted path, up to where the completion ends; returns their rows."""
        sequence, sample, tree = entry.sequence, outcome.sample, entry.tree
        root = entry.first_row
        rows = [root]
        if tree is not None:
            rows += (np.flatnonzero(sample.accepted[root + 1 : root + 1 + len(tree)]) + (root + 1)).tolist()
        rows = append_until_end(sequence, rows, sample, self.weight_version, self.tokenizer)
        emitted = len(rows)
        sequence.cached = sequence.length - 1
        sequence.steps += 1
        sequence.accepted += emitted - 1
        if tree is not None:
            sequence.drafted += len(tree)
        return rows

    def _fail_running(self, error: BaseException) -> None:
        """A step raised: whatever ran in it ends with that error, and the device state is made whole."""
        reason = error if isinstance(error, Exception) else RuntimeError(f"interrupted by {error!r}")
        _log.error("a step failed, and with it the requests that were running", exc_info=error)
        in_step = self.scheduler.running or list(self.scheduler.waiting)[:1]
        for request in {id(sequence.request): sequence.request for sequence in in_step}.values():
            self.fail(request, reason)
        host_cache = self.scheduler.host_cache
        unmoved = host_cache is not None and host_cache.drop_moves()
        if self.executor.recover() or unmoved:  # a page that was to come in doesn't hold what it is known for
            self.scheduler.pool.forget_contents()

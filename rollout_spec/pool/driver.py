"""The pool's own thread: requests, scheduling, retries and shared history, over a fleet of engines."""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import ray

from ..errors import EngineLostError, EngineStateError
from ..outputs import Completion
from ..stats import EngineStats
from .actor import BuildPlan, HistoryKeeper, WeightStep, jax_options
from .fleet import Fleet, FleetEvents, Handle
from .history import TextBatch
from .lengths import LengthHistory
from .messages import Abort, Ended, Key, LearntText, Report, Sample, Submit
from .options import Limits, Sharing
from .placement import Places
from .requests import PoolRequest, nothing_yet
from .scheduling import Scheduler, Work
from .stats import PoolStats

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

_TICK_S = 0.1
_MOVES_EVERY_S = 0.2
_ALONE_FROM = 2  # losses after which a sample runs with nothing beside it, which shows whose fault they are


@dataclass(eq=False)
class _Running:
    """A sample on its way."""

    request: PoolRequest
    index: int
    sample: Sample
    given: Completion | None
    """What the caller had it continue from."""
    strikes: int = 0
    aborted: bool = False
    target: int | None = None
    """Where it shall end, while it is asked back from where it runs."""


class Driver:
    """Owns the fleet and all requests. Its methods that end in `_here` belong to its thread; `call` runs them there."""

    def __init__(
        self,
        make: Callable[[], Any],
        places: Places,
        *,
        cpus: float,
        limits: Limits,
        sharing: Sharing,
        moving: bool,
    ) -> None:
        self._make, self._cpus = make, cpus
        self.limits, self.sharing = limits, sharing
        self.scheduler = Scheduler(moving=moving)
        self.lengths = LengthHistory()
        self.counts = PoolStats()
        self.version = 0
        self.weights: list[WeightStep] = []
        """What an engine that starts now takes after it is built."""
        self.updating = False
        self.paused = False
        self.asleep: dict[str, Any] | None = None
        self.broken: Exception | None = None
        self.fleet = Fleet(
            places,
            self._plan,
            self._post,
            FleetEvents(self._started, self._reported, self._lost),
            health_deadline_s=limits.health_deadline_s,
            start_deadline_s=limits.start_deadline_s,
        )
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._samples: dict[Key, _Running] = {}
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._texts = TextBatch(sharing.budget_bytes)
        self._keeper: Any = None
        self._last_round = self._last_moves = time.monotonic()
        self._rates: dict[int, tuple[float, dict[Key, int]]] = {}
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="rollout-pool", daemon=True)
        self._thread.start()

    # From any thread

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Runs a function in the pool's thread and returns what it returns."""
        if threading.current_thread() is self._thread:
            return function()
        done: Future[_Result] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        if self._stopped:
            raise EngineStateError("the pool is shut down; make a new one")
        self._post(run)
        while True:
            try:
                return done.result(timeout=1.0)
            except TimeoutError:
                if done.done():
                    raise
                if not self._thread.is_alive():
                    raise EngineStateError("the pool is shut down; make a new one") from None

    def submit(self, requests: list[PoolRequest]) -> None:
        """Takes checked requests in."""
        if self._stopped:
            raise EngineStateError("the pool is shut down; make a new one")
        self._post(lambda: self._submit_here(requests))

    def stop(self) -> None:
        """Fails what is unfinished and ends all actors."""
        if not self._stopped:
            self.call(self._stop_here)
            self._thread.join()

    def _post(self, function: Callable[[], None]) -> None:
        self._events.put(function)

    # The thread

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._turn()
            except Exception as error:
                _log.exception("the pool's thread failed")
                self._break(error)

    def _turn(self) -> None:
        try:
            self._events.get(timeout=_TICK_S)()
            while True:
                self._events.get_nowait()()
        except queue.Empty:
            pass
        if self._stopped:
            return
        now = time.monotonic()
        due = [function for at, function in self._later if at <= now]
        self._later = [(at, function) for at, function in self._later if at > now]
        for function in due:
            function()
        self.fleet.tick()
        self._pump(now)
        self.fleet.flush()

    def _pump(self, now: float) -> None:
        if not self.paused and self.asleep is None:
            given: dict[int, list[Sample]] = {}
            for engine, work in self.scheduler.assign():
                given.setdefault(engine, []).append(self._samples[work.key].sample)  # type: ignore[index]
            for engine, samples in given.items():
                self.fleet.handles[engine].outbox.append(Submit(samples))
            if not self.updating and now > self._last_moves + _MOVES_EVERY_S:
                self._last_moves = now
                self.scheduler.hold()
                for move in self.scheduler.moves():
                    self._ask_back(move.key, move.source, move.target)  # type: ignore[arg-type]
        if now > self._last_round + self.sharing.every_s:
            self._last_round = now
            self._share_texts()
        for handle in [handle for handle in self.fleet.handles.values() if handle.leaving]:
            load = self.scheduler.engines.get(handle.number)
            if load is None or not load.running:
                if load is not None:
                    self.scheduler.remove_engine(handle.number)
                self.fleet.give_up(handle)

    def _ask_back(self, key: Key, source: int, target: int | None) -> None:
        running = self._samples[key]
        running.target = target
        self.counts.samples_moved += 1
        self.fleet.handles[source].outbox.append(Abort([key]))

    def _stop_here(self) -> None:
        for handle in self.fleet.serving:
            handle.fail_calls(EngineStateError("the pool was shut down"))
        for request in {id(one.request): one.request for one in self._samples.values()}.values():
            self._fail_request(request, EngineStateError("the pool was shut down"))
        self.fleet.end()
        if self._keeper is not None:
            ray.kill(self._keeper)
        self.weights.clear()
        self._stopped = True

    def _break(self, error: Exception) -> None:
        """Nothing can be generated any more."""
        self.broken = error
        for request in {id(one.request): one.request for one in self._samples.values()}.values():
            self._fail_request(request, error)

    # Engines

    def start_here(self, places: list[int]) -> None:
        """Engines at new places."""
        for place in places:
            self.fleet.start(place)

    def _plan(self, number: int, place: int) -> BuildPlan:
        history = [self._keeper.snapshot.remote()] if self._keeper is not None else []
        return BuildPlan(number, self._make, place, self._cpus, list(self.weights), history, jax_options())

    def _started(self, handle: Handle) -> None:
        assert handle.facts is not None
        handle.tries = 0
        self.counts.engines_started += 1
        if self._keeper is None and self.sharing.on and handle.facts.draft_config is not None:
            keeper = ray.remote(HistoryKeeper)
            self._keeper = keeper.options(num_cpus=0, max_restarts=-1).remote(handle.facts.draft_config)
        self.catch_up_here(handle)
        if self.paused:
            handle.call("pause")
        if self.asleep is not None:
            handle.call("sleep", **self.asleep)
        self.scheduler.add_engine(handle.number, handle.facts.slots)

    def catch_up_here(self, handle: Handle) -> None:
        """Weights that were taken into use while an engine was being built."""
        versions = [step.version for step in self.weights]
        if handle.target_version == self.version:
            return
        known = handle.target_version in versions
        for step in self.weights[versions.index(handle.target_version) + 1 if known else 0 :]:
            handle.target_version = step.version
            handle.call(
                "update", weights=step.weights, version=step.version, strict=step.strict, mode="drain"
            )

    def _lost(self, handle: Handle, reason: Exception) -> None:
        self.counts.engines_lost += 1
        self.counts.lost_because = [*self.counts.lost_because[-9:], str(reason)]
        self._rates.pop(handle.number, None)
        if handle.number in self.scheduler.engines:
            for work in self.scheduler.remove_engine(handle.number):
                running = self._samples.get(work.key)  # type: ignore[call-overload]
                if running is not None:
                    self._strike(running, work, reason)
        if handle.leaving:
            self.fleet.release(handle.place)
            return
        tries = handle.tries + 1 if handle.facts is None else 0
        if tries < self.limits.max_start_tries:
            self._later.append((time.monotonic() + 0.1 * tries, lambda: self._restart(handle.place, tries)))
            return
        self.fleet.release(handle.place)
        if not self.fleet.handles and not self._later:
            self._break(
                EngineLostError(f"no engine is left, after {tries} in a row could not be started: {reason}")
            )

    def _restart(self, place: int, tries: int) -> None:
        self.fleet.start(place, tries)

    def shrink_here(self, count: int) -> None:
        """Takes engines out: what they run ends elsewhere, from where it is."""
        leaving = sorted(
            (handle for handle in self.fleet.handles.values() if not handle.leaving),
            key=lambda handle: len(self._running_on(handle)),
        )[:count]
        for handle in leaving:
            handle.leaving = True
            if handle.number in self.scheduler.engines:
                self.scheduler.close_engine(handle.number)
        for handle in leaving:
            for work in self._running_on(handle):
                if not work.leaving:
                    work.leaving = True
                    self._ask_back(work.key, handle.number, None)  # type: ignore[arg-type]

    def _running_on(self, handle: Handle) -> list[Work]:
        load = self.scheduler.engines.get(handle.number)
        return [] if load is None else list(load.running.values())

    @property
    def leaving_works(self) -> bool:
        """Whether samples are on their way from one engine to another."""
        return any(work.leaving for load in self.scheduler.engines.values() for work in load.running.values())

    # Requests

    def _submit_here(self, requests: list[PoolRequest]) -> None:
        for request in requests:
            if self.broken is not None:
                request.set_exception(self.broken)
                continue
            for index, given in enumerate(request.partials):
                if request.completions[index] is None:
                    self._add(_Running(request, index, request.sample(index), given))
            self._finish_if_done(request)

    def _add(self, running: _Running) -> None:
        sample = running.sample
        self._samples[sample.key] = running
        done = len(sample.continue_from.token_ids) if sample.continue_from is not None else 0
        limit = sample.sampling.max_tokens
        work = Work(
            key=sample.key,
            group=sample.group_id,
            prompt_tokens=len(sample.prompt_token_ids),
            max_tokens=limit,
            expected_tokens=self.lengths.expected(sample.group_id, limit),
            done_tokens=done,
            alone=running.strikes >= _ALONE_FROM,
            known=self.lengths.knows(sample.group_id),
        )
        target, running.target = running.target, None
        if target is not None and self.scheduler.place(work, target):
            self.fleet.handles[target].outbox.append(Submit([sample]))
        else:
            self.scheduler.add(work)

    def _reported(self, handle: Handle, report: Report) -> None:
        for ended in report.ended:
            running = self._samples.get(ended.key)
            if running is not None and running.sample.attempt == ended.attempt:
                self._ended(running, ended)
        for key, tokens in report.tokens.items():
            self.scheduler.progress(key, tokens)
        load = self.scheduler.engines.get(handle.number)
        if load is not None:
            self._measure(handle.number, load, report.tokens)

    def _measure(self, number: int, load: Any, tokens: dict[Key, int]) -> None:
        now = time.monotonic()
        then, before = self._rates.get(number, (now, {}))
        if not before or now > then + 1.0:
            gained = [tokens[key] - before[key] for key in tokens.keys() & before.keys()]
            if gained and sum(gained) > 0:
                rate = sum(gained) / len(gained) / (now - then)
                load.tokens_per_s = rate if not load.tokens_per_s else 0.5 * (load.tokens_per_s + rate)
            self._rates[number] = (now, tokens)

    def _ended(self, running: _Running, ended: Ended) -> None:
        work = self.scheduler.discard(ended.key)
        if ended.error is not None:
            if ended.refused or work is None:
                self._fail_request(running.request, ended.error)
            else:
                self._strike(running, work, ended.error)
            return
        completion = ended.completion
        unfinished = completion is None or completion.finish_reason == "abort"
        if unfinished and work is not None and work.leaving and not running.aborted:
            self._again(running, completion if completion is not None else running.sample.continue_from)
            return
        if completion is None:
            completion = nothing_yet(running.sample, self.tokenizer)
        self._finish(running, completion, work.engine if work is not None else None)

    @property
    def tokenizer(self) -> Any:
        """The engines' tokenizer."""
        return next((h.facts.tokenizer for h in self.fleet.serving if h.facts is not None), None)

    def _again(self, running: _Running, partial: Completion | None) -> None:
        """Hands a sample to an engine once more, from where it is."""
        sample = running.sample
        running.sample = dataclasses.replace(sample, attempt=sample.attempt + 1, continue_from=partial)
        self._add(running)

    def _strike(self, running: _Running, work: Work, reason: Exception) -> None:
        """A sample was lost with its engine, or failed in a step: it runs again, up to max_retries times."""
        running.strikes += 1
        running.target = None
        if running.aborted:
            self._finish(running, nothing_yet(running.sample, self.tokenizer))
        elif running.strikes > self.limits.max_retries:
            self._fail_request(running.request, reason)
        else:
            self.counts.samples_retried += 1
            partial = running.sample.continue_from
            if partial is not running.given and partial is not None:
                own = partial.weight_versions[0 if running.given is None else len(running.given.token_ids) :]
                if (own != self.version).any():  # it would mix weights that a drain keeps apart
                    partial = running.given
            self._again(running, partial)

    def _finish(self, running: _Running, completion: Completion, engine: int | None = None) -> None:
        request = running.request
        del self._samples[running.sample.key]
        request.completions[running.index] = completion
        request.missing -= 1
        if completion.finish_reason != "abort":
            self.lengths.record(request.group_id, len(completion.token_ids))
            expected = self.lengths.expected(request.group_id, running.sample.sampling.max_tokens)
            self.scheduler.expect(request.group_id, expected)
            if self.sharing.on and self._keeper is not None:
                at = -1 if engine is None else engine
                self._texts.add(
                    LearntText(at, request.group_id, request.prompt_token_ids, completion.token_ids)
                )
        self._finish_if_done(request)

    def _finish_if_done(self, request: PoolRequest) -> None:
        if request.missing == 0 and not request.done():
            self.counts.requests_finished += 1
            request.set_result(request.output())

    def _fail_request(self, request: PoolRequest, error: Exception) -> None:
        if request.done():
            return
        self._withdraw([key for key in request.keys if key in self._samples])
        self.counts.requests_failed += 1
        request.error = error
        request.set_exception(error)

    def _withdraw(self, keys: Iterable[Key]) -> None:
        """Samples nobody waits for any more."""
        for key in keys:
            del self._samples[key]
            work = self.scheduler.discard(key)
            if work is not None and work.engine in self.fleet.handles:
                self.fleet.handles[work.engine].outbox.append(Abort([key]))

    def abort_here(self, requests: Iterable[PoolRequest]) -> None:
        """Ends requests with what they have."""
        for request in requests:
            for key in request.keys:
                running = self._samples.get(key)
                if running is None:
                    continue
                running.aborted = True
                work = self.scheduler.works.get(key)
                if work is not None and work.engine is not None:
                    if not work.leaving:
                        self.fleet.handles[work.engine].outbox.append(Abort([key]))
                else:
                    self.scheduler.discard(key)
                    self._finish(running, nothing_yet(running.sample, self.tokenizer))

    def slots_here(self) -> int:
        """Samples that all engines run at the same time."""
        return sum(load.slots for load in self.scheduler.engines.values()) or 1

    def unfinished_here(self) -> list[PoolRequest]:
        """All requests that have not ended."""
        return list({id(one.request): one.request for one in self._samples.values()}.values())

    # History and counts

    def _share_texts(self) -> None:
        texts = self._texts.take()
        self.counts.history_bytes_left_out, self._texts.left_out_bytes = (
            self.counts.history_bytes_left_out + self._texts.left_out_bytes,
            0,
        )
        if not texts or self._keeper is None:
            return
        self.counts.history_objects += 1
        self.counts.history_bytes += sum(text.size_bytes for text in texts)
        ref = ray.put(texts)
        self._keeper.learn.remote([[ref]])
        serving = self.fleet.serving
        if len(serving) > 1:
            for handle in serving:
                handle.actor.learn.remote([[ref]])

    def stats_here(self) -> tuple[PoolStats, dict[int, Future[EngineStats]]]:
        """The pool's counts, and the engines' to come."""
        counts = dataclasses.replace(self.counts, lost_because=list(self.counts.lost_because), engines={})
        counts.waiting, counts.running = self.scheduler.waiting, self.scheduler.running
        return counts, {handle.number: handle.call("stats") for handle in self.fleet.serving}

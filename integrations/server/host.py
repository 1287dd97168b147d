"""The engine in a thread of its own, and the ways to it from an event loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rollout_spec import RolloutEngine, SamplingParams
from rollout_spec.errors import EngineStateError, RolloutError
from rollout_spec.intake import Prompt
from rollout_spec.requests import Request

_log = logging.getLogger(__name__)
Result = TypeVar("Result")
_IDLE_S = 0.5  # between looks at a watched folder, while nothing runs
_WINDOW_S = 10.0


class QueueFullError(RolloutError, RuntimeError):
    """As many requests wait as may."""


@dataclass
class Progress:
    """What a running request has so far: for each sample its token ids and log-probabilities."""

    tokens: list[list[int]]
    done: bool


@dataclass(eq=False)
class Job:
    """A submitted request. `progress` gets a Progress after each step that brought tokens, if it streams, and at the
    end."""

    prompt: Prompt
    sampling: SamplingParams
    request_id: Hashable
    streams: bool
    loop: asyncio.AbstractEventLoop
    progress: asyncio.Queue[Progress] = field(default_factory=asyncio.Queue)
    accepted: asyncio.Future[None] = field(init=False)
    request: Request | None = None
    seen: int = 0

    def __post_init__(self) -> None:
        self.accepted = self.loop.create_future()


class EngineHost:
    """Owns an engine: one thread steps it, everybody else asks that thread."""

    def __init__(self, engine: RolloutEngine, *, max_waiting: int = 1024) -> None:
        self.engine = engine
        self.max_waiting = max_waiting
        self.paused = False
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._jobs: dict[Hashable, Job] = {}
        self._wake = threading.Condition()
        self._stop = False
        self._ids = itertools.count()
        self._rate: deque[tuple[float, int]] = deque()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # From any thread

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Runs `function` in the engine's thread, between two steps."""
        future: Future[Result] = Future()
        with self._wake:
            if self._stop or self.error is not None:
                future.set_exception(EngineStateError(f"the engine's thread has ended: {self.error}"))
                return future
            self._calls.append((function, future))
            self._wake.notify()
        return future

    def close(self) -> None:
        """Ends the thread and closes the engine; unfinished requests fail."""
        with self._wake:
            self._stop = True
            self._wake.notify()
        self._thread.join()

    # From an event loop

    async def ask(self, function: Callable[[], Result]) -> Result:
        """As `call`, awaited."""
        return await asyncio.wrap_future(self.call(function))

    async def submit(
        self, prompt: Prompt, sampling: SamplingParams, *, request_id: Hashable = None, streams: bool = False
    ) -> Job:
        """Queues a prompt. Raises what the engine refuses it with, and QueueFullError."""
        name = f"http-{next(self._ids)}" if request_id is None else request_id
        job = Job(prompt, sampling, name, streams, asyncio.get_running_loop())
        await self.ask(lambda: self._submit(job))
        return job

    async def finished(self, job: Job) -> Request:
        """The job's request, ended. Abandoning this aborts it."""
        try:
            while not (await job.progress.get()).done:
                pass
        except BaseException:
            self.abandon(job)
            raise
        assert job.request is not None
        return job.request

    def abandon(self, job: Job) -> None:
        """Nobody waits for it any longer: it is aborted."""
        self.call(lambda: self._abort([job.request_id] if job.request_id in self._jobs else []))

    # In the engine's thread

    def _submit(self, job: Job) -> None:
        stats = self.engine.stats()
        if stats.waiting + job.sampling.n > self.max_waiting:
            raise QueueFullError(f"{stats.waiting} requests wait already; try again later")
        job.request = self.engine.submit(job.prompt, job.sampling, request_id=job.request_id)
        self._jobs[job.request_id] = job

    def abort(self, request_ids: list[Hashable] | None) -> int:
        """Ends these requests, or all, with what they have; how many there were. For `ask`."""
        chosen = (
            list(self._jobs) if request_ids is None else [one for one in request_ids if one in self._jobs]
        )
        self._abort(chosen)
        return len(chosen)

    def _abort(self, request_ids: list[Hashable]) -> None:
        if request_ids:
            self.engine.abort(request_ids)
        self._hand_out()

    def pause(self) -> None:
        self.paused = True
        self.engine.pause()

    def resume(self) -> None:
        self.paused = False
        self.engine.resume()

    def tokens_per_s(self) -> float:
        """Over the last seconds. For `ask`."""
        now, total = time.monotonic(), self.engine.stats().generated_tokens
        self._rate.append((now, total))
        while len(self._rate) > 2 and self._rate[1][0] < now - _WINDOW_S:
            self._rate.popleft()
        since, before = self._rate[0]
        return (total - before) / (now - since) if now > since else 0.0

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    if not (self._calls or self._stop or self._has_work()):
                        self._wake.wait(_IDLE_S)
                    if self._stop:
                        break
                    calls, self._calls = list(self._calls), deque()
                for function, future in calls:
                    self._answer(function, future)
                self.engine.step()  # also looks at a watched folder, and hands out what was aborted
                self._hand_out()
        except BaseException as error:
            self.error = error
            _log.exception("the engine's thread ended")
        finally:
            self._shut_down()

    def _has_work(self) -> bool:
        return bool(self._jobs) and not self.paused

    @staticmethod
    def _answer(function: Callable[[], Any], future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    def _hand_out(self) -> None:
        """Tells jobs of new tokens, and of their ends."""
        for job in list(self._jobs.values()):
            request = job.request
            assert request is not None
            if request.ended:
                del self._jobs[job.request_id]
                self._tell(job, True)
            elif job.streams:
                count = sum(sequence.num_generated for sequence in request.sequences)
                if count > job.seen:
                    job.seen = count
                    self._tell(job, False)

    @staticmethod
    def _tell(job: Job, done: bool) -> None:
        assert job.request is not None
        tokens = [sequence.output.tolist() for sequence in job.request.sequences]
        try:
            job.loop.call_soon_threadsafe(job.progress.put_nowait, Progress(tokens, done))
        except RuntimeError:  # its loop is closed: nobody listens
            _log.debug("nobody waits for %r any longer", job.request_id)

    def _shut_down(self) -> None:
        self.engine.close()
        for job in list(self._jobs.values()):
            self._tell(job, True)
        with self._wake:
            self._stop = True
            for _, future in self._calls:
                future.set_exception(EngineStateError("the server shuts down"))

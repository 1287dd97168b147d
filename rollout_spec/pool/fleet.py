"""The actors of a pool: started, watched, lost and replaced. Everything here runs in the pool's own thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import ray

from ..errors import EngineLostError
from .actor import GROUPS, BuildPlan, EngineActor
from .messages import Answer, Call, EngineFacts, Message, Report
from .placement import Places

_log = logging.getLogger(__name__)

REPORT_S = 1.0
"""How long an engine waits for something to report."""
_WORST_TICK_S = 1.0


@dataclass(eq=False)
class Handle:
    """One actor as the pool sees it."""

    number: int
    place: int
    actor: Any
    facts: EngineFacts | None = None
    """None until the engine is built."""
    silent_s: float = 0.0
    """Since its last report; time in which the pool's own process stood still isn't counted."""
    weight_version: int = 0
    tries: int = 0
    """How many engines in a row were lost at this place before they had served."""
    target_version: int = 0
    """Of its weights, once it has done what it was told."""
    leaving: bool = False
    """It gets no more work and is closed once it has none."""
    outbox: list[Message] = field(default_factory=list)
    calls: dict[int, Future] = field(default_factory=dict)
    _posts: int = 0
    _next_call: int = 0

    def call(self, name: str, **arguments: Any) -> Future:
        """A verb of its engine; the future is set when the answer comes."""
        future: Future = Future()
        number = self._next_call
        self._next_call += 1
        self.calls[number] = future
        self.outbox.append(Call(number, name, arguments))
        return future

    def flush(self) -> None:
        """Sends what was collected, in one message."""
        if self.outbox:
            self.actor.post.remote(self._posts, self.outbox)
            self._posts += 1
            self.outbox = []

    def answer(self, answer: Answer) -> None:
        """An answer came."""
        future = self.calls.pop(answer.number, None)
        if future is None:
            return
        if answer.error is not None:
            future.set_exception(answer.error)
        else:
            future.set_result(answer.result)

    def fail_calls(self, error: Exception) -> None:
        """No more answers will come."""
        calls, self.calls = self.calls, {}
        for future in calls.values():
            future.set_exception(error)


@dataclass(frozen=True, eq=False)
class FleetEvents:
    """What the pool does when something happens to an engine."""

    started: Callable[[Handle], None]
    reported: Callable[[Handle, Report], None]
    lost: Callable[[Handle, Exception], None]


class Fleet:
    """Actors and their health.

    plan: how the engine at a place is built. post: hands a function to the pool's thread. health_deadline_s: how
    long an engine may take over one step or update, or say nothing; start_deadline_s: over being built.
    """

    def __init__(
        self,
        places: Places,
        plan: Callable[[int, int], BuildPlan],
        post: Callable[[Callable[[], None]], None],
        events: FleetEvents,
        *,
        health_deadline_s: float,
        start_deadline_s: float,
    ) -> None:
        self.places = places
        self.handles: dict[int, Handle] = {}
        self._plan, self._post, self._events = plan, post, events
        self._health_deadline_s, self._start_deadline_s = health_deadline_s, start_deadline_s
        self._numbers = 0
        self._last_tick = time.monotonic()
        self._actor_class: Any = cast(Any, ray.remote)(concurrency_groups=GROUPS)(EngineActor)
        self._options: dict[int, dict[str, Any]] = {}

    def new_places(self, count: int) -> list[int]:
        """Places for so many more engines; may wait for the cluster. Safe to call from any thread."""
        taken = set(self._options)
        fresh: list[int] = []
        place = 0
        while len(fresh) < count:
            if place not in taken:
                fresh.append(place)
            place += 1
        self._options |= self.places.options(fresh)
        return fresh

    def start(self, place: int, tries: int = 0) -> Handle:
        """An actor at a place; `events.started` tells when its engine is built."""
        number = self._numbers
        self._numbers += 1
        actor = self._actor_class.options(**self._options[place], max_restarts=0, max_task_retries=0).remote(
            self._plan(number, place)
        )
        handle = Handle(number, place, actor, tries=tries)
        self.handles[number] = handle
        self._ask(handle)
        return handle

    @property
    def serving(self) -> list[Handle]:
        """Those whose engine is built."""
        return [handle for handle in self.handles.values() if handle.facts is not None]

    def _ask(self, handle: Handle) -> None:
        future = handle.actor.report.remote(REPORT_S).future()
        future.add_done_callback(lambda done: self._post(lambda: self._heard(handle, done)))

    def _heard(self, handle: Handle, done: Future) -> None:
        if self.handles.get(handle.number) is not handle:
            return
        error = done.exception()
        if error is not None:
            self.lose(handle, error)
            return
        report: Report = done.result()
        handle.silent_s = 0.0
        handle.weight_version = report.weight_version
        self._ask(handle)
        for answer in report.answers:
            if answer.number == -1:
                handle.facts = answer.result
                handle.target_version = answer.result.weight_version
                self._events.started(handle)
            else:
                handle.answer(answer)
        self._events.reported(handle, report)
        if self.handles.get(handle.number) is not handle:
            return
        deadline = self._start_deadline_s if handle.facts is None else self._health_deadline_s
        if report.broken is not None:
            self.lose(handle, report.broken)
        elif report.busy_s > deadline:
            self.lose(
                handle,
                EngineLostError(
                    f"engine {handle.number} took longer than {deadline:g} s over {report.doing}"
                ),
            )

    def tick(self) -> None:
        """Loses engines that say nothing any more."""
        now = time.monotonic()
        passed, self._last_tick = min(now - self._last_tick, _WORST_TICK_S), now
        for handle in list(self.handles.values()):
            handle.silent_s += passed
            deadline = self._start_deadline_s if handle.facts is None else self._health_deadline_s
            if handle.silent_s > REPORT_S + deadline:
                self.lose(
                    handle,
                    EngineLostError(f"engine {handle.number} has said nothing for {handle.silent_s:.0f} s"),
                )

    def lose(self, handle: Handle, error: BaseException) -> None:
        """The engine is no more: what it still does is of no account."""
        if self.handles.pop(handle.number, None) is None:
            return
        ray.kill(handle.actor)
        reason = (
            error
            if isinstance(error, EngineLostError)
            else EngineLostError(f"engine {handle.number} was lost: {_first_line(error)}")
        )
        if reason is not error:
            reason.__cause__ = error
        _log.warning("%s", reason)
        handle.fail_calls(reason)
        self._events.lost(handle, reason)

    def give_up(self, handle: Handle) -> None:
        """Ends an actor that has nothing to do, and its place."""
        self.handles.pop(handle.number, None)
        ray.kill(handle.actor)
        handle.fail_calls(EngineLostError(f"engine {handle.number} was taken out of the pool"))
        self.release(handle.place)

    def release(self, place: int) -> None:
        """Nothing runs at a place any more."""
        self._options.pop(place, None)
        self.places.release(place)

    def flush(self) -> None:
        """Sends every engine what was collected for it."""
        for handle in self.handles.values():
            handle.flush()

    def end(self) -> None:
        """Ends all actors."""
        for handle in list(self.handles.values()):
            self.give_up(handle)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''} {lines[-1] if len(lines) > 1 else ''}"[:400]

"""An engine in a thread of its own: messages go in and are taken between two steps, reports come out.

Without Ray, so that it can be tested alone; `actor.py` puts it into an actor.
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..engine import RolloutEngine
from ..errors import RolloutError
from ..requests import Request
from ..weights.served import Fingerprint
from .learning import TextLearner
from .messages import Abort, Answer, Call, Ended, Key, LearntText, Message, Report, Sample, Submit

_log = logging.getLogger(__name__)

_PROGRESS_EVERY_S = 0.2
_TICK_S = 0.25
_WORST_TICK_S = 1.0  # a longer one means that this process was stopped itself, which is nobody's fault


@dataclass(eq=False)
class _Update:
    """New weights on their way. staged: ready to be applied; weights: on the device already, or None."""

    call: Call
    staged: bool
    weights: Any = None
    error: Exception | None = None


class EngineRunner:
    """Builds an engine in its thread and runs it there.

    build: makes the engine. post() and report() may be called from any thread and answer at once, whatever the
    engine is doing.
    """

    def __init__(self, build: Callable[[], RolloutEngine], facts: Callable[[RolloutEngine], Any]) -> None:
        self._build, self._facts = build, facts
        self._changed = threading.Condition()
        self._inbox: list[Message] = []
        self._posted: dict[int, list[Message]] = {}
        self._next_post = 0
        self._ended: list[Ended] = []
        self._answers: list[Answer] = []
        self._tokens: dict[Key, int] = {}
        self._broken: Exception | None = None
        self._doing = ""
        self._busy_s = 0.0
        self._last_tick = time.monotonic()
        self._told_tokens_at = 0.0
        self._version = 0
        self._stop = False
        # Of the engine's thread alone from here on.
        self._waiting: list[Sample] = []
        self._fed: dict[Key, tuple[Sample, Request]] = {}
        self._updates: list[_Update] = []
        self._paused = self._asleep = False
        self.engine: RolloutEngine
        self._learner: TextLearner | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # From any thread

    def post(self, number: int, messages: list[Message]) -> None:
        """Messages for the engine. number: counts from 0, and messages are taken in this order."""
        with self._changed:
            self._posted[number] = messages
            while self._next_post in self._posted:
                self._inbox += self._posted.pop(self._next_post)
                self._next_post += 1
            self._changed.notify_all()

    def report(self, timeout_s: float) -> Report:
        """What happened since the last report; waits at most so long for something to happen."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not (self._ended or self._answers or self._broken or self._stop):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, _TICK_S))
                self._tick()
            self._tick()
            ended, self._ended = self._ended, []
            answers, self._answers = self._answers, []
            return Report(
                ended,
                answers,
                dict(self._tokens),
                self._busy_s if self._doing else 0.0,
                self._doing,
                self._version,
                self._broken,
            )

    def learn(self, texts: list[LearntText]) -> None:
        """Completions of other engines, for the drafter; learnt beside the steps."""
        if self._learner is not None:
            self._learner.put(texts)

    def _tick(self) -> None:
        now = time.monotonic()
        self._busy_s += min(now - self._last_tick, _WORST_TICK_S)
        self._last_tick = now

    # In the engine's thread

    def _run(self) -> None:
        try:
            with self._during("building"):
                self.engine = self._build()
                facts = self._facts(self.engine)
                self._learner = TextLearner(self.engine.drafter)
        except BaseException as error:
            self._break(error)
            return
        with self._changed:
            self._version = self.engine.weight_version
        self._say(answers=[Answer(-1, facts)])
        try:
            while not self._stop:
                self._turn()
        except BaseException as error:
            self._break(error)

    def _turn(self) -> None:
        for message in self._next_messages():
            if isinstance(message, Submit):
                self._waiting += message.samples
            elif isinstance(message, Abort):
                self._abort(message.keys)
            else:
                self._call(message)
        if self._updates and self._may_update():
            self._apply_update()
        if self._stop or self._asleep:
            self._hand_out()
            return
        if not self._updates_hold and not self._paused:
            self._feed()
        if self._fed and not self._paused:
            with self._during("a step"):
                self.engine.step()
        self._hand_out()

    @property
    def _updates_hold(self) -> bool:
        """Whether nothing new may begin, as new weights are ready for it."""
        return bool(self._updates) and self._updates[0].staged

    def _next_messages(self) -> list[Message]:
        with self._changed:
            while not (self._inbox or self._stop or self._has_work()):
                self._changed.wait()
            taken, self._inbox = self._inbox, []
            return taken

    def _has_work(self) -> bool:
        if self._updates and self._may_update():
            return True
        return (
            not self._asleep
            and not self._paused
            and bool(self._fed or (self._waiting and not self._updates_hold))
        )

    def _feed(self) -> None:
        """Gives the engine what its slots take, so that whatever it has been given has begun."""
        if not self._waiting:
            return
        room = self.engine.config.max_seqs - len(self._fed)
        for sample in self._waiting[: max(0, room)]:
            try:
                request = self.engine.submit(
                    sample.prompt_token_ids,
                    sample.sampling,
                    request_id=(*sample.key, sample.attempt),
                    group_id=sample.group_id,
                    continue_from=sample.continue_from,
                )
            except RolloutError as error:
                self._say(ended=[Ended(sample.key, sample.attempt, None, _portable(error), refused=True)])
            else:
                self._fed[sample.key] = (sample, request)
        del self._waiting[: max(0, room)]

    def _hand_out(self) -> None:
        ended = []
        for key, (sample, request) in list(self._fed.items()):
            if not request.ended:
                continue
            del self._fed[key]
            if request.error is not None:
                ended.append(Ended(key, sample.attempt, None, _portable(request.error)))
            else:
                ended.append(Ended(key, sample.attempt, request.completions[0]))
        now = time.monotonic()
        tokens = None
        if ended or now > self._told_tokens_at + _PROGRESS_EVERY_S:
            self._told_tokens_at = now
            tokens = {
                key: request.sequences[0].num_generated
                for key, (_, request) in self._fed.items()
                if request.sequences
            }
        self._say(ended=ended, tokens=tokens)

    def _abort(self, keys: list[Key]) -> None:
        wanted = set(keys)
        for sample in [sample for sample in self._waiting if sample.key in wanted]:
            self._waiting.remove(sample)
            self._say(ended=[Ended(sample.key, sample.attempt, sample.continue_from)])
        running = [
            self._fed[key][1].request_id for key in keys if key in self._fed and not self._fed[key][1].ended
        ]
        if running:
            self.engine.abort(running)

    def _call(self, call: Call) -> None:
        try:
            with self._during(call.name):
                result = getattr(self, f"do_{call.name}")(call)
        except Exception as error:
            self._say(answers=[Answer(call.number, error=_portable(error))])
        else:
            if result is not _LATER:
                self._say(answers=[Answer(call.number, result)])

    # Verbs

    def do_update(self, call: Call) -> object:
        """New weights. arguments: `weights` (what gives them when called), and those of update_weights."""
        self._updates.append(_Update(call, staged=not call.arguments.get("overlap", False)))
        if not self._updates[-1].staged:
            threading.Thread(
                target=self._stage, args=(self._updates[-1],), name="staging", daemon=True
            ).start()
        return _LATER

    def _stage(self, update: _Update) -> None:
        """Brings weights to the device while the engine steps on the old ones."""
        try:
            update.weights = staged_copy(update.call.arguments["weights"]())
        except Exception as error:
            update.error = error
        with self._changed:
            update.staged = True
            self._changed.notify_all()

    def do_pause(self, call: Call) -> None:
        """Stops stepping."""
        self.engine.pause()
        self._paused = True

    def do_resume(self, call: Call) -> None:
        """Goes on stepping."""
        self.engine.resume()
        self._paused = False

    def do_sleep(self, call: Call) -> None:
        """Gives device memory back."""
        self.engine.sleep(**call.arguments)
        self._asleep = True

    def do_wake_up(self, call: Call) -> None:
        """Undoes sleep."""
        self.engine.wake_up()
        self._asleep = False

    def do_stats(self, call: Call) -> object:
        """EngineStats."""
        return self.engine.stats()

    def do_reset_stats(self, call: Call) -> None:
        """Starts counting anew."""
        self.engine.reset_stats()

    def do_warm_up(self, call: Call) -> None:
        """Compiles every size of step."""
        self.engine.warm_up()

    def do_load_history(self, call: Call) -> None:
        """A history file to begin with."""
        self.engine.load_history(call.arguments["path"])

    def do_close(self, call: Call) -> None:
        """Frees the engine and ends the thread."""
        self.engine.close()
        self._stop = True

    def _may_update(self) -> bool:
        """A drain waits until what was begun has ended; meanwhile nothing is fed."""
        update = self._updates[0]
        drains = (
            update.call.arguments["mode"] == "drain" and not self._asleep
        )  # a sleeping engine drains later
        return update.staged and not (drains and self._fed)

    def _apply_update(self) -> None:
        update = self._updates.pop(0)
        call = update.call
        arguments: dict[str, Any] = dict(call.arguments)
        del arguments["weights"]
        arguments.pop("overlap", None)
        try:
            with self._during("an update"):
                if update.error is not None:
                    raise update.error
                staged = update.weights is not None
                weights = update.weights if staged else call.arguments["weights"]()
                arguments["donate"] = staged
                report = self.engine.update_weights(weights, **arguments)
                report = dataclasses.replace(report, fingerprint=Fingerprint(""))
        except Exception as error:
            self._say(answers=[Answer(call.number, error=_portable(error))])
        else:
            with self._changed:
                self._version = self.engine.weight_version
            self._say(answers=[Answer(call.number, report)])

    # Saying what happened

    @contextmanager
    def _during(self, doing: str) -> Iterator[None]:
        with self._changed:
            self._tick()
            self._doing, self._busy_s = doing, 0.0
        try:
            yield
        finally:
            with self._changed:
                self._doing = ""

    def _say(
        self,
        *,
        ended: list[Ended] | None = None,
        answers: list[Answer] | None = None,
        tokens: dict[Key, int] | None = None,
    ) -> None:
        if not (ended or answers or tokens is not None):
            return
        with self._changed:
            self._ended += ended or []
            self._answers += answers or []
            if tokens is not None:
                self._tokens = tokens
            if ended or answers:
                self._changed.notify_all()

    def _break(self, error: BaseException) -> None:
        _log.error("the engine can't go on", exc_info=error)
        reason = (
            error if isinstance(error, Exception) else RuntimeError(f"the engine's thread ended: {error!r}")
        )
        with self._changed:
            self._broken = _portable(reason)
            self._changed.notify_all()


_LATER = object()


def staged_copy(weights: Any) -> Any:
    """Copies of a tree's arrays on the device, for the engine to take over; other kinds of weights as they are."""
    import jax
    import jax.numpy as jnp

    if not isinstance(weights, dict):
        return weights
    copies = jax.tree.map(lambda array: jnp.array(array, copy=True), weights)
    return jax.block_until_ready(copies)


def _portable(error: Exception) -> Exception:
    """The error itself where it survives a journey to another process, else its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error

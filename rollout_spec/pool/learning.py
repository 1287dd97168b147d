"""What an engine's drafter learns from completions of other engines, beside the steps."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Hashable
from typing import Any

from ..draft.drafter import Drafter
from .messages import LearntText

_log = logging.getLogger(__name__)

_TOKENS_AT_ONCE = 64  # a drafter lets one caller in at a time, so that a step waits for no more than this
_REST_PER_WORK = 3.0  # as a multiple of the time that learning took, so that the host is left to the steps


class TextLearner:
    """A thread that teaches a drafter. None: nothing is learnt."""

    def __init__(self, drafter: Drafter | None) -> None:
        self._drafter = drafter
        self._ids = itertools.count()
        self._texts: queue.SimpleQueue[list[LearntText] | threading.Event] = queue.SimpleQueue()
        self.tokens_learnt = 0
        if drafter is not None:
            threading.Thread(target=self._run, name="learner", daemon=True).start()

    def put(self, texts: list[LearntText]) -> None:
        """To be learnt soon."""
        if self._drafter is not None:
            self._texts.put(texts)

    def flush(self) -> None:
        """Waits until all that was put has been learnt."""
        if self._drafter is not None:
            done = threading.Event()
            self._texts.put(done)
            done.wait()

    def _run(self) -> None:
        while True:
            texts = self._texts.get()
            if isinstance(texts, threading.Event):
                texts.set()
                continue
            for text in texts:
                try:
                    self._learn(text)
                except Exception:  # a drafter that doesn't learn costs speed only
                    _log.exception("a completion of another engine could not be learnt")

    def _learn(self, text: LearntText) -> None:
        drafter: Any = self._drafter
        request_id: Hashable = ("learnt", next(self._ids))
        drafter.start(request_id, text.prompt_token_ids, text.group_id)
        try:
            for first in range(0, len(text.token_ids), _TOKENS_AT_ONCE):
                started = time.perf_counter()
                drafter.extend(request_id, text.token_ids[first : first + _TOKENS_AT_ONCE])
                time.sleep(min(0.01, _REST_PER_WORK * (time.perf_counter() - started)))
        finally:
            drafter.finish(request_id)
        self.tokens_learnt += len(text.token_ids)

"""From what a caller hands in to requests that run: lists, generators, and what was cut short before."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sized
from collections.abc import Sequence as SequenceOf
from typing import Any

from ..errors import ConfigError, PromptError
from ..intake import Intake, Prompt, check_hashable
from ..outputs import Completion
from ..progress import Progress
from ..sampling import SamplingParams
from .driver import Driver
from .requests import PartialRollout, PoolRequest

_UNFINISHED_PER_SLOT = 4


class Batches:
    """Requests for prompts, and how they run together.

    max_unfinished: requests taken from a generator at a time; None is four for each slot of the pool.
    """

    def __init__(self, driver: Driver, intake: Intake, max_unfinished: int | None) -> None:
        self.driver = driver
        self.intake = intake
        self.max_unfinished = max_unfinished
        self._submitting = threading.Lock()
        self._numbers = itertools.count()

    def request(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        index: int,
        request_id: Hashable,
        group_id: Hashable,
        continue_from: Completion | None,
        name: str,
    ) -> PoolRequest:
        """A checked request, not submitted. Raises PromptError, ConfigError or CapacityError."""
        check_hashable("request_id", request_id)
        number = next(self._numbers)
        with self._submitting:  # seeds are drawn in the order of requests, as one engine would draw them
            checked = self.intake.request(
                prompt,
                sampling,
                request_id=number if request_id is None else request_id,
                group_id=group_id,
                index=index,
                continue_from=continue_from,
                name=name,
            )
        partials: list[Completion | None] = (
            [continue_from] if continue_from is not None else [None] * sampling.n
        )
        return PoolRequest(number, checked, checked.sequences[0].seed, partials)

    def carried(self, partial: PartialRollout, index: int) -> PoolRequest:
        request = self.request(
            partial.prompt_token_ids,
            partial.sampling,
            index,
            None,
            partial.group_id,
            None,
            f"carried[{index}]",
        )
        request.carry(partial.completions)
        return request

    def check_all(
        self,
        prompts: Iterable[Prompt],
        sampling: SamplingParams | SequenceOf[SamplingParams],
        group_ids: SequenceOf[Hashable] | None,
        continue_from: Completion | SequenceOf[Completion | None] | None,
    ) -> list[PoolRequest]:
        if isinstance(prompts, str):
            raise PromptError("prompts must be a list of prompts, got one text; put it into a list")
        if not isinstance(prompts, Iterable):
            raise PromptError(f"prompts must be a list of prompts, got {type(prompts).__name__}")
        prompts = list(prompts)
        columns: list[Any] = []
        for name, values in (
            ("sampling", sampling),
            ("group_ids", group_ids),
            ("continue_from", continue_from),
        ):
            if values is None or isinstance(values, SamplingParams):
                columns.append([values] * len(prompts))
            elif isinstance(values, Completion) and len(prompts) == 1:
                columns.append([values])
            elif not isinstance(values, Sized) or len(values) != len(prompts):
                given = len(values) if isinstance(values, Sized) else type(values).__name__
                raise ConfigError(f"{name} must have one entry a prompt: {len(prompts)} prompts, got {given}")
            else:
                columns.append(values)
        return [
            self.request(prompt, one, index, None, group_id, given, f"prompts[{index}]")
            for index, (prompt, one, group_id, given) in enumerate(zip(prompts, *columns, strict=True))
        ]

    def run(
        self,
        prompts: Iterable[Prompt],
        sampling: SamplingParams | SequenceOf[SamplingParams],
        group_ids: SequenceOf[Hashable] | None,
        continue_from: Completion | SequenceOf[Completion | None] | None,
        progress: bool,
    ) -> Iterator[PoolRequest]:
        """Requests as they end; what is abandoned is aborted. A list is checked as a whole before anything runs."""
        if not isinstance(prompts, Iterator):
            return self.run_all(self.check_all(prompts, sampling, group_ids, continue_from), progress)
        if not isinstance(sampling, SamplingParams) or group_ids is not None or continue_from is not None:
            raise ConfigError(
                "with a generator of prompts, sampling must be one SamplingParams, and group_ids and continue_from None"
            )
        return self._run_lazily(prompts, sampling, progress)

    def run_all(self, requests: list[PoolRequest], progress: bool) -> Iterator[PoolRequest]:
        ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        try:
            for request in requests:
                request.add_done_callback(ended.put)
            self.driver.submit(requests)
            with Progress(progress, "prompts", len(requests)) as bar:
                yield from self._as_they_end(ended, len(requests), bar, Counter())
        finally:
            self.abort_unfinished(requests)

    def _run_lazily(
        self, prompts: Iterator[Prompt], sampling: SamplingParams, progress: bool
    ) -> Iterator[PoolRequest]:
        ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        most = self.max_unfinished or _UNFINISHED_PER_SLOT * self.driver.call(self.driver.slots_here)
        unfinished: dict[int, PoolRequest] = {}
        numbered = enumerate(prompts)
        exhausted = False
        totals: Counter[str] = Counter()
        try:
            with Progress(progress, "prompts", None) as bar:
                while unfinished or not exhausted:
                    while not exhausted and len(unfinished) < most:
                        index, prompt = next(numbered, (-1, None))
                        if prompt is None:
                            exhausted = True
                            break
                        request = self.request(prompt, sampling, index, None, None, None, f"prompts[{index}]")
                        unfinished[request.number] = request
                        request.add_done_callback(ended.put)
                        self.driver.submit([request])
                    for request in self._as_they_end(ended, min(1, len(unfinished)), bar, totals):
                        del unfinished[request.number]
                        yield request
        finally:
            self.abort_unfinished(unfinished.values())

    @staticmethod
    def _as_they_end(
        ended: queue.SimpleQueue[Any], count: int, bar: Progress, totals: Counter[str]
    ) -> Iterator[PoolRequest]:
        for _ in range(count):
            request = ended.get()
            bar.advance(1)
            if request.error is None:
                for one in request.result().completions:
                    totals["tokens"] += len(one.token_ids)
                    totals["steps"] += one.draft.steps
                bar.report(totals["tokens"], totals["steps"])
            yield request

    def abort_unfinished(self, requests: Iterable[PoolRequest]) -> None:
        left = [request for request in requests if not request.done()]
        if left:
            self.driver.call(lambda: self.driver.abort_here(left))


def is_cut_short(request: PoolRequest) -> bool:
    return any(one.finish_reason == "abort" for one in request.result().completions)

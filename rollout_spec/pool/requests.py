"""A request of the pool: a future of its output, made of samples that run anywhere."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Generator, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..outputs import Completion, RolloutOutput
from ..requests import Request
from ..sampling import SamplingParams, derive_seed
from ..tokenizer import Tokenizer
from .messages import Key, Sample


@dataclass(frozen=True, eq=False)
class PartialRollout:
    """A prompt whose rollout was cut short, to go on later.

    completions: of all samples; those whose finish_reason is "abort" go on where they are, with the log-probabilities
    and versions they have.
    """

    prompt_token_ids: np.ndarray
    sampling: SamplingParams
    group_id: Hashable
    completions: list[Completion]


class PoolRequest(Future):
    """A submitted prompt; a `concurrent.futures.Future` of its RolloutOutput that can also be awaited.

    request_id, group_id, index: as in RolloutOutput. prompt_token_ids: int32[P].
    """

    def __init__(self, number: int, request: Request, seed: int, partials: list[Completion | None]) -> None:
        super().__init__()
        self.number = number
        self.request_id = request.request_id
        self.index = request.index
        self.prompt_token_ids = request.prompt_token_ids
        self.sampling = request.sampling
        self.group_id = request.group_id
        self.seed = seed
        self.partials = partials
        self.completions: list[Completion | None] = [None] * len(partials)
        self.missing = len(partials)
        self.error: Exception | None = None

    def __await__(self) -> Generator[Any, None, RolloutOutput]:
        return asyncio.wrap_future(self).__await__()

    def carry(self, completions: list[Completion]) -> None:
        """Begins where an earlier request was cut short; samples that had ended are not run again."""
        self.partials = list(completions)
        self.completions = [one if one.finish_reason != "abort" else None for one in completions]
        self.missing = self.completions.count(None)

    @property
    def keys(self) -> list[Key]:
        """Of its samples."""
        return [(self.number, sample) for sample in range(len(self.partials))]

    def sample(self, index: int) -> Sample:
        """A sample as the engines see it."""
        partial = self.partials[index]
        sampling = self.sampling
        seed = partial.seed if partial is not None else derive_seed(self.seed, index)
        if sampling.n != 1 or sampling.seed != seed:
            sampling = dataclasses.replace(sampling, n=1, seed=seed)
        return Sample((self.number, index), 0, self.prompt_token_ids, sampling, self.group_id, partial)

    def output(self) -> RolloutOutput:
        """What it returns, once no sample is missing."""
        return RolloutOutput(
            prompt_token_ids=self.prompt_token_ids,
            completions=[one for one in self.completions if one is not None],
            group_id=self.group_id,
            request_id=self.request_id,
            index=self.index,
        )

    def partial(self) -> PartialRollout:
        """What an aborted request has so far."""
        done = self.result().completions
        return PartialRollout(self.prompt_token_ids, self.sampling, self.group_id, done)


def nothing_yet(sample: Sample, tokenizer: Tokenizer | None) -> Completion:
    """The completion of a sample that was aborted before it began."""
    if sample.continue_from is not None:
        return dataclasses.replace(sample.continue_from, finish_reason="abort", stop_token=None)
    assert sample.sampling.seed is not None
    empty = np.zeros(0, np.float32)
    return Completion(
        token_ids=np.zeros(0, np.int32),
        text=None if tokenizer is None else "",
        logprobs=empty,
        sampled_logprobs=empty,
        kept_mass=empty,
        finish_reason="abort",
        stop_token=None,
        weight_versions=np.zeros(0, np.int32),
        seed=sample.sampling.seed,
    )

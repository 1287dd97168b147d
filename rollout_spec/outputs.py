"""What a request returns."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class DraftStats:
    """What drafting did for one completion.

    steps: forward passes that emitted at least one of its tokens. drafted: draft nodes verified. accepted: how
    many of them were accepted.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per step, the bonus token included; 0.0 before the first step."""
        return (self.steps + self.accepted) / self.steps if self.steps else 0.0


@dataclass(frozen=True, eq=False)
class Completion:
    """One sampled continuation of a prompt.

    token_ids: int32[T]; the stop token that ended it is the last one.
    text: the decoded tokens without special ones, cut behind a stop string; None without a tokenizer.
    logprobs: float32[T], under the model's own distribution (temperature 1, whole vocabulary).
    sampled_logprobs: float32[T], under the distribution sampled from (after penalties, temperature, top-k,
        top-p and min-p); 0 at temperature 0, where one token has all the mass.
    kept_mass: float32[T], the probability that top-k, top-p and min-p kept: sampled_logprobs +
        log(kept_mass) is over the whole vocabulary at this temperature.
    finish_reason: "stop" (a stop token or string), "length" (max_tokens or the maximum length), "abort".
    stop_token: the token id or the string that ended it; None unless finish_reason is "stop".
    weight_versions: int32[T], the version of the weights that produced each token.
    seed: alone with this seed (n=1), a request gives the same tokens.
    draft: what drafting did.
    """

    token_ids: NDArray[np.int32]
    text: str | None
    logprobs: NDArray[np.float32]
    sampled_logprobs: NDArray[np.float32]
    kept_mass: NDArray[np.float32]
    finish_reason: FinishReason
    stop_token: int | str | None
    weight_versions: NDArray[np.int32]
    seed: int
    draft: DraftStats = field(default_factory=DraftStats)

    @property
    def version_spans(self) -> list[tuple[int, int, int]]:
        """(version, start, stop) of each run of tokens that one version of the weights produced."""
        return version_spans(self.weight_versions)


def version_spans(versions: NDArray[np.int32]) -> list[tuple[int, int, int]]:
    """(version, start, stop) of each run of equal values in int32[T]."""
    if not len(versions):
        return []
    starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist()]
    stops = [*starts[1:], len(versions)]
    return [(int(versions[start]), start, stop) for start, stop in zip(starts, stops, strict=True)]


@dataclass(frozen=True, eq=False)
class RolloutOutput:
    """A prompt's completions, in sample order.

    prompt_token_ids: int32[P]. completions: SamplingParams.n of them. group_id: the prompt's group, whose
    members share draft history. request_id: the engine's or the caller's. index: place of the prompt in the
    list given to `generate` or `stream`; 0 for `submit`.
    """

    prompt_token_ids: NDArray[np.int32]
    completions: list[Completion]
    group_id: Hashable
    request_id: Hashable = None
    index: int = 0

"""Requests and the sequences, one a sample, that they run as."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .kernels.sampling import TreeSample
from .outputs import Completion, DraftStats, FinishReason, RolloutOutput
from .pages import Digest
from .sampling import SamplingParams

Status = Literal["waiting", "running", "finished", "failed"]


@dataclass(eq=False)
class Sequence:
    """One sample of a request: its tokens, and how far they are computed and cached."""

    request: Request
    sample: int
    seed: int
    sampling: SamplingParams
    prompt_len: int
    max_len: int
    """Tokens, prompt included, at which it ends with finish_reason "length"."""
    stop_tokens: frozenset[int]
    tokens: NDArray[np.int32]
    """int32[max_len], prompt and output; the first `length` are set."""
    length: int
    logprobs: NDArray[np.float32]
    """float32[max_len - prompt_len]; as the two below, the first `num_generated` are set."""
    sampled_logprobs: NDArray[np.float32]
    kept_mass: NDArray[np.float32]
    weight_versions: NDArray[np.int32]
    score_from: int | None = None
    """Set for a sequence that only scores: the position from which log-probabilities are wanted."""

    cached: int = 0
    """Tokens whose keys and values lie in `pages`."""
    pages: list[int] = field(default_factory=list)
    passed: int = 0
    """How many of `pages` no later token sees, so that they were given back; they stand for the first that is held."""
    digests: list[Digest] = field(default_factory=list)
    """Of the full pages of `tokens`, as far as computed."""
    published: int = 0
    """Full pages that the prefix cache knows."""
    keeps_old_cache: bool = False
    """Some keys and values come from older weights (mode "inflight_keep"), so pages must not be shared."""
    slot: int = -1
    drafting: bool = False
    """The drafter knows it."""
    tables_written: bool = False
    """The sampling tables hold its counts, flags and biases at `slot`."""
    slot_written: bool = False
    """The SlotTable holds its sampling parameters at `slot`."""
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    finish_reason: FinishReason | None = None
    stop_token: int | str | None = None
    text: str | None = None

    @property
    def key(self) -> tuple[Hashable, int]:
        """How the drafter knows it."""
        return (self.request.request_id, self.sample)

    @property
    def num_generated(self) -> int:
        return self.length - self.prompt_len

    @property
    def uncached(self) -> int:
        """Tokens to compute: 1 while decoding (the root), more during prefill.

        The last token of a sequence that only scores is a target, never an input.
        """
        return self.length - self.cached - (self.score_from is not None)

    @property
    def room(self) -> int:
        """Tokens it may still emit."""
        return self.max_len - self.length

    @property
    def output(self) -> NDArray[np.int32]:
        return self.tokens[self.prompt_len : self.length]

    def append(
        self, token: int, logprob: float, sampled_logprob: float, kept_mass: float, version: int
    ) -> None:
        index = self.num_generated
        self.tokens[self.length] = token
        self.logprobs[index] = logprob
        self.sampled_logprobs[index] = sampled_logprob
        self.kept_mass[index] = kept_mass
        self.weight_versions[index] = version
        self.length += 1

    def extend(self, sample: TreeSample, rows: list[int], version: int) -> None:
        """`append` for what was sampled at several rows of a step."""
        generated = slice(self.num_generated, self.num_generated + len(rows))
        self.tokens[self.length : self.length + len(rows)] = sample.tokens[rows]
        self.logprobs[generated] = sample.logprobs[rows]
        self.sampled_logprobs[generated] = sample.sampled_logprobs[rows]
        self.kept_mass[generated] = sample.kept_mass[rows]
        self.weight_versions[generated] = version
        self.length += len(rows)

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        count = self.num_generated
        return Completion(
            token_ids=self.output.copy(),
            text=self.text,
            logprobs=self.logprobs[:count].copy(),
            sampled_logprobs=self.sampled_logprobs[:count].copy(),
            kept_mass=self.kept_mass[:count].copy(),
            finish_reason=self.finish_reason,
            stop_token=self.stop_token,
            weight_versions=self.weight_versions[:count].copy(),
            seed=self.seed,
            draft=DraftStats(self.steps, self.drafted, self.accepted),
        )


@dataclass(eq=False)
class Request:
    """A submitted prompt. `output` is set once it is finished, `error` once it failed.

    request_id: the caller's, or a number of the engine's. prompt_token_ids: int32[P].
    """

    request_id: Hashable
    prompt_token_ids: NDArray[np.int32]
    sampling: SamplingParams
    group_id: Hashable
    index: int = 0
    status: Status = "waiting"
    begun: bool = False
    """One of its sequences has been admitted."""
    output: RolloutOutput | None = None
    error: Exception | None = None
    sequences: list[Sequence] = field(default_factory=list, repr=False)
    ended_list: list[Request] | None = field(default=None, repr=False)
    """Where it goes when it ends; None is where `RolloutEngine.step` looks."""

    @property
    def ended(self) -> bool:
        return self.status in ("finished", "failed")

    @property
    def completions(self) -> list[Completion]:
        """The finished request's completions; empty before that and for a failed one."""
        return self.output.completions if self.output is not None else []

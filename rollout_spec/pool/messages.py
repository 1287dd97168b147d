"""What travels between the pool and its engines."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..draft.config import DraftConfig
from ..draft.drafter import TokenSequence
from ..models import ModelConfig
from ..outputs import Completion
from ..sampling import SamplingParams
from ..tokenizer import Tokenizer

Key = tuple[int, int]
"""Number of a request in the pool, and of the sample in the request."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One sample to generate. attempt: counts how often it was handed to an engine; an answer repeats it."""

    key: Key
    attempt: int
    prompt_token_ids: NDArray[np.int32]
    sampling: SamplingParams
    """With n=1 and a seed."""
    group_id: Hashable
    continue_from: Completion | None = None


@dataclass(frozen=True, eq=False)
class Submit:
    """Samples to generate."""

    samples: list[Sample]


@dataclass(frozen=True, eq=False)
class Abort:
    """Samples to end with what they have; those that ended already are passed over."""

    keys: list[Key]


@dataclass(frozen=True, eq=False)
class Call:
    """A verb of the engine, answered under its number. name: a method of EngineRunner that begins with `do_`."""

    number: int
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


Message = Submit | Abort | Call


@dataclass(frozen=True, eq=False)
class Ended:
    """A sample ended: with its completion, or with what went wrong."""

    key: Key
    attempt: int
    completion: Completion | None
    error: Exception | None = None
    refused: bool = False
    """It was refused when it was submitted, so that trying again is of no use."""


@dataclass(frozen=True, eq=False)
class Answer:
    """Result or exception of a Call."""

    number: int
    result: Any = None
    error: Exception | None = None


@dataclass(frozen=True, eq=False)
class Report:
    """What happened on an engine since the last report.

    tokens: generated so far, of the samples that run. busy_s: seconds since the engine's thread began what it is
    doing (a step, an update, being built); 0 while idle. doing: its name. broken: set once the engine can't go on.
    """

    ended: list[Ended]
    answers: list[Answer]
    tokens: dict[Key, int]
    busy_s: float
    doing: str
    weight_version: int
    broken: Exception | None = None


@dataclass(frozen=True, eq=False)
class EngineFacts:
    """What the pool has to know of the model to check requests; the same for all its engines."""

    model_config: ModelConfig
    tokenizer: Tokenizer | None
    max_seq_len: int
    cache_tokens: int
    slots: int
    pid: int
    node_id: str
    cpu_cores: tuple[int, ...]
    devices: tuple[str, ...]
    draft_config: DraftConfig | None
    """None where nothing is drafted."""
    weight_version: int
    seed: int


@dataclass(frozen=True, eq=False)
class LearntText:
    """A completion behind its prompt, for the drafters of other engines. engine: where it was generated."""

    engine: int
    group_id: Hashable
    prompt_token_ids: TokenSequence
    token_ids: TokenSequence

    @property
    def size_bytes(self) -> int:
        return 4 * (len(self.prompt_token_ids) + len(self.token_ids))

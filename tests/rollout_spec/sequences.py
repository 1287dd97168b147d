"""Sequences as the engine makes them, for tests of what handles them without a device."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from rollout_spec import SamplingParams
from rollout_spec.intake import Intake
from rollout_spec.models import ModelConfig
from rollout_spec.requests import Sequence
from rollout_spec.tokenizer import Tokenizer

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=50,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=1000,
    eos_token_ids=(3,),
)

_ids = itertools.count()


def intake(
    tokenizer: Tokenizer | None = None,
    *,
    max_seq_len: int = 1000,
    cache_tokens: int = 100_000,
    seed: int = 0,
    **config: Any,
) -> Intake:
    """`config`: fields of the ModelConfig to be other than CONFIG's."""
    return Intake(
        dataclasses.replace(CONFIG, **config),
        tokenizer,
        max_seq_len=max_seq_len,
        cache_tokens=cache_tokens,
        seed=seed,
    )


def new_sequences(
    prompt: SequenceOf[int], tokenizer: Tokenizer | None = None, **sampling: Any
) -> list[Sequence]:
    """The sequences of one request."""
    params = SamplingParams(**{"seed": 1, **sampling})
    return intake(tokenizer).request(prompt, params, request_id=next(_ids)).sequences


def new_sequence(prompt: SequenceOf[int], tokenizer: Tokenizer | None = None, **sampling: Any) -> Sequence:
    (sequence,) = new_sequences(prompt, tokenizer, **sampling)
    return sequence


def scoring_sequence(prompt: SequenceOf[int], completion: SequenceOf[int]) -> Sequence:
    """A sequence that only scores `completion`."""
    sequence = new_sequence(prompt, max_tokens=len(completion))
    sequence.tokens[len(prompt) :] = completion
    sequence.length, sequence.score_from = len(prompt) + len(completion), len(prompt)
    return sequence


def append(sequence: Sequence, tokens: SequenceOf[int]) -> None:
    """As if they had been sampled, with numbers that tell them apart."""
    for token in tokens:
        index = sequence.num_generated
        sequence.append(token, -index - 0.25, -index - 0.5, 1 / (index + 1), 7)


def random_tokens(rng: np.random.Generator, count: int) -> list[int]:
    return [int(token) for token in rng.integers(4, CONFIG.vocab_size, count)]  # no end token

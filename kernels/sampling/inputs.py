"""Inputs and outputs of `tree_sample`, as dataclass pytrees."""

from __future__ import annotations

from dataclasses import dataclass

import jax

SEEN_IN_PROMPT = 1
STOP_TOKEN = 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleRows:
    """The rows at which a step samples: roots, draft nodes, last prompt tokens. R rows, some unused."""

    token_ids: jax.Array  # int32[R], the token whose logits the row holds
    parents: jax.Array  # int32[R], row of the parent node; -1 for a root, a prompt token or an unused row
    sequences: jax.Array  # int32[R], row of the sequence in SequenceSampling
    positions: jax.Array  # int32[R], index in prompt + completion of the token to be sampled
    targets: jax.Array  # int32[R], a token whose log-probability is wanted at this row (0 where none is)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SequenceSampling:
    """Sampling parameters of the S sequences of a step."""

    slots: jax.Array  # int32[S], the sequence's row in SamplingTables
    seeds: jax.Array  # uint32[S, 2], low and high word
    temperature: jax.Array  # float32[S], 0 is greedy
    top_k: jax.Array  # int32[S], 0 is off
    top_p: jax.Array  # float32[S], 1 is off
    min_p: jax.Array  # float32[S], 0 is off
    repetition_penalty: jax.Array  # float32[S]
    presence_penalty: jax.Array  # float32[S]
    frequency_penalty: jax.Array  # float32[S]
    stop_from_position: jax.Array  # int32[S], stop tokens are banned at earlier positions (min_tokens)
    uses_tables: jax.Array  # bool[S], whether penalties, bias, bad tokens or min_tokens are set


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingTables:
    """What penalties and biases need of each slot. A row means something only while `uses_tables` is set."""

    output_counts: jax.Array  # int32[slots, V], how often each token was generated
    flags: jax.Array  # uint8[slots, V], SEEN_IN_PROMPT | STOP_TOKEN
    bias: jax.Array  # float32[slots, V], logit_bias; -inf for bad tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TreeSample:
    """What `tree_sample` found at each row."""

    tokens: jax.Array  # int32[R], the sampled token
    logprobs: jax.Array  # float32[R], of that token under the model's own distribution
    sampled_logprobs: jax.Array  # float32[R], under the distribution sampled from
    kept_mass: jax.Array  # float32[R], probability kept by top-k, top-p and min-p
    target_logprobs: jax.Array  # float32[R], of `targets` under the model's own distribution
    accepted: jax.Array  # bool[R], true where every drafted token up to and including the row's was sampled

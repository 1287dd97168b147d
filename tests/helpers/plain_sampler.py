"""One token from one row of logits, by the letter of the sampling specification, in numpy, by sorting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tests.helpers.plain_noise import LEVEL_BLOCK, LEVEL_TOKEN, gumbel

Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

BLOCK = 256  # consecutive token ids that share one draw of level 0


@dataclass(frozen=True)
class PlainSampling:
    """The values of a SamplingParams that decide a token, with the defaults of the design."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_token_ids: Sequence[int] = ()


@dataclass(frozen=True)
class PlainDraw:
    """A drawn token, its numbers, and how far rounding would have to move a logit to draw another.

    `margin` is the least distance, in logits, of any comparison that decided the token; float32 can come to
    another token only where it is about as small as float32's rounding.
    """

    token: int
    logprob: float
    sampled_logprob: float
    kept_mass: float
    margin: float


def log_softmax(logits: Float64Array) -> Float64Array:
    """Log-probabilities float64[..., V]; minus infinity stays so."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def penalise(
    logits: Float64Array,
    sampling: PlainSampling,
    prompt: Sequence[int],
    output: Sequence[int],
    masked: Sequence[int],
) -> Float64Array:
    """Steps 1 to 3: penalties, bias and forbidden tokens, float64[V]. `masked`: stop tokens too early."""
    processed = logits.copy()
    for token in set(prompt) | set(output):
        value = processed[token]
        penalty = sampling.repetition_penalty
        processed[token] = value / penalty if value > 0 else value * penalty
    for token, count in Counter(output).items():
        processed[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    for token, bias in sampling.logit_bias.items():
        processed[token] += bias
    processed[list(sampling.bad_token_ids)] = -np.inf
    processed[list(masked)] = -np.inf
    return processed


def _nearest(distances: Float64Array) -> float:
    """The least distance that is not an exact tie (which every arithmetic decides alike)."""
    gaps = np.abs(distances)
    return float(gaps[gaps > 0].min(initial=np.inf))


def filter_kept(scaled: Float64Array, sampling: PlainSampling) -> tuple[BoolArray, float]:
    """Steps 5 to 7: the tokens bool[V] that the filters keep of temperature-scaled logits, and the margin."""
    kept = np.isfinite(scaled)
    possible = scaled[kept]
    margin = np.inf
    if 0 < sampling.top_k < possible.size:
        threshold = np.sort(possible)[::-1][sampling.top_k - 1]
        kept &= scaled >= threshold
        margin = min(margin, _nearest(possible - threshold))
    if sampling.top_p < 1.0:
        ordered = np.sort(scaled[kept])[::-1]
        mass = np.cumsum(np.exp(log_softmax(ordered)))
        last = min(int(np.searchsorted(mass, sampling.top_p)), ordered.size - 1)
        kept &= scaled >= ordered[last]
        margin = min(margin, _nearest(mass - sampling.top_p), _nearest(possible - ordered[last]))
    if sampling.min_p > 0.0:
        threshold = possible.max() + np.log(sampling.min_p)
        kept &= scaled >= threshold
        margin = min(margin, _nearest(possible - threshold))
    return kept, margin


def _argmax(scores: Float64Array) -> tuple[int, float]:
    """The first index of the greatest score, and its lead over the second greatest."""
    best = int(np.argmax(scores))
    others = np.delete(scores, best)
    return best, float(scores[best] - others.max()) if others.size else np.inf


def filtered_logits(processed: Float64Array, sampling: PlainSampling) -> tuple[Float64Array, float, float]:
    """Steps 4 to 7 on penalised logits float64[V]: the logits sampled from, kept_mass, and the margin."""
    scaled = processed / sampling.temperature
    kept, margin = filter_kept(scaled, sampling)
    mass = float(np.exp(log_softmax(scaled))[kept].sum())
    return np.where(kept, scaled, -np.inf), mass, margin


def draw(
    logits: Float64Array,
    sampling: PlainSampling,
    *,
    seed: int,
    position: int,
    prompt: Sequence[int],
    output: Sequence[int],
    masked: Sequence[int] = (),
) -> PlainDraw:
    """The token at `position` of a request, given the model's raw logits float64[V] there."""
    processed = penalise(logits, sampling, prompt, output, masked)
    raw_logprobs = log_softmax(logits)
    if sampling.temperature == 0.0:
        token, margin = _argmax(processed)
        return PlainDraw(token, float(raw_logprobs[token]), 0.0, 1.0, margin)
    filtered, mass, margin = filtered_logits(processed, sampling)
    starts = np.arange(0, filtered.size, BLOCK)
    blocks = [filtered[start : start + BLOCK] for start in starts]
    with np.errstate(divide="ignore"):
        block_logits = np.array([np.logaddexp.reduce(block) for block in blocks])
    block, block_margin = _argmax(block_logits + gumbel(seed, position, LEVEL_BLOCK, np.arange(len(blocks))))
    index = starts[block] + np.arange(blocks[block].size)
    inside, token_margin = _argmax(blocks[block] + gumbel(seed, position, LEVEL_TOKEN, index))
    token = int(index[inside])
    return PlainDraw(
        token,
        float(raw_logprobs[token]),
        float(log_softmax(filtered)[token]),
        mass,
        min(margin, block_margin, token_margin),
    )

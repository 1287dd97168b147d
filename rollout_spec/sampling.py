"""Sampling parameters of a request, and the seeds of its samples."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from .errors import ConfigError

_SEED_LIMIT = 2**63
_WORD = 2**64 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How the completions of a prompt are sampled. Frozen; a value out of range raises ConfigError at once.

    Applied in this order: penalties and bias, temperature, top-k, top-p, min-p. docs/sampling.md has the
    formulas.

    temperature: 0 is greedy.
    top_p: keep the smallest set of likeliest tokens with at least this mass, in (0, 1].
    top_k: keep this many likeliest tokens; 0 is off.
    min_p: keep tokens of at least this share of the largest probability, in [0, 1].
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; > 0.
    presence_penalty: subtracted from the logits of tokens in the output.
    frequency_penalty: subtracted once for every time a token is in the output.
    logit_bias: token id -> value added to its logit.
    bad_token_ids: tokens that are never sampled.
    max_tokens: most tokens of a completion, at least 1.
    min_tokens: no stop token or stop string ends a completion before it has this many tokens.
    stop_token_ids: token ids that end a completion, besides the model's end tokens.
    stop: strings that end a completion; needs a tokenizer.
    ignore_eos: the model's end tokens don't end a completion.
    n: completions a prompt.
    seed: 0 <= seed < 2**63; None draws one from the engine's, which the completion reports.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_token_ids: Sequence[int] = ()
    max_tokens: int = 256
    min_tokens: int = 0
    stop_token_ids: Sequence[int] | None = None
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        faults: list[str] = []
        for name, low, low_open, high in _RANGES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
                faults.append(f"{name} must be a finite number, got {value!r}")
                continue
            number = float(value)
            self._set(name, number)
            if number < low or (low_open and number == low) or number > high:
                bound = "above" if low_open else "at least"
                faults.append(f"{name} must be {bound} {low:g} and at most {high:g}, got {value!r}")
            elif name in ("temperature", "repetition_penalty") and 0.0 < number < _SMALLEST:
                faults.append(f"{name} must not lie between 0 and {_SMALLEST:g}, got {value!r}")
        for name, low in (("top_k", 0), ("max_tokens", 1), ("min_tokens", 0), ("n", 1)):
            value = getattr(self, name)
            if not _is_int(value):
                faults.append(f"{name} must be an int, got {value!r}")
            elif not low <= value <= _LARGEST_INT:
                faults.append(f"{name} must be at least {low} and below 2**31, got {value}")
            else:
                self._set(name, int(value))
        if _is_int(self.min_tokens) and _is_int(self.max_tokens) and self.min_tokens > self.max_tokens:
            faults.append(f"min_tokens ({self.min_tokens}) must not be above max_tokens ({self.max_tokens})")
        if self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed < _SEED_LIMIT):
            faults.append(f"seed must be None or an int from 0 to 2**63 - 1, got {self.seed!r}")
        elif self.seed is not None:
            self._set("seed", int(self.seed))
        if not isinstance(self.ignore_eos, bool):
            faults.append(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        self._set("bad_token_ids", _token_ids("bad_token_ids", self.bad_token_ids, faults))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids, faults))
        self._set("stop", _strings(self.stop, faults))
        self._set("logit_bias", _bias(self.logit_bias, faults))
        if faults:
            raise ConfigError("SamplingParams: " + "; ".join(faults))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def changes_logits(self) -> bool:
        """Whether penalties, biases or bans change any logit."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or bool(self.logit_bias)
            or bool(self.bad_token_ids)
            or self.min_tokens > 0
        )


# Logits are float32: beyond these bounds products would overflow, or vanish, and end as NaN.
_LARGEST, _SMALLEST, _LARGEST_INT = 1e30, 1e-30, 2**31 - 1

_RANGES = (  # name, lower bound, whether the bound itself is excluded, upper bound
    ("temperature", 0.0, False, _LARGEST),
    ("top_p", 0.0, True, 1.0),
    ("min_p", 0.0, False, 1.0),
    ("repetition_penalty", 0.0, True, _LARGEST),
    ("presence_penalty", -_LARGEST, False, _LARGEST),
    ("frequency_penalty", -_LARGEST, False, _LARGEST),
)


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)  # numpy's integers too


def _token_ids(name: str, ids: Sequence[int] | None, faults: list[str]) -> tuple[int, ...]:
    if ids is None:
        return ()
    try:
        if isinstance(ids, str | bytes):
            raise TypeError
        found = tuple(operator.index(token) for token in ids)
    except TypeError:
        faults.append(f"{name} must be a sequence of integer token ids, got {ids!r}")
        return ()
    if any(token < 0 for token in found):
        faults.append(f"{name} must not be negative, got {[token for token in found if token < 0]}")
    return found


def _strings(stop: str | Sequence[str] | None, faults: list[str]) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, list | tuple) or any(not isinstance(s, str) or not s for s in strings):
        faults.append(f"stop must be a non-empty string or a list of them, got {stop!r}")
        return ()
    return tuple(strings)


def _bias(bias: Mapping[int, float] | None, faults: list[str]) -> dict[int, float] | None:
    if bias is None:
        return None
    try:
        found = {operator.index(token): float(value) for token, value in bias.items()}
    except (AttributeError, TypeError, ValueError):
        faults.append(f"logit_bias must map integer token ids to numbers, got {bias!r}")
        return None
    if any(token < 0 for token in found) or not all(abs(value) <= _LARGEST for value in found.values()):
        faults.append(
            f"logit_bias must map ids of at least 0 to numbers of at most {_LARGEST:g} (bad_token_ids bans a token)"
        )
    return found or None


def derive_seed(seed: int, sample: int) -> int:
    """The seed of sample `sample` of a request, in [0, 2**63). Sample 0 has the request's own.

    The others are SplitMix64's outputs (Steele, Lea and Flood, OOPSLA 2014), so that they are far apart.
    """
    if sample == 0:
        return seed
    z = (seed + sample * 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return (z ^ (z >> 31)) & (_SEED_LIMIT - 1)

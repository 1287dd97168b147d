"""Whether what the engine returned is what the plain loop returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.helpers.plain_loop import PlainCompletion, certain_prefix

if TYPE_CHECKING:
    from rollout_spec import Completion

# The engine computes in float32, the plain loop in float64. A token chosen by a smaller lead than this, in
# logits, could fall either way; logits here are of the order of ten, where float32 resolves 1e-6.
LEAST_MARGIN = 1e-5
NUMBER_TOLERANCE = 2e-4


def disagreement(actual: Completion, expected: PlainCompletion) -> str | None:
    """What is wrong with a completion, or None; up to the first token that float32 can't be sure of."""
    certain = certain_prefix(expected, LEAST_MARGIN)
    whole = certain == len(expected.token_ids)
    tokens = [int(token) for token in actual.token_ids]
    wanted = expected.token_ids[:certain]
    if (tokens if whole else tokens[:certain]) != wanted:
        return f"tokens {tokens}, expected {wanted}{'' if whole else ' and more'}"
    if actual.seed != expected.seed:
        return f"seed {actual.seed}, expected {expected.seed}"
    for name in ("logprobs", "sampled_logprobs", "kept_mass"):
        numbers = np.asarray(getattr(actual, name))
        if numbers.shape != (len(tokens),) or numbers.dtype != np.float32:
            return f"{name} is {numbers.dtype}{list(numbers.shape)}, expected float32[{len(tokens)}]"
        distance = np.abs(numbers[:certain] - np.array(getattr(expected, name)[:certain]))
        if not (distance <= NUMBER_TOLERANCE).all():
            worst = int(np.argmax(np.where(np.isnan(distance), np.inf, distance)))
            return f"{name}[{worst}] is {numbers[worst]}, expected {getattr(expected, name)[worst]}"
    if len(actual.weight_versions) != len(tokens):
        return f"{len(actual.weight_versions)} weight versions for {len(tokens)} tokens"
    if whole:
        for name in ("finish_reason", "stop_token", "text"):
            if getattr(actual, name) != getattr(expected, name):
                return f"{name} {getattr(actual, name)!r}, expected {getattr(expected, name)!r}"
    return None


def assert_agree(
    actual: Sequence[Completion], expected: Sequence[PlainCompletion], contexts: Sequence[Any] | None = None
) -> None:
    """All completions agree; `contexts[i]` describes completion i in the failure."""
    assert len(actual) == len(expected)
    faults = []
    for index, (ours, plain) in enumerate(zip(actual, expected, strict=True)):
        fault = disagreement(ours, plain)
        if fault is not None:
            faults.append(f"[{index}] {fault}" + (f"\n    of {contexts[index]}" if contexts else ""))
    assert not faults, f"{len(faults)} of {len(expected)} completions differ:\n" + "\n".join(faults[:5])


def same_tokens(first: Sequence[Completion], second: Sequence[Completion]) -> bool:
    """Whether two runs of the engine agree exactly in tokens and ends, and within rounding in numbers."""
    return len(first) == len(second) and all(
        np.array_equal(one.token_ids, other.token_ids)
        and (one.finish_reason, one.stop_token, one.text)
        == (other.finish_reason, other.stop_token, other.text)
        and np.allclose(one.logprobs, other.logprobs, atol=NUMBER_TOLERANCE)
        and np.allclose(one.sampled_logprobs, other.sampled_logprobs, atol=NUMBER_TOLERANCE)
        for one, other in zip(first, second, strict=True)
    )

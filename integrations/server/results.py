"""What endpoints say of completions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_spec import Completion, RolloutEngine
from rollout_spec.errors import RequestFailedError
from rollout_spec.requests import Request


def completions_of(request: Request) -> list[Completion]:
    """Raises RequestFailedError for a request that failed."""
    if request.error is not None:
        raise RequestFailedError([request], []) from request.error
    return request.completions


def logprobs(completion: Completion) -> NDArray[np.float32]:
    """float32[T]: over the whole vocabulary at the temperature sampled with, as SGLang's and trainers' are."""
    return completion.sampled_logprobs + np.log(completion.kept_mass)


def visible_text(engine: RolloutEngine, tokens: list[int], stop_tokens: frozenset[int]) -> str:
    """Text of tokens so far, without the end token and without a character that isn't whole yet."""
    if engine.tokenizer is None:
        return ""
    shown = tokens[:-1] if tokens and tokens[-1] in stop_tokens else tokens
    return engine.tokenizer.decode(shown).rstrip("\ufffd")


def finish_reason(completion: Completion) -> dict[str, Any]:
    """As SGLang says it."""
    if completion.finish_reason == "stop":
        return {"type": "stop", "matched": completion.stop_token}
    if completion.finish_reason == "length":
        return {"type": "length", "length": len(completion.token_ids)}
    return {"type": "abort", "message": "aborted"}

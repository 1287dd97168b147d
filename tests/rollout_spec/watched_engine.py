"""A small engine for tests of the API, which fails a test instead of waiting for ever."""

from __future__ import annotations

from typing import Any

from rollout_spec import Completion, RolloutEngine, SamplingParams
from rollout_spec.requests import Request
from tests.helpers.engines import new_engine
from tests.helpers.tiny_models import tiny_model

MODEL, SHAPE = tiny_model("llama"), "cramped"
_FOREVER = 30


def sampling(tokens: int = 5, **values: Any) -> SamplingParams:
    """Of a completion of so many tokens, unless `values` end it earlier."""
    return SamplingParams(**{"max_tokens": tokens, "ignore_eos": True, "seed": 1, **values})


def watched_engine() -> RolloutEngine:
    """An engine that fails the test once it has stepped often with nothing to compute."""
    made = new_engine(MODEL, SHAPE)
    advance, idle = made._core.advance, 0

    def counted(**keywords: Any) -> None:
        nonlocal idle
        idle = 0 if made._core.scheduler.has_work else idle + 1
        assert idle < _FOREVER, "the engine would step for ever"
        advance(**keywords)

    made._core.advance = counted  # type: ignore[method-assign]
    return made


def run(engine: RolloutEngine, *requests: Request) -> list[Request]:
    """Steps until they have ended; returns whatever `step` handed out."""
    handed_out: list[Request] = []
    while not all(request.ended for request in requests):
        handed_out += engine.step()
    return [*handed_out, *engine.step()]


def tokens_of(completion: Completion) -> list[int]:
    return [int(token) for token in completion.token_ids]

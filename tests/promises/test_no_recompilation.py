"""After warm-up nothing compiles: not for lengths, parameters, trees, aborts, or new weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np

from rollout_spec import RolloutEngine, SamplingParams
from rollout_spec.draft import DraftConfig, TrieDrafter
from rollout_spec.weights.names import to_hf
from tests.helpers.drafters import AdversarialDrafter, OracleDrafter
from tests.helpers.engines import SwitchedDrafter, new_engine
from tests.helpers.random_cases import random_cases
from tests.helpers.tiny_models import TinyModel, tiny_model

MODEL, SHAPE = "qwen2", "roomy"
REQUESTS = 500


@contextmanager
def counting_compilations() -> Iterator[list[str]]:
    """Names of what JAX traces, lowers or compiles while the block runs."""
    seen: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event.startswith("/jax/core/compile/"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def busy_run(engine: RolloutEngine, drafter: SwitchedDrafter, models: list[TinyModel]) -> None:
    """500 requests of random lengths, parameters and trees, with aborts and weight updates among them."""
    rng = np.random.default_rng(0)
    config = engine.model_config
    cases = random_cases(rng, config, REQUESTS, longest_prompt=60, longest=12)
    drafter.inner = AdversarialDrafter(config.vocab_size, seed=0)
    ended, queue, unfinished = 0, list(cases), []
    weights = [models[1].params, list(to_hf(config, models[0].params)), models[1].params]
    modes = ["drain", "inflight", "interrupt"]
    while queue or unfinished:
        for case in queue[: int(rng.integers(0, 12))]:
            unfinished.append(engine.submit(case.prompt, SamplingParams(**case.sampling)))
            queue.remove(case)
        for _ in range(int(rng.integers(1, 6))):
            ended += len(engine.step())
        unfinished = [request for request in unfinished if not request.ended]
        if unfinished and rng.random() < 0.2:
            engine.abort([unfinished.pop().request_id])
        if weights and ended > REQUESTS * (4 - len(weights)) / 5:
            engine.update_weights(weights.pop(), mode=modes[len(weights)])
    ended += len(engine.step())
    assert ended == REQUESTS
    assert not weights


def everything_else(engine: RolloutEngine, drafter: SwitchedDrafter) -> None:
    """Other drafters, scoring, resuming, sleeping: what users call beside steps."""
    cases = random_cases(np.random.default_rng(1), engine.model_config, 40, longest_prompt=60, longest=12)
    prompts = [case.prompt for case in cases]
    for other in (
        TrieDrafter(DraftConfig(capacity_tokens=5000)),
        OracleDrafter(prompts, engine.model_config.vocab_size, mixed=True),
    ):
        drafter.inner = other
        outputs = engine.generate(prompts, [SamplingParams(**case.sampling) for case in cases])
    first = [output.completions[0] for output in outputs]
    engine.score(prompts, first)
    engine.generate(prompts, SamplingParams(max_tokens=20, seed=0), continue_from=first)
    engine.sleep()
    engine.wake_up()
    engine.generate(prompts, SamplingParams(max_tokens=5, seed=0, presence_penalty=0.5))


def test_nothing_compiles_after_warm_up() -> None:
    models = [tiny_model(MODEL, seed) for seed in (0, 1)]
    drafter = SwitchedDrafter()
    engine = new_engine(models[0], SHAPE, drafter=drafter)
    engine.warm_up()
    for model in models:  # the trainer's own work, which another test may have compiled, or not
        list(to_hf(model.config, model.params))
    sizes = engine.stats().step_shapes
    assert 0 < sizes <= 20, "warm-up is bounded"
    with counting_compilations() as seen:
        busy_run(engine, drafter, models)
        everything_else(engine, drafter)
    assert seen == []
    assert engine.stats().step_shapes == sizes


def test_the_counter_counts() -> None:
    with counting_compilations() as seen:
        jax.jit(lambda x: x * 3 + 1)(np.arange(7))
    assert seen

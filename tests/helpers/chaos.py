"""A user who does everything in any order, and what the plain loop says of what came of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np
import pytest

from rollout_spec import RolloutEngine, SamplingParams
from rollout_spec.errors import EngineStateError
from rollout_spec.requests import Request
from rollout_spec.weights.report import UpdateMode
from tests.helpers.agreement import disagreement
from tests.helpers.plain_loop import plain_generate
from tests.helpers.plain_model import PlainModel
from tests.helpers.plain_sampler import Float64Array
from tests.helpers.random_cases import random_cases
from tests.helpers.tiny_models import TinyModel


class Patchwork:
    """Answers with the model whose weights produced each token of one completion, as plain loops ask for it."""

    def __init__(self, models: Sequence[PlainModel], versions: Sequence[int], prompt_length: int) -> None:
        self.models, self.versions, self.prompt_length = models, versions, prompt_length
        self.eos_token_ids = models[0].eos_token_ids
        self.max_length = models[0].max_length

    def last_logits(self, token_ids: Sequence[int]) -> Float64Array:
        return self.models[self.versions[len(token_ids) - self.prompt_length]].last_logits(token_ids)


class Chaos:
    """A user who submits, steps, aborts, pauses, sleeps and pushes weights in random order."""

    def __init__(
        self, engine: RolloutEngine, models: Sequence[TinyModel], seed: int, modes: Sequence[UpdateMode]
    ) -> None:
        """models: whose weights are pushed; the engine has the first one's."""
        self.engine = engine
        self.models = models
        self.modes = modes
        self.rng = np.random.default_rng(seed)
        self.cases = random_cases(self.rng, engine.model_config, 60, longest_prompt=40)
        self.submitted: dict[Hashable, Request] = {}
        self.handed_out: list[Hashable] = []
        self.served = [self.models[0]]  # the model of each version

    def unfinished(self) -> list[Hashable]:
        return [key for key, request in self.submitted.items() if not request.ended]

    def submit(self) -> None:
        for _ in range(int(self.rng.integers(1, 5))):
            if self.cases:
                case = self.cases.pop()
                request = self.engine.submit(case.prompt, SamplingParams(**case.sampling))
                self.submitted[request.request_id] = request

    def step(self) -> None:
        for _ in range(int(self.rng.integers(1, 12))):
            self.handed_out += [request.request_id for request in self.engine.step()]

    def abort(self) -> None:
        unfinished = self.unfinished()
        if unfinished:
            chosen = self.rng.choice(len(unfinished), size=min(2, len(unfinished)), replace=False)
            self.engine.abort([unfinished[index] for index in chosen])

    def pause(self) -> None:
        self.engine.pause()
        before = self.engine.stats().steps
        self.step()
        assert self.engine.stats().steps == before, "a paused engine computes nothing"
        self.engine.resume()

    def sleep(self) -> None:
        self.engine.sleep(level=int(self.rng.integers(1, 3)))
        with pytest.raises(EngineStateError):
            self.engine.step()
        self.engine.wake_up()

    def update(self) -> None:
        model = self.models[int(self.rng.integers(2))]
        self.engine.update_weights(model.params, mode=self.modes[int(self.rng.integers(len(self.modes)))])
        self.served.append(model)

    def bad_update(self) -> None:
        with pytest.raises(ValueError):
            self.engine.update_weights({"nonsense": np.zeros(2)})

    def run(self) -> None:
        actions = [self.submit, self.step, self.abort, self.pause, self.sleep, self.update, self.bad_update]
        weights = np.array([6, 10, 2, 1, 1, 1, 1])
        while self.cases or self.unfinished():
            action = actions[int(self.rng.choice(len(actions), p=weights / weights.sum()))]
            action()
        self.handed_out += [request.request_id for request in self.engine.step()]

    def faults(self) -> list[str]:
        """Completions that are not what the plain loop makes with the weights each token names."""
        faults = []
        models = [model.plain for model in self.served]
        for request in self.submitted.values():
            prompt = request.prompt_token_ids.tolist()
            for completion in request.completions:
                tokens = completion.token_ids.tolist()
                patchwork = Patchwork(models, completion.weight_versions.tolist(), len(prompt))
                sampling = dataclasses.asdict(request.sampling) | {"max_tokens": len(tokens)}
                expected = plain_generate(
                    patchwork, prompt, sampling, seed=completion.seed, tokenizer=self.engine.tokenizer
                )
                if completion.finish_reason == "abort":  # the plain loop has its own view of the end only
                    expected.finish_reason = "abort"
                fault = disagreement(completion, expected)
                if fault is not None:
                    faults.append(f"{request}: {fault}")
        return faults

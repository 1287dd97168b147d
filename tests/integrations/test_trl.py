"""TRL's GRPOTrainer with the engine: its weights arrive at every step, and its ratio of importance is 1."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rollout_spec.integrations import trl as adapter
from rollout_spec.integrations import versions

from rollout_spec import RolloutEngine, SamplingParams
from rollout_spec.errors import ConfigError, MissingExtraError
from rollout_spec.weights import checksum
from tests.helpers.tiny_models import tiny_model

HAS_TRL = importlib.util.find_spec("trl") is not None


def test_without_trl_it_says_what_to_install() -> None:
    if HAS_TRL:
        pytest.skip("trl is installed")
    with pytest.raises(MissingExtraError, match=r"rollout-spec\[trl\]"):
        adapter.make_rollout_func(object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "fits"), [("1.15.9", False), ("1.16.0", True), ("1.16.3", True), ("1.17.0", False)]
)
def test_versions_outside_the_tested_range_are_refused(
    found: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions.importlib.metadata, "version", lambda package: found)
    if fits:
        versions.check("trl", *adapter.TESTED, extra="trl")
        return
    with pytest.raises(ConfigError, match=f"trl {found} is installed"):
        versions.check("trl", *adapter.TESTED, extra="trl")


def trainer(**changes: Any) -> Any:
    """What the adapter reads of a trainer."""
    values = {
        "args": SimpleNamespace(generation_kwargs=None),
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": None,
        "repetition_penalty": 1.0,
        "max_completion_length": 6,
        "use_vllm": False,
        "chat_template_kwargs": None,
    }
    return SimpleNamespace(**{**values, **changes})


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    model = tiny_model("llama")
    return RolloutEngine(model.config, model.params)


def test_equal_prompts_side_by_side_are_one_group_and_come_back_in_order(
    engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "check", lambda *_, **__: None)
    asked: list[tuple[int, int]] = []
    generate = engine.generate

    def watched(prompts: Any, sampling: Any, **options: Any) -> Any:
        asked.append((len(prompts), sum(one.n for one in sampling)))
        return generate(prompts, sampling, **options)

    monkeypatch.setattr(engine, "generate", watched)
    generation = adapter.RolloutSpecGeneration(trainer(), engine)
    prompts = [[5, 6]] * 3 + [[7]] * 3 + [[5, 6]] * 3
    given, ids, logprobs, tokens = generation.generate(prompts, None, 3)
    assert asked == [(3, 9)]
    assert given == prompts
    assert len(ids) == len(logprobs) == 9
    assert tokens == [[[token] for token in row] for row in ids]
    with pytest.raises(ConfigError, match="images"):
        generation.generate(prompts, [object()], 3)


def test_logprobs_are_over_the_whole_vocabulary_at_the_trainers_temperature(engine: RolloutEngine) -> None:
    sampling = adapter.sampling_of(trainer(), 1)
    completion = engine.generate([[5, 6, 7]], sampling)[0].completions[0]
    model = tiny_model("llama").plain
    text = [5, 6, 7]
    for token, given in zip(completion.token_ids.tolist(), adapter.trainer_logprobs(completion), strict=True):
        logits = model.last_logits(text) / 0.7
        assert given == pytest.approx(logits[token] - np.logaddexp.reduce(logits), abs=1e-4)
        text.append(token)


def test_what_it_can_not_do_is_refused(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "check", lambda *_, **__: None)
    with pytest.raises(ConfigError, match="use_vllm=True"):
        adapter.RolloutSpecGeneration.install(trainer(use_vllm=True), engine)
    with pytest.raises(ConfigError, match="best_of"):
        adapter.sampling_of(trainer(args=SimpleNamespace(generation_kwargs={"best_of": 2})), 1)
    with pytest.raises(ConfigError, match="PEFT"):
        list(adapter.named_weights(SimpleNamespace(peft_config={})))


@pytest.mark.trl
@pytest.mark.parametrize("with_rollout_func", [False, True])
def test_three_steps_of_training(with_rollout_func: bool) -> None:
    from examples.grpo_trl import train

    trained, engine, logged = train(3, with_rollout_func=with_rollout_func)
    assert len(logged) == 3
    versions_seen = [log["weight_version"] for log in logged]
    assert versions_seen == [1, 2, 3], "one push behind each step, the first with what the trainer began with"
    if not with_rollout_func:
        for log in logged:  # float32, and each rollout is used once: trainer and engine have the same weights
            assert log["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-3)
            assert log["sampling/sampling_logp_difference/max"] < 1e-3
    adapter.sync(engine, trained)
    weights = {name: tensor.numpy() for name, tensor in adapter.named_weights(trained.model)}
    assert engine.checksum() == checksum(engine.model_config, weights)


@pytest.mark.trl
def test_rewards_are_those_of_the_trainers_own_sampler_under_the_same_tokens() -> None:
    """Greedy: transformers' tokens are the engine's, so both trainers see the same rewards and losses."""
    from examples.grpo_trl import PROMPTS, train

    trained, engine, _ = train(2)
    adapter.sync(engine, trained)
    tokenizer = trained.processing_class
    import torch

    for prompt in PROMPTS:
        ids = tokenizer(text=prompt)["input_ids"]
        theirs = trained.model.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=12, pad_token_id=0, eos_token_id=1
        )[0, len(ids) :].tolist()
        sampling = SamplingParams(temperature=0.0, max_tokens=12)
        mine = engine.generate([ids], sampling)[0].completions[0].token_ids.tolist()
        assert mine == theirs

"""The example on a tiny model of random weights: it trains, drafts better for it, and changes no token."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence

import numpy as np
import pytest
from rich.console import Console

from examples import train_mtp
from rollout_spec import Completion, RolloutOutput
from rollout_spec.intake import Prompt
from rollout_spec.loading import LoadedModel
from rollout_spec.models import apply
from rollout_spec.training import init_mtp_heads
from tests.helpers.tiny_models import tiny_model

SETTINGS = dataclasses.replace(
    train_mtp.FULL,
    samples=2,
    max_tokens=16,
    max_prompt=16,
    epochs=30,
    measurements=2,
    learning_rate=1e-2,
    other_tokens=100,
    depth=1,
)


def loaded() -> LoadedModel:
    model = tiny_model("llama")
    return LoadedModel(model.config, model.params, None)


def output(prompt: list[int], *answers: list[int]) -> RolloutOutput:
    nothing = np.zeros(0, np.float32)
    completions = [
        Completion(
            token_ids=np.asarray(answer, np.int32),
            text=None,
            logprobs=nothing,
            sampled_logprobs=nothing,
            kept_mass=nothing,
            finish_reason="length",
            stop_token=None,
            weight_versions=np.zeros(len(answer), np.int32),
            seed=0,
        )
        for answer in answers
    ]
    return RolloutOutput(np.asarray(prompt, np.int32), completions, group_id=0)


def test_rows_mark_the_answers() -> None:
    rows = train_mtp.make_rows([output([1, 2], [3], [4, 5]), output([6], [7])])
    assert rows.token_ids.tolist() == [[1, 2, 3, 0], [1, 2, 4, 5], [6, 7, 0, 0]]
    assert rows.answered.tolist() == [
        [False, False, True, False],
        [False, False, True, True],
        [False, True, False, False],
    ]


def test_parts_are_filled_up() -> None:
    assert [part.tolist() for part in train_mtp.in_parts(np.arange(5), 2)] == [[0, 1], [2, 3], [4, 0]]


def test_a_cut_vocabulary_scores_its_tokens_as_the_whole_one_does() -> None:
    model = loaded()
    vocabulary = np.array([7, 3, 200, 11], np.int32)
    cut = {**model.params, **train_mtp.cut_vocabulary(model.params, vocabulary)}
    tokens = np.array([[0, 2, 1, 3, 3]], np.int32)
    config = dataclasses.replace(model.config, vocab_size=len(vocabulary))
    whole = apply(model.config, model.params, vocabulary[tokens])
    np.testing.assert_allclose(apply(config, cut, tokens), whole[..., vocabulary], rtol=1e-5, atol=1e-5)


def test_the_head_learns_to_draft_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The held-out prompts are those trained on: a tiny head learns them by heart in seconds."""

    def prompts(
        model: LoadedModel, settings: train_mtp.Settings
    ) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
        some = np.random.default_rng(0).integers(0, model.config.vocab_size, (3, 6)).tolist()
        return some, some

    monkeypatch.setattr(train_mtp, "load_prompts", prompts)
    monkeypatch.setattr(train_mtp, "KINDS", ("none", "mtp"))
    settings = dataclasses.replace(SETTINGS, temperature=0.0)
    results = train_mtp.run(loaded(), settings, Console(file=io.StringIO()))
    lengths = [one["tokens_per_step"] for one in results["curve"]]
    assert [one["steps"] for one in results["curve"]] == [0, 30, 60]
    assert lengths[-1] > lengths[0] + 0.2
    assert results["tokens_identical"]
    assert results["tokens_per_step"]["none"] == 1
    assert results["tokens_per_step"]["mtp"] == pytest.approx(lengths[-1])


def test_the_trunk_stays_as_it_is() -> None:
    model = init_mtp_heads(loaded())
    rows = train_mtp.make_rows([output([1, 2, 3], [4, 5, 6, 7])])
    trainer = train_mtp.HeadTrainer(model, rows, SETTINGS)
    assert len([*trainer.epoch(0), *trainer.epoch(1)]) == 2  # the rate of the first is 0
    assert all(trainer.params[name] is part for name, part in model.params.items() if name != "mtp")
    changed = trainer.params["mtp"]["heads"][0]["projection"]["kernel"]
    assert not np.array_equal(changed, model.params["mtp"]["heads"][0]["projection"]["kernel"])

"""The demo's trainer: what it trains on, and that its loss is the clipped objective."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.trainer import Objective, Rows, Trainer, behaviour_logprobs, group_advantages, make_rows
from rollout_spec import Completion, RolloutOutput
from tests.helpers.tiny_models import TinyModel, tiny_model


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model("llama")


def completion(tokens: list[int], logprob: float = -1.0, kept: float = 1.0) -> Completion:
    count = len(tokens)
    return Completion(
        token_ids=np.asarray(tokens, np.int32),
        text="",
        logprobs=np.full(count, logprob, np.float32),
        sampled_logprobs=np.full(count, logprob, np.float32),
        kept_mass=np.full(count, kept, np.float32),
        finish_reason="length",
        stop_token=None,
        weight_versions=np.zeros(count, np.int32),
        seed=0,
    )


def output(prompt: list[int], *completions: Completion) -> RolloutOutput:
    return RolloutOutput(np.asarray(prompt, np.int32), list(completions), group_id=0)


def test_advantages_rank_a_group_around_zero() -> None:
    advantages = group_advantages([1.0, 0.0, 0.0, 1.0])
    np.testing.assert_allclose(advantages, [1, -1, -1, 1], atol=1e-3)
    assert (group_advantages([1.0, 1.0]) == 0).all()


def test_behaviour_is_over_the_whole_vocabulary() -> None:
    np.testing.assert_allclose(
        behaviour_logprobs(completion([5], -1.0, 0.5)), [-1.0 + np.log(0.5)], rtol=1e-6
    )


def test_rows_mark_exactly_the_sampled_tokens() -> None:
    outputs = [output([1, 2, 3], completion([4, 5]), completion([6, 7, 8]))]
    (rows,) = make_rows(outputs, [[1.0, 0.0]], rows=2, lengths=(5, 8))
    assert rows.token_ids.shape == (2, 8)
    np.testing.assert_array_equal(rows.token_ids[:, :6], [[1, 2, 3, 4, 5, 0], [1, 2, 3, 6, 7, 8]])
    targets = rows.token_ids[:, 1:]
    assert targets[rows.sampled].tolist() == [4, 5, 6, 7, 8]
    assert rows.advantages[0][rows.sampled[0]].min() > 0 > rows.advantages[1][rows.sampled[1]].max()
    assert (rows.behaviour_logprobs[~rows.sampled] == 0).all()


def test_groups_without_contrast_are_left_out_and_rows_padded_to_the_least_length() -> None:
    outputs = [
        output([1], completion([2]), completion([3])),
        output([4], completion([5, 6]), completion([7])),
    ]
    (rows,) = make_rows(outputs, [[1.0, 1.0], [0.0, 1.0]], rows=3, lengths=(3, 9))
    assert rows.token_ids.tolist() == [[4, 7, 0], [4, 5, 6], [0, 0, 0]]
    assert not rows.sampled[2].any()


def test_nothing_to_learn_changes_nothing(model: TinyModel) -> None:
    trainer = Trainer(model.params, Objective(model.config, 1.0), optax.sgd(1.0), rows=2)
    trainer.update([output([1], completion([2]), completion([3]))], [[0.0, 0.0]], (4,))
    assert trainer.params is model.params


def one_row(model: TinyModel, objective: Objective, shift: float, advantage: float) -> Rows:
    """A row whose behaviour log-probabilities are the model's own minus `shift`."""
    tokens = np.asarray([[1, 2, 4, 5, 6]], np.int32)
    sampled = np.asarray([[False, False, True, True]])
    logprobs = np.asarray(objective.token_logprobs(model.params, jnp.asarray(tokens)))
    return Rows(
        tokens,
        sampled,
        np.where(sampled, logprobs - shift, 0).astype(np.float32),
        np.where(sampled, advantage, 0).astype(np.float32),
    )


def test_on_policy_gradient_is_the_policy_gradient(model: TinyModel) -> None:
    objective = Objective(model.config, temperature=0.7)
    rows = one_row(model, objective, shift=0.0, advantage=1.5)

    def policy_gradient_loss(params: dict) -> jax.Array:
        logprobs = objective.token_logprobs(params, jnp.asarray(rows.token_ids))
        return -jnp.sum(jnp.where(rows.sampled, logprobs, 0.0) * rows.advantages) / 2

    (loss, gap), gradients = jax.value_and_grad(objective.loss, has_aux=True)(
        model.params, rows, jnp.float32(2)
    )
    assert loss == pytest.approx(-1.5, abs=1e-5)
    assert gap < 1e-5
    expected = jax.grad(policy_gradient_loss)(model.params)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(
    ("shift", "advantage", "moves"),
    [(0.5, 1.0, False), (0.5, -1.0, True), (-0.5, 1.0, True), (-0.5, -1.0, False), (0.1, 1.0, True)],
)
def test_clipping_stops_what_has_gone_far_enough(
    model: TinyModel, shift: float, advantage: float, moves: bool
) -> None:
    objective = Objective(model.config, temperature=1.0, clip=0.2)
    rows = one_row(model, objective, shift, advantage)
    gradients = jax.grad(lambda params: objective.loss(params, rows, jnp.float32(2))[0])(model.params)
    assert any((np.asarray(leaf) != 0).any() for leaf in jax.tree.leaves(gradients)) == moves


def test_an_update_makes_the_better_completion_likelier(model: TinyModel) -> None:
    objective = Objective(model.config, temperature=1.0)
    tokens = jnp.asarray([[1, 2, 4, 5], [1, 2, 6, 7]], jnp.int32)
    before = objective.token_logprobs(model.params, tokens)[:, 1:]
    good, bad = (completion(row[2:].tolist(), 0.0) for row in np.asarray(tokens))
    for one, logprobs in ((good, before[0]), (bad, before[1])):
        one.sampled_logprobs[:] = logprobs
    trainer = Trainer(model.params, objective, optax.sgd(0.5), rows=1)  # two micro-batches, one step
    metrics = trainer.update([output([1, 2], good, bad)], [[1.0, 0.0]], (4,))
    after = objective.token_logprobs(trainer.params, tokens)[:, 1:]
    assert metrics.logprob_gap < 1e-5
    assert after[0].sum() > before[0].sum()
    assert after[1].sum() < before[1].sum()

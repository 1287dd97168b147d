"""Fresh heads, their loss against float64, where its gradient goes, and that training lowers it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout_spec.errors import ConfigError
from rollout_spec.loading import LoadedModel
from rollout_spec.models import MTPConfig, abstract_params, apply
from rollout_spec.training import init_mtp_heads, mtp_loss, mtp_losses, trunk_states
from rollout_spec.weights.names import to_hf
from tests.helpers.plain_model import PlainModel
from tests.helpers.plain_mtp import PlainHeads
from tests.helpers.tiny_models import CONFIGS, random_params


@functools.cache
def bare_model() -> LoadedModel:
    config = CONFIGS["qwen2-tied"]
    return LoadedModel(config, random_params(config, 1), None)


@functools.cache
def model_with_heads() -> LoadedModel:
    return init_mtp_heads(bare_model(), MTPConfig(num_heads=2), seed=4)


def rows(length: int = 10) -> tuple[jax.Array, jax.Array]:
    """Tokens and a mask with holes, padded at the right."""
    generator = np.random.default_rng(2)
    mask = generator.random((3, length)) < 0.7
    mask[1, length - 3 :] = False
    return jnp.asarray(generator.integers(0, 300, (3, length)), jnp.int32), jnp.asarray(mask)


def test_the_loss_is_the_cross_entropy_of_the_masked_targets_in_float64() -> None:
    model, (tokens, mask) = model_with_heads(), rows()
    plain = PlainHeads(PlainModel(model.config, to_hf(model.config, model.params), 96))
    total, count = np.zeros(3), np.zeros(3)
    for row, wanted in zip(np.asarray(tokens).tolist(), np.asarray(mask), strict=True):
        for depth, logits in enumerate(plain.logits_ahead(row, 3)):
            for place, target in enumerate(row[depth + 2 :]):
                if wanted[place + depth + 2]:
                    one = logits[place]
                    total[depth] += np.log(np.exp(one - one.max()).sum()) + one.max() - one[target]
                    count[depth] += 1
    losses = mtp_losses(model.params, tokens, mask, config=model.config, depths=3)
    np.testing.assert_allclose(losses, total / count, rtol=1e-5)
    loss = mtp_loss(model.params, tokens, mask, config=model.config, depths=3)
    np.testing.assert_allclose(loss, np.mean(total / count), rtol=1e-5)


@pytest.mark.parametrize("train_trunk", [False, True])
def test_the_gradient_reaches_the_trunk_only_if_asked(train_trunk: bool) -> None:
    model, (tokens, mask) = model_with_heads(), rows()
    gradient = jax.grad(mtp_loss)(model.params, tokens, mask, config=model.config, train_trunk=train_trunk)
    for path, leaf in jax.tree_util.tree_flatten_with_path(gradient)[0]:
        is_zero_anyway = path[-1].key == "bias" and path[-2].key == "k_proj"  # softmax cancels it
        if path[0].key == "mtp":
            assert is_zero_anyway or np.abs(leaf).max() > 0, path
        else:
            assert train_trunk or np.abs(leaf).max() == 0, path
    assert (np.abs(gradient["layers"][0]["mlp"]["up_proj"]["kernel"]).max() > 0) == train_trunk


def test_states_of_the_trunk_given_ahead_change_neither_loss_nor_gradient() -> None:
    model, (tokens, mask) = model_with_heads(), rows()
    states = trunk_states(model.params, tokens, config=model.config)
    compute = jax.value_and_grad(functools.partial(mtp_loss, config=model.config))
    whole, gradient = compute(model.params, tokens, mask)
    given, given_gradient = compute(model.params, tokens, mask, states=states)
    np.testing.assert_allclose(given, whole, rtol=1e-6)
    for mine, theirs in zip(
        jax.tree.leaves(given_gradient["mtp"]), jax.tree.leaves(gradient["mtp"]), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_what_the_mask_leaves_out_changes_neither_loss_nor_gradient() -> None:
    model, (tokens, mask) = model_with_heads(), rows()
    changed = tokens.at[1, -3:].set(7)  # padding, at the right and not counted
    compute = jax.jit(jax.value_and_grad(functools.partial(mtp_loss, config=model.config)))
    for mine, theirs in zip(
        jax.tree.leaves(compute(model.params, tokens, mask)),
        jax.tree.leaves(compute(model.params, changed, mask)),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, theirs)
    assert float(mtp_loss(model.params, tokens, jnp.zeros_like(mask), config=model.config)) == 0


def test_fresh_heads_fit_the_model_and_leave_its_weights_alone() -> None:
    bare, model = bare_model(), model_with_heads()
    expected = abstract_params(model.config)
    assert jax.tree.structure(expected) == jax.tree.structure(model.params)
    assert [leaf.shape for leaf in jax.tree.leaves(expected)] == [
        leaf.shape for leaf in jax.tree.leaves(model.params)
    ]
    assert all(model.params[name] is part for name, part in bare.params.items())
    tokens, _ = rows()
    np.testing.assert_array_equal(
        apply(bare.config, bare.params, tokens), apply(model.config, model.params, tokens)
    )


def test_training_the_heads_alone_lowers_their_loss() -> None:
    model, (tokens, mask) = model_with_heads(), rows()
    compute = jax.jit(jax.value_and_grad(functools.partial(mtp_loss, config=model.config)))
    params = model.params
    first, gradient = compute(params, tokens, mask)
    for _ in range(60):
        heads = jax.tree.map(lambda weight, slope: weight - 0.1 * slope, params["mtp"], gradient["mtp"])
        params = {**params, "mtp": heads}
        last, gradient = compute(params, tokens, mask)
    assert float(last) < 0.5 * float(first)


def test_misuse_is_refused_with_advice() -> None:
    bare, model, (tokens, mask) = bare_model(), model_with_heads(), rows()
    with pytest.raises(ConfigError, match="init_mtp_heads"):
        mtp_loss(bare.params, tokens, mask, config=bare.config)
    with pytest.raises(ConfigError, match="at least depths"):
        mtp_loss(model.params, tokens[:, :3], mask[:, :3], config=model.config)
    with pytest.raises(ConfigError, match="at least depths"):
        mtp_loss(model.params, tokens, mask[:, :5], config=model.config)
    states = trunk_states(model.params, tokens, config=model.config)
    with pytest.raises(ConfigError, match="don't change with the trunk"):
        mtp_loss(model.params, tokens, mask, config=model.config, states=states, train_trunk=True)
    with pytest.raises(ConfigError, match=r"expected shape \(3, 10"):
        mtp_loss(model.params, tokens, mask, config=model.config, states=states[:, 1:])
    with pytest.raises(ConfigError, match="already has 2"):
        init_mtp_heads(model)
    with pytest.raises(ConfigError, match="at least one head"):
        init_mtp_heads(bare, MTPConfig(num_heads=0))

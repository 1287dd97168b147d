"""The networks compute what transformers' do, alone or around an attention of the caller's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rollout_spec.loading.huggingface_config import parse_config
from rollout_spec.models import ModelConfig, Params, abstract_params, apply, build, init_params
from rollout_spec.models.decoder import causal_attention
from rollout_spec.weights.names import expected_shapes, from_hf
from tests.references import cases

STORED = Path(cases.__file__).with_name("logits.npz")

TINY = ModelConfig(
    architecture="llama",
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)


def case_params(config: ModelConfig) -> Params:
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), abstract_params(config))
    for name, shape in expected_shapes(config).items():
        path, array = from_hf(config, name, cases.weight(name, shape))
        branch = params
        for part in path[:-1]:
            branch = branch[part]
        branch[path[-1]] = np.asarray(array)
    return jax.tree.map(jnp.asarray, params)


@pytest.mark.parametrize("case", cases.CASES)
def test_logits_equal_the_stored_ones_of_transformers(case: str) -> None:
    config = parse_config(cases.CASES[case])
    logits = apply(config, case_params(config), *cases.inputs())
    with np.load(STORED) as stored:
        np.testing.assert_allclose(logits, stored[case], atol=1e-4, rtol=0)


def test_every_option_changes_the_stored_logits() -> None:
    """Otherwise a case would pass without its option being read. The exceptions are meant to be equal."""
    same = {
        "llama": {"llama dynamic"},
        "llama yarn": {"llama yarn one mscale"},
        "qwen2": {"qwen2 window on no layer"},
    }
    with np.load(STORED) as stored:
        logits = {name: stored[name] for name in stored.files}
    assert set(logits) == set(cases.CASES)
    for name, array in logits.items():
        near = {other for other in logits if other > name and np.abs(logits[other] - array).max() < 1e-3}
        assert near == same.get(name, set())


def test_an_attention_of_the_caller_sees_rotated_heads_and_gives_the_same_logits() -> None:
    params, token_ids = init_params(TINY), jnp.arange(9) * 5
    model = nnx.merge(build(TINY), params)
    layers = []

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        layers.append(layer)
        assert (q.shape, k.shape, v.shape) == ((9, 4, 8), (9, 2, 8), (9, 2, 8))
        return causal_attention(q[None], k[None], v[None], scale=TINY.attention_scale)[0]

    logits = model.unembed(model.hidden_states(token_ids, jnp.arange(9), attend))
    assert layers == [0, 1]
    np.testing.assert_allclose(logits, apply(TINY, params, token_ids[None])[0], atol=1e-5)


def test_attention_follows_its_definition() -> None:
    """Against loops in float64, with 6 query heads on 2 key heads."""
    generator = np.random.default_rng(0)
    q, k, v = (generator.normal(size=(2, 5, heads, 4)) for heads in (6, 2, 2))
    expected = np.zeros_like(q)
    for row, token, head in np.ndindex(2, 5, 6):
        keys, values = k[row, : token + 1, head // 3], v[row, : token + 1, head // 3]
        weights = np.exp(keys @ q[row, token, head] * 0.3)
        expected[row, token, head] = weights @ values / weights.sum()
    got = causal_attention(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), scale=0.3)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_token_does_not_see_later_ones() -> None:
    params = init_params(TINY)
    token_ids = np.arange(12, dtype=np.int32)[None]
    changed = token_ids.copy()
    changed[0, 7] = 40
    difference = np.abs(apply(TINY, params, token_ids) - apply(TINY, params, changed)).max(axis=-1)[0]
    assert (difference[:7] == 0).all()
    assert (difference[7:] > 1e-3).all()


def test_only_distances_between_positions_matter() -> None:
    params, token_ids = init_params(TINY), np.arange(10, dtype=np.int32)[None]
    positions = np.arange(10, dtype=np.int32)[None]
    shifted = apply(TINY, params, token_ids, positions + 20)
    np.testing.assert_allclose(shifted, apply(TINY, params, token_ids), atol=1e-4)
    stretched = apply(TINY, params, token_ids, positions * 3)
    assert np.abs(stretched - shifted).max() > 1e-2


@pytest.mark.parametrize("tied", [True, False])
def test_bfloat16_weights_compute_in_bfloat16_and_give_float32_logits(tied: bool) -> None:
    config = parse_config({**cases.CASES["llama"], "tie_word_embeddings": tied})
    wide, narrow = init_params(config, 1), init_params(config, 1, jnp.bfloat16)
    seen: list[Any] = []

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        seen.extend([q.dtype, k.dtype, v.dtype])
        return q

    hidden = nnx.merge(build(config), narrow).hidden_states(jnp.arange(4), jnp.arange(4), attend)
    assert {*seen, hidden.dtype} == {jnp.dtype(jnp.bfloat16)}
    token_ids, positions = cases.inputs()
    logits = apply(config, narrow, token_ids, positions)
    assert logits.dtype == jnp.float32
    error = np.abs(logits - apply(config, wide, token_ids, positions))
    assert 1e-4 < error.max() < 0.2


@pytest.mark.parametrize("case", ["llama tied", "qwen2"])
def test_gradients_agree_with_finite_differences(case: str) -> None:
    config = parse_config(cases.CASES[case])
    params = init_params(config)
    token_ids = cases.inputs()[0]

    def loss(params: Params) -> jax.Array:
        log_probabilities = jax.nn.log_softmax(apply(config, params, token_ids)[:, :-1])
        return -jnp.take_along_axis(log_probabilities, token_ids[:, 1:, None], axis=-1).mean()

    gradient = jax.grad(loss)(params)
    direction = init_params(config, seed=3)
    slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: jnp.vdot(g, d), gradient, direction)))
    step = 1e-2
    ends = [loss(jax.tree.map(lambda p, d, s=s: p + s * d, params, direction)) for s in (step, -step)]
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * step), rtol=2e-2)

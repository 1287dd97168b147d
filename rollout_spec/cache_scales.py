"""What a stored 1 of an 8-bit cache is worth: from the largest keys and values of a fixed text under the weights.

Scales are a function of the weights alone: never of what runs, or a batch could change a token. They are computed on
the device, before the first step with new weights, from `LENGTH` tokens drawn once and for all. Larger keys and values
than those times a margin are cut off. Where an update keeps what is cached ("inflight_keep") the scales stay as well.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .models import ModelConfig, build
from .models.quantized import largest
from .sharding import MeshLayout

LENGTH = 256  # tokens
MARGINS = {"int8": 1.25, "float8_e4m3fn": 4.0}
"""How much larger than the largest of the fixed text what is stored may be. Floats lose nothing by a wide one."""


def scales_shape(config: ModelConfig, heads: int) -> tuple[int, int, int]:
    """Of a layer's, then of a drafting head's keys and values: [caches, 2, Hk]."""
    return config.num_layers + heads, 2, config.num_kv_heads


@functools.lru_cache(maxsize=64)
def calibration(
    config: ModelConfig,
    for_heads: bool,
    dtype: np.dtype,
    sharding: jax.sharding.Sharding,
    mesh_layout: MeshLayout | None = None,
) -> Callable[[dict], jax.Array]:
    """The jitted function from weights to float32[caches, 2, Hk]. for_heads: of the drafting heads' caches too."""
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, min(LENGTH, config.max_length))

    def run(params: dict) -> jax.Array:
        context: Any = contextlib.nullcontext()
        if mesh_layout is not None:
            context = jax.sharding.use_abstract_mesh(mesh_layout.mesh.abstract_mesh)
        with context:
            reach = _reach(config, params, jnp.asarray(tokens, jnp.int32), for_heads)
        scale = reach * (MARGINS[dtype.name] / largest(dtype))
        return jnp.where(reach > 0, scale, 1.0)

    return jax.jit(run, out_shardings=sharding)


def _reach(config: ModelConfig, params: dict, tokens: jax.Array, for_heads: bool) -> jax.Array:
    """The largest key and value of each cache and head, float32[caches, 2, Hk]."""
    model = nnx.merge(build(config), params)
    positions, attend_whole = model.whole(tokens[None], None)
    found: dict[int, jax.Array] = {}

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        found[layer] = jnp.stack([jnp.max(jnp.abs(heads), axis=(0, 2)) for heads in (k, v)])
        return attend_whole(layer, q, k, v)

    states = model.trunk_states(tokens, positions, attend)
    if for_heads:
        assert model.mtp is not None
        assert config.mtp is not None
        hidden, table = model.mtp_input(states), model.rotary_table(positions, config.num_layers)
        for depth in range(config.mtp.num_heads):
            ahead = model.embed(jnp.roll(tokens, -(depth + 1)))
            hidden, _ = model.mtp.predict(depth, ahead, hidden, table, attend)
    return jnp.stack([found[cache] for cache in sorted(found)]).astype(jnp.float32)

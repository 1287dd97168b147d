"""Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434), in its absorbed form.

What is cached of a token is one latent vector of `kv_rank` numbers and one rotated key of `rope_dim`, for all heads.
A head's keys and values are linear in the latent, so instead of expanding it for every cached token, queries are
taken into the latent's space and results out of it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from rollout_spec.models.config import LatentConfig, ModelConfig
from rollout_spec.models.layers import Attend, Linear, RMSNorm, RotaryTable, matmul_precision
from rollout_spec.models.quantized import dense
from rollout_spec.models.rope import rotate


class LatentAttention(nnx.Module):
    """Attention over latents; `attend` sees one key head of [latent, rotated key], whose values are the latents."""

    def __init__(self, config: ModelConfig, latent: LatentConfig) -> None:
        self.latent, self.num_heads = latent, config.num_heads
        hidden, bias = config.hidden_size, config.attention_bias
        queries = config.num_heads * config.head_dim
        compressed = latent.query_rank is not None
        self.q_proj = None if compressed else Linear(hidden, queries)
        self.q_a_proj = (
            Linear(hidden, latent.query_rank, bias=bias) if latent.query_rank is not None else None
        )
        self.q_a_layernorm = RMSNorm(latent.query_rank, _EPSILON) if latent.query_rank is not None else None
        self.q_b_proj = Linear(latent.query_rank, queries) if latent.query_rank is not None else None
        self.kv_a_proj_with_mqa = Linear(hidden, latent.kv_rank + latent.rope_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(latent.kv_rank, _EPSILON)
        self.kv_b_proj = Linear(latent.kv_rank, config.num_heads * (latent.nope_dim + latent.value_dim))
        self.o_proj = Linear(config.num_heads * latent.value_dim, hidden, bias=bias)

    def __call__(self, inputs: jax.Array, table: RotaryTable, layer: int, attend: Attend) -> jax.Array:
        latent, tokens = self.latent, inputs.shape[0]
        queries = self._queries(inputs).reshape(tokens, self.num_heads, -1)
        plain, rotated = jnp.split(queries, [latent.nope_dim], axis=-1)
        cached, key = jnp.split(self.kv_a_proj_with_mqa(inputs), [latent.kv_rank], axis=-1)
        cached, key = self.kv_a_layernorm(cached)[:, None, :], self._rotate(key[:, None, :], table)

        to_keys, to_values = self._absorbed(inputs.dtype)
        precision = matmul_precision(inputs.dtype)
        absorbed = jnp.einsum("thn,rhn->thr", plain, to_keys, precision=precision)
        q = jnp.concatenate([absorbed, self._rotate(rotated, table)], axis=-1)
        mixed = attend(layer, q, jnp.concatenate([cached, key], axis=-1), cached)
        mixed = mixed.reshape(tokens, self.num_heads, latent.kv_rank)
        heads = jnp.einsum("thr,rhv->thv", mixed, to_values, precision=precision)
        return self.o_proj(heads.reshape(tokens, -1))

    def _queries(self, inputs: jax.Array) -> jax.Array:
        if self.q_proj is not None:
            return self.q_proj(inputs)
        assert self.q_a_proj is not None
        assert self.q_a_layernorm is not None
        assert self.q_b_proj is not None
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(inputs)))

    def _absorbed(self, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """From a latent to each head's keys [R, H, nope] and values [R, H, value]."""
        kernel = dense(self.kv_b_proj.kernel.get_value(), dtype)
        kernel = kernel.reshape(self.latent.kv_rank, self.num_heads, -1)
        keys, values = jnp.split(kernel, [self.latent.nope_dim], axis=-1)
        return keys, values

    def _rotate(self, heads: jax.Array, table: RotaryTable) -> jax.Array:
        if (
            self.latent.interleaved
        ):  # pairs lie side by side; which place they end up at doesn't matter to q . k
            heads = jnp.concatenate([heads[..., 0::2], heads[..., 1::2]], axis=-1)
        return rotate(heads, table)


_EPSILON = 1e-6  # of the norms over latents, whatever config.json says of the others

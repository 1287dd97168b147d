"""Layers shared by the model families, on flat token arrays [T, ...].

Weights are stored [in, out] and used as `x @ w`, the fastest layout on CPU. Compute runs in the weights'
dtype; norms, rotary embedding, softmax and logits in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from rollout_spec.models.config import ModelConfig
from rollout_spec.models.rope import rotate

Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]
"""attend(layer, q [T, Hq, D], k [T, Hk, D], v [T, Hk, D]) -> [T, Hq, D]; q and k are already rotated."""

RotaryTable = tuple[jax.Array, jax.Array]


def matmul_precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """Full precision for float32 operands (accelerators would otherwise round them to bfloat16 or TF32)."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


class Linear(nnx.Module):
    """y = x @ kernel + bias, kernel [in, out]."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool = False) -> None:
        self.kernel = nnx.Param(jnp.zeros((in_size, out_size)))
        self.bias = nnx.Param(jnp.zeros((out_size,))) if bias else None

    def __call__(self, inputs: jax.Array) -> jax.Array:
        kernel = self.kernel[...]
        outputs = jnp.matmul(inputs, kernel, precision=matmul_precision(kernel.dtype))
        return outputs if self.bias is None else outputs + self.bias[...]


class Embedding(nnx.Module):
    """Rows of a table [V, E]; also the output head of a model with tied embeddings."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        self.embedding = nnx.Param(jnp.zeros((vocab_size, hidden_size)))

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        return self.embedding[...][token_ids]

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """hidden [T, E] -> logits float32 [T, V]."""
        table = self.embedding[...]
        return jax.lax.dot_general(
            hidden,
            table,
            (((1,), (1,)), ((), ())),
            precision=matmul_precision(table.dtype),
            preferred_element_type=jnp.float32,
        )


class RMSNorm(nnx.Module):
    """x / rms(x) * scale (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, size: int, epsilon: float) -> None:
        self.scale = nnx.Param(jnp.ones((size,)))
        self.epsilon = epsilon

    def __call__(self, inputs: jax.Array) -> jax.Array:
        wide = inputs.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.epsilon)
        return normed.astype(inputs.dtype) * self.scale[...]


class Attention(nnx.Module):
    """Grouped-query attention around an `attend` function, which owns mask and cache."""

    def __init__(self, config: ModelConfig) -> None:
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = Linear(config.hidden_size, queries, bias=config.attention_bias)
        self.k_proj = Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.v_proj = Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.o_proj = Linear(queries, config.hidden_size, bias=config.attention_out_bias)

    def __call__(self, inputs: jax.Array, table: RotaryTable, layer: int, attend: Attend) -> jax.Array:
        tokens = inputs.shape[0]
        q = rotate(self.q_proj(inputs).reshape(tokens, -1, self.head_dim), table)
        k = rotate(self.k_proj(inputs).reshape(tokens, -1, self.head_dim), table)
        v = self.v_proj(inputs).reshape(tokens, -1, self.head_dim)
        return self.o_proj(attend(layer, q, k, v).reshape(tokens, -1))


class GatedMLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(inputs)) * self.up_proj(inputs))


class DecoderLayer(nnx.Module):
    """Pre-norm residual block: attention, then MLP."""

    def __init__(self, config: ModelConfig) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def __call__(self, hidden: jax.Array, table: RotaryTable, layer: int, attend: Attend) -> jax.Array:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), table, layer, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

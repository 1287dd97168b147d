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
from rollout_spec.models.quantized import multiply
from rollout_spec.models.rope import rotate

Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]
"""attend(layer, q [T, Hq, D], k [T, Hk, D], v [T, Hk, D]) -> [T, Hq, D]; q and k are already rotated."""

RotaryTable = tuple[jax.Array, jax.Array]


def matmul_precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """Full precision for float32 operands (accelerators would otherwise round them to bfloat16 or TF32)."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


class Linear(nnx.Module):
    """y = x @ kernel + bias, kernel [in, out], which may be a QuantizedArray."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool = False) -> None:
        self.kernel = nnx.Param(jnp.zeros((in_size, out_size)))
        self.bias = nnx.Param(jnp.zeros((out_size,))) if bias else None

    def __call__(self, inputs: jax.Array) -> jax.Array:
        outputs = multiply(inputs, self.kernel.get_value(), matmul_precision)
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
    """x / rms(x) * scale over the last axis (https://arxiv.org/abs/1910.07467).

    offset: multiply by 1 + scale, before rounding to the dtype of x.
    """

    def __init__(self, size: int, epsilon: float, *, offset: bool = False) -> None:
        self.scale = nnx.Param(jnp.zeros((size,)) if offset else jnp.ones((size,)))
        self.epsilon = epsilon
        self.offset = offset

    def __call__(self, inputs: jax.Array) -> jax.Array:
        wide = inputs.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.epsilon)
        if self.offset:
            return (normed * (1.0 + self.scale[...].astype(jnp.float32))).astype(inputs.dtype)
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
        self.q_norm = head_norm(config) if config.qk_norm else None
        self.k_norm = head_norm(config) if config.qk_norm else None

    def __call__(self, inputs: jax.Array, table: RotaryTable, layer: int, attend: Attend) -> jax.Array:
        tokens = inputs.shape[0]
        q = self.q_proj(inputs).reshape(tokens, -1, self.head_dim)
        k = self.k_proj(inputs).reshape(tokens, -1, self.head_dim)
        v = self.v_proj(inputs).reshape(tokens, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.o_proj(attend(layer, rotate(q, table), rotate(k, table), v).reshape(tokens, -1))


def head_norm(config: ModelConfig) -> RMSNorm:
    """A norm over the dimensions of a head."""
    return RMSNorm(config.head_dim, config.rms_norm_eps, offset=config.norm_offset)


def hidden_norm(config: ModelConfig) -> RMSNorm:
    """A norm over the residual stream."""
    return RMSNorm(config.hidden_size, config.rms_norm_eps, offset=config.norm_offset)


def activate(config: ModelConfig, gate: jax.Array) -> jax.Array:
    """The MLP's non-linearity."""
    return jax.nn.silu(gate) if config.activation == "silu" else jax.nn.gelu(gate, approximate=True)


class GatedMLP(nnx.Module):
    """SwiGLU or GeGLU: down(activation(gate(x)) * up(x)) (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: ModelConfig, intermediate_size: int | None = None) -> None:
        """intermediate_size: None is the model's."""
        width = config.intermediate_size if intermediate_size is None else intermediate_size
        self.config = config
        self.gate_proj = Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.down_proj = Linear(width, config.hidden_size, bias=config.mlp_bias)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return self.down_proj(activate(self.config, self.gate_proj(inputs)) * self.up_proj(inputs))


class DecoderLayer(nnx.Module):
    """Residual block: norm, attention, norm, MLP; with `output_norms` a norm behind each of the two as well."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        self.output_norms = config.output_norms
        self.input_layernorm = hidden_norm(config)
        self.self_attn = self.new_attention(config, layer)
        self.post_attention_layernorm = hidden_norm(
            config
        )  # in front of the MLP, unless there are output norms
        self.mlp = self.new_mlp(config, layer)
        self.pre_feedforward_layernorm = hidden_norm(config) if config.output_norms else None
        self.post_feedforward_layernorm = hidden_norm(config) if config.output_norms else None

    def new_attention(self, config: ModelConfig, layer: int) -> nnx.Module:
        """The attention of that layer."""
        return Attention(config)

    def new_mlp(self, config: ModelConfig, layer: int) -> nnx.Module:
        """The MLP of that layer."""
        return GatedMLP(config)

    def __call__(self, hidden: jax.Array, table: RotaryTable, layer: int, attend: Attend) -> jax.Array:
        attended = self.self_attn(self.input_layernorm(hidden), table, layer, attend)
        if self.pre_feedforward_layernorm is None or self.post_feedforward_layernorm is None:
            hidden = hidden + attended
            return hidden + self.mlp(self.post_attention_layernorm(hidden))
        hidden = hidden + self.post_attention_layernorm(attended)
        return hidden + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))

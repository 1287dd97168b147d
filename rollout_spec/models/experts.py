"""Mixtures of experts: routing of each token by itself, and the experts as grouped matmuls.

Tokens are sorted by expert and multiplied group by group (`jax.lax.ragged_dot`); nothing is dropped, whatever the
load of an expert, so that a token's result doesn't depend on what it is computed beside.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from rollout_spec.models.config import ExpertsConfig, ModelConfig
from rollout_spec.models.layers import GatedMLP, activate, matmul_precision
from rollout_spec.models.quantized import QuantizedArray, is_quantized


class Router(nnx.Module):
    """Which experts a token goes to, and with what weights."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig) -> None:
        self.experts = experts
        self.kernel = nnx.Param(jnp.zeros((config.hidden_size, experts.num_experts)))
        corrected = experts.correction_bias
        self.e_score_correction_bias = nnx.Param(jnp.zeros((experts.num_experts,))) if corrected else None

    def __call__(self, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """hidden [T, E] -> experts int32[T, k], weights float32[T, k]."""
        experts = self.experts
        logits = jnp.matmul(
            hidden.astype(jnp.float32),
            self.kernel[...].astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )
        softmax = experts.scoring == "softmax"
        scores = jax.nn.softmax(logits, axis=-1) if softmax else jax.nn.sigmoid(logits)
        ranked = scores
        if self.e_score_correction_bias is not None:
            ranked = ranked + self.e_score_correction_bias[...].astype(jnp.float32)
        if experts.chosen_groups < experts.num_groups:
            ranked = jnp.where(self._in_best_groups(ranked), ranked, -jnp.inf)
        _, chosen = jax.lax.top_k(ranked, experts.num_chosen)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if experts.normalised:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return chosen, weights * experts.scale

    def _in_best_groups(self, ranked: jax.Array) -> jax.Array:
        """bool[T, N]: whether each expert is of one of the `chosen_groups` groups that score best."""
        experts = self.experts
        groups = ranked.reshape(ranked.shape[0], experts.num_groups, -1)
        best = jax.lax.top_k(groups, experts.group_score_of)[0].sum(axis=-1)  # [T, groups]
        _, chosen = jax.lax.top_k(best, experts.chosen_groups)
        kept = jnp.any(chosen[:, :, None] == jnp.arange(experts.num_groups), axis=1)
        return jnp.repeat(kept, groups.shape[-1], axis=-1)


class Stack(nnx.Module):
    """The matrices of all experts, [N, in, out]."""

    def __init__(self, count: int, in_size: int, out_size: int) -> None:
        self.kernel = nnx.Param(jnp.zeros((count, in_size, out_size)))


class Experts(nnx.Module):
    """Gated MLPs, of which each token goes through a few."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig) -> None:
        self.config = config
        count, width, hidden = experts.num_experts, experts.intermediate_size, config.hidden_size
        self.gate_proj = Stack(count, hidden, width)
        self.up_proj = Stack(count, hidden, width)
        self.down_proj = Stack(count, width, hidden)

    def __call__(self, hidden: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        """hidden [T, E], experts int32[T, k] and their weights float32[T, k] -> [T, E].

        On a mesh (`jax.sharding.use_abstract_mesh`) each device computes what its experts, or its part of their
        width, contribute for all tokens, and the contributions are added up.
        """
        stacks: list[Any] = [
            stack.kernel.get_value() for stack in (self.gate_proj, self.up_proj, self.down_proj)
        ]
        mesh = jax.sharding.get_abstract_mesh()
        sizes = {} if mesh.empty else dict(mesh.shape)
        quantized = is_quantized(stacks[0])
        count, _, width = (stacks[0].values if quantized else stacks[0]).shape
        by_expert = "expert" if sizes.get("expert", 1) > 1 and count % sizes["expert"] == 0 else None
        by_width = "model" if sizes.get("model", 1) > 1 and width % sizes["model"] == 0 else None
        if by_expert is None and by_width is None:
            return self._contribution(hidden, chosen, weights, *stacks, first=0).astype(hidden.dtype)

        def contribute(hidden: jax.Array, chosen: jax.Array, weights: jax.Array, *own: Any) -> jax.Array:
            held = count // sizes["expert"] if by_expert else count
            first = jax.lax.axis_index(by_expert) * held if by_expert else 0
            part = self._contribution(hidden, chosen, weights, *own, first=first)
            return jax.lax.psum(part, tuple(axis for axis in (by_expert, by_width) if axis))

        inner: Any = PartitionSpec(by_expert, None, by_width)
        outer: Any = PartitionSpec(by_expert, by_width)
        everywhere = PartitionSpec()
        if quantized:
            inner = QuantizedArray(inner, PartitionSpec(by_expert, by_width), everywhere)
            outer = QuantizedArray(outer, PartitionSpec(by_expert), everywhere)
        return jax.shard_map(
            contribute,
            mesh=mesh,
            in_specs=(everywhere, everywhere, everywhere, inner, inner, outer),
            out_specs=everywhere,
            check_vma=False,
        )(hidden, chosen, weights, *stacks).astype(hidden.dtype)

    def _contribution(
        self,
        hidden: jax.Array,
        chosen: jax.Array,
        weights: jax.Array,
        gate: Any,
        up: Any,
        down: Any,
        *,
        first: jax.Array | int,
    ) -> jax.Array:
        """float32[T, E]: what the experts of these stacks, the one of number `first` and so on, add to each token."""
        tokens, per_token = chosen.shape
        count = (gate.values if is_quantized(gate) else gate).shape[0]
        own = (chosen >= first) & (chosen < first + count)
        flat = jnp.where(own, chosen - first, count).reshape(-1)  # others' go behind the last group
        order = jnp.argsort(flat, stable=True)
        sizes = jnp.bincount(flat, length=count + 1)[:count].astype(jnp.int32)

        def multiply(rows: jax.Array, stack: Any) -> jax.Array:
            if not is_quantized(stack):
                return jax.lax.ragged_dot(rows, stack, sizes, precision=matmul_precision(stack.dtype))
            products = jax.lax.ragged_dot(
                rows,
                stack.values.astype(rows.dtype),
                sizes,
                precision=matmul_precision(rows.dtype),
                preferred_element_type=jnp.float32,
            )
            scale = stack.scale[jnp.minimum(flat[order], count - 1)]  # of others' rows any will do
            return (products * scale).astype(rows.dtype)

        rows = hidden[order // per_token]
        outputs = multiply(activate(self.config, multiply(rows, gate)) * multiply(rows, up), down)
        outputs = outputs[jnp.argsort(order)].reshape(tokens, per_token, -1).astype(jnp.float32)
        return jnp.sum(jnp.where(own[..., None], outputs * weights[..., None], 0.0), axis=1)


class SparseMLP(nnx.Module):
    """Routed experts, and beside them, if there are any, the shared ones, which every token goes through."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig) -> None:
        self.gate = Router(config, experts)
        self.experts = Experts(config, experts)
        shared = experts.shared_intermediate_size
        self.shared_experts = GatedMLP(config, shared) if shared else None

    def __call__(self, hidden: jax.Array) -> jax.Array:
        mixed = self.experts(hidden, *self.gate(hidden))
        return mixed if self.shared_experts is None else mixed + self.shared_experts(hidden)

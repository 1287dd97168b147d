"""Training of multi-token-prediction heads: fresh heads, and their part of the loss."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rollout_spec.errors import ConfigError
from rollout_spec.models import ModelConfig, MTPConfig, Params, build


class _Model(Protocol):
    @property
    def config(self) -> ModelConfig: ...
    @property
    def params(self) -> Params: ...


AnyModel = TypeVar("AnyModel", bound=_Model)


def mtp_losses(
    params: Params,
    tokens: jax.Array,
    mask: jax.Array,
    *,
    config: ModelConfig,
    depths: int | None = None,
    train_trunk: bool = False,
    states: jax.Array | None = None,
) -> jax.Array:
    """Mean cross-entropy in nats of each depth's prediction, float32[depths]; differentiable, for use in jit.

    tokens int32[B, T], padded at the right; mask bool or float[B, T]: which tokens count as targets. Depth d (from
    0) scores token i + d + 2 from the tokens up to i + d + 1. depths: None means one for each head; more apply
    the heads in turn again. train_trunk: whether the gradient also reaches the weights outside "mtp" (the
    embedding and the output head, which the heads share, among them). states [B, T, E]: the `trunk_states` of
    tokens; a trunk that stays as it is needs to compute them only once. A depth without targets has loss 0.
    Raises ConfigError for a model without heads, for rows too short for any target, and for states of other rows or
    along with train_trunk.
    """
    if config.mtp is None:
        raise ConfigError(
            "the model has no multi-token-prediction heads; add some with init_mtp_heads(model)"
        )
    depths = config.mtp.num_heads if depths is None else depths
    if depths < 1 or tokens.ndim != 2 or tokens.shape != mask.shape or tokens.shape[1] < depths + 2:
        raise ConfigError(
            f"mtp_loss of {depths} depths: expected depths >= 1 and tokens and mask of one shape [B, T], T at least "
            f"depths + 2, got tokens {tokens.shape} and mask {mask.shape}"
        )
    expected = (*tokens.shape, config.hidden_size)
    if states is not None and (train_trunk or states.shape != expected):
        raise ConfigError(
            f"mtp_loss with states: expected shape {expected} and train_trunk=False, got shape {states.shape} and "
            f"train_trunk={train_trunk}; states given ahead don't change with the trunk"
        )
    if not train_trunk:
        params = {
            name: part if name == "mtp" else jax.lax.stop_gradient(part) for name, part in params.items()
        }
    logits = nnx.merge(build(config), params).logits_ahead(tokens, depths, trunk_states=states)
    losses = []
    for depth in range(depths):
        targets, counted = tokens[:, depth + 2 :], mask[:, depth + 2 :].astype(jnp.float32)
        scored = logits[depth, :, : targets.shape[1]]
        chosen = jnp.take_along_axis(scored, targets[..., None], axis=-1)[..., 0]
        nats = jax.nn.logsumexp(scored, axis=-1) - chosen
        losses.append(jnp.sum(nats * counted) / jnp.maximum(jnp.sum(counted), 1))
    return jnp.stack(losses)


def mtp_loss(
    params: Params,
    tokens: jax.Array,
    mask: jax.Array,
    *,
    config: ModelConfig,
    depths: int | None = None,
    train_trunk: bool = False,
    states: jax.Array | None = None,
) -> jax.Array:
    """The mean of `mtp_losses`, a scalar to add to the trainer's own loss (DeepSeek-V3 weighs it by 0.1 to 0.3)."""
    return jnp.mean(
        mtp_losses(params, tokens, mask, config=config, depths=depths, train_trunk=train_trunk, states=states)
    )


def trunk_states(params: Params, tokens: jax.Array, *, config: ModelConfig) -> jax.Array:
    """What the heads read of the trunk, [B, T, E] of tokens int32[B, T], padded at the right; for use in jit."""
    return nnx.merge(build(config), params).whole_trunk_states(tokens)


def init_mtp_heads(model: AnyModel, mtp: MTPConfig | None = None, *, seed: int = 0) -> AnyModel:
    """The model with fresh heads, in its own dtype: a copy of `model` (a LoadedModel) that shares its weights.

    mtp: how many and in which form, by default one of DeepSeek's. Heads start near what the trunk knows: the block
    is a copy of its last layer, the output norm of its final norm, and the projection passes state and embedding
    on in equal parts, with a little noise. Raises ConfigError if the model has heads already.
    """
    mtp = MTPConfig() if mtp is None else mtp
    if model.config.mtp is not None:
        raise ConfigError(f"the model already has {model.config.mtp.num_heads} multi-token-prediction heads")
    if mtp.num_heads < 1:
        raise ConfigError(f"expected at least one head, got {mtp.num_heads}")
    config = dataclasses.replace(model.config, mtp=mtp)
    size, last, scale = (
        config.hidden_size,
        model.params["layers"][config.num_layers - 1],
        model.params["norm"],
    )
    dtype = scale["scale"].dtype
    generator = np.random.default_rng(seed)

    def head() -> Params:
        noise = generator.standard_normal((2 * size, size), np.float32) * np.float32(
            0.02 * (2 * size) ** -0.5
        )
        halves = np.concatenate([np.eye(size, dtype=np.float32)] * 2) * np.float32(0.5)
        return {
            "embedding_norm": {"scale": jnp.ones((size,), dtype)},
            "hidden_norm": {"scale": jnp.ones((size,), dtype)},
            "projection": {"kernel": jnp.asarray(halves + noise, dtype)},
            "block": jax.tree.map(jnp.copy, last),
            "output_norm": jax.tree.map(jnp.copy, scale),
        }

    heads = {number: head() for number in range(mtp.num_heads)}
    added: dict[str, Any] = {"config": config, "params": {**model.params, "mtp": {"heads": heads}}}
    return dataclasses.replace(model, **added)  # type: ignore[type-var]

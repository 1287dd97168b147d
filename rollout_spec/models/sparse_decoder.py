"""The decoder with experts on some layers, and attention over latents if the model has them."""

from __future__ import annotations

from flax import nnx

from rollout_spec.models.config import ModelConfig
from rollout_spec.models.decoder import DecoderModel
from rollout_spec.models.experts import SparseMLP
from rollout_spec.models.latent_attention import LatentAttention
from rollout_spec.models.layers import DecoderLayer


class SparseDecoderLayer(DecoderLayer):
    """A residual block whose parts follow `config.experts` and `config.latent`."""

    def new_attention(self, config: ModelConfig, layer: int) -> nnx.Module:
        if config.latent is None:
            return super().new_attention(config, layer)
        return LatentAttention(config, config.latent)

    def new_mlp(self, config: ModelConfig, layer: int) -> nnx.Module:
        if config.experts is None or layer not in config.experts.layers:
            return super().new_mlp(config, layer)
        return SparseMLP(config, config.experts)


class SparseDecoderModel(DecoderModel):
    """A causal language model with experts."""

    def new_layer(self, config: ModelConfig, layer: int) -> DecoderLayer:
        return SparseDecoderLayer(config, layer)

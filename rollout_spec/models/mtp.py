"""Multi-token prediction (MTP): heads that look further ahead than the next token.

The trunk's state h of token i scores token i + 1. Head d (from 0) takes the state that was there before it
and the embedding of token i + d + 1, and scores token i + d + 2 (DeepSeek-V3 report,
https://arxiv.org/abs/2412.19437, equations 21 to 23):

    h_d[i] = block_d(projection_d(norm(embed(token[i + d + 1])) ++ norm(h_{d-1}[i])))
    logits_d[i] = unembed(output_norm_d(h_d[i]))

Embedding and unembedding are the trunk's, and the block is one of its layers. A head's rotary position is that of
i. Drafting deeper than there are heads applies them in turn again. How the families differ, from vLLM's code of
their models (deepseek_mtp.py, mimo_mtp.py, qwen3_next_mtp.py), is in `FORMS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from rollout_spec.models.config import ModelConfig, MTPConfig, MTPForm
from rollout_spec.models.layers import Attend, DecoderLayer, Linear, RotaryTable, hidden_norm

NewLayer = Callable[[ModelConfig, int], DecoderLayer]


@dataclasses.dataclass(frozen=True)
class Form:
    """What one family's heads do their own way, and how its checkpoints and config.json name them."""

    config_key: str
    """Key of config.json with the number of heads."""
    reads_normed: bool
    """The first head takes the trunk's state after the final norm rather than before it."""
    passes_normed: bool
    """The next head takes a head's state after the output norm rather than before it."""
    embedding_first: bool
    """The projection takes (embedding, state) rather than (state, embedding)."""
    names: Mapping[str, str]
    """Name of each part in checkpoints. {head} is its number, {layer} that number plus the trunk's layers."""
    most_heads: int | None = None


FORMS: dict[MTPForm, Form] = {
    "deepseek": Form(
        config_key="num_nextn_predict_layers",
        reads_normed=True,
        passes_normed=False,
        embedding_first=True,
        names={
            "embedding_norm": "model.layers.{layer}.enorm",
            "hidden_norm": "model.layers.{layer}.hnorm",
            "projection": "model.layers.{layer}.eh_proj",
            "block": "model.layers.{layer}",
            "output_norm": "model.layers.{layer}.shared_head.norm",
        },
    ),
    "mimo": Form(
        config_key="num_nextn_predict_layers",
        reads_normed=False,
        passes_normed=True,
        embedding_first=False,
        names={
            "embedding_norm": "model.mtp_layers.{head}.token_layernorm",
            "hidden_norm": "model.mtp_layers.{head}.hidden_layernorm",
            "projection": "model.mtp_layers.{head}.input_proj",
            "block": "model.mtp_layers.{head}",
            "output_norm": "model.mtp_layers.{head}.final_layernorm",
        },
    ),
    "qwen3_next": Form(
        config_key="mtp_num_hidden_layers",
        reads_normed=True,
        passes_normed=True,
        embedding_first=True,
        names={
            "embedding_norm": "mtp.pre_fc_norm_embedding",
            "hidden_norm": "mtp.pre_fc_norm_hidden",
            "projection": "mtp.fc",
            "block": "mtp.layers.{head}",
            "output_norm": "mtp.norm",
        },
        most_heads=1,  # all but the block has no number, so a second head would share it
    ),
}


class MultiTokenHead(nnx.Module):
    """One head; its submodules are the keys of `Form.names`."""

    def __init__(self, config: ModelConfig, new_layer: NewLayer) -> None:
        self.embedding_norm = hidden_norm(config)
        self.hidden_norm = hidden_norm(config)
        self.projection = Linear(2 * config.hidden_size, config.hidden_size)
        self.block = new_layer(config, config.num_layers - 1)
        self.output_norm = hidden_norm(config)


class MultiTokenPredictor(nnx.Module):
    """A model's heads, whose blocks are like the trunk's last layer."""

    def __init__(self, config: ModelConfig, new_layer: NewLayer) -> None:
        assert config.mtp is not None
        self.form = FORMS[config.mtp.form]
        self.trunk_layers = config.num_layers
        self.heads = nnx.List([MultiTokenHead(config, new_layer) for _ in range(config.mtp.num_heads)])

    def predict(
        self, depth: int, embeddings: jax.Array, hidden: jax.Array, table: RotaryTable, attend: Attend
    ) -> tuple[jax.Array, jax.Array]:
        """One depth of looking ahead, from 0; head `depth` modulo their number does it.

        embeddings [T, E] of the tokens depth + 1 places on; hidden [T, E] that the depth before passed on (the
        trunk's for depth 0, see `DecoderModel.mtp_input`). `attend` gets the head's number plus the trunk's
        layers as its layer. Returns what the next depth takes [T, E] and what is unembedded [T, E].
        """
        number = depth % len(self.heads)
        head = self.heads[number]
        parts = (head.embedding_norm(embeddings), head.hidden_norm(hidden))
        joined = jnp.concatenate(parts if self.form.embedding_first else parts[::-1], axis=-1)
        state = head.block(head.projection(joined), table, self.trunk_layers + number, attend)
        normed = head.output_norm(state)
        return (normed if self.form.passes_normed else state), normed


def huggingface_module(config: ModelConfig, path: tuple[str | int, ...]) -> str:
    """Name in checkpoints of a module below ("mtp", "heads", number, part, ...)."""
    assert config.mtp is not None
    _, _, number, part, *below = path
    assert isinstance(number, int)
    name = FORMS[config.mtp.form].names[str(part)]
    start = name.format(head=number, layer=config.num_layers + number)
    return ".".join([start, *map(str, below)])


def is_shared_copy(config: ModelConfig, name: str) -> bool:
    """Whether a weight is a head's own copy of the trunk's embedding or output head, as DeepSeek's files have."""
    if config.mtp is None or config.mtp.form != "deepseek":
        return False
    layers = range(config.num_layers, config.num_layers + config.mtp.num_heads)
    parts = ("embed_tokens", "shared_head.head")
    return any(name == f"model.layers.{layer}.{part}.weight" for layer in layers for part in parts)


def read_config(raw: Mapping[str, Any], faults: list[str], form: MTPForm | None = None) -> MTPConfig | None:
    """The heads that a config.json promises; what isn't supported is appended to `faults`.

    form: that of the family; None means DeepSeek's or Qwen3-Next's, by the key that is there.
    """
    candidates: tuple[MTPForm, ...] = ("deepseek", "qwen3_next") if form is None else (form,)
    named = [one for one in candidates if raw.get(FORMS[one].config_key)]
    if not named:
        return None
    if len(named) > 1:
        keys = " and ".join(FORMS[one].config_key for one in named)
        faults.append(f"{keys} are both set: they name heads of two different forms")
        return None
    found = FORMS[named[0]]
    count = raw[found.config_key]
    if not isinstance(count, int) or count < 0:
        faults.append(f"{found.config_key}={count!r}: expected a number of heads")
        return None
    if found.most_heads is not None and count > found.most_heads:
        faults.append(
            f"{found.config_key}={count}: at most {found.most_heads} head of this form is supported"
        )
        return None
    return MTPConfig(named[0], count)

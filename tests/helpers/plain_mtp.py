"""Multi-token-prediction heads in numpy float64, from the published equations and the checkpoints' own names.

DeepSeek-V3 report, equations 21 to 23; what MiMo and Qwen3-Next do otherwise is from their public code.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.helpers.plain_model import Float64Array, PlainModel


class PlainHeads:
    """The heads of one model, in the form its config names."""

    def __init__(self, plain: PlainModel) -> None:
        self.plain = plain
        assert plain.config.mtp is not None
        self.form, self.count = plain.config.mtp.form, plain.config.mtp.num_heads

    def logits_ahead(self, token_ids: Sequence[int], depths: int) -> list[Float64Array]:
        """For each depth d the logits float64[T - d - 1, V] of tokens d + 2, d + 3, ..."""
        plain = self.plain
        trunk = plain._trunk(token_ids)
        hidden = trunk if self.form == "mimo" else plain._norm(trunk, "model.norm")
        embeddings = plain._embed(token_ids)
        all_logits = []
        for depth in range(depths):
            hidden, embeddings = hidden[: len(token_ids) - depth - 1], embeddings[1:]
            names = self._names(depth % self.count)
            e, h = plain._norm(embeddings, names["e"]), plain._norm(hidden, names["h"])
            joined = [h, e] if self.form == "mimo" else [e, h]
            x = plain._linear(np.concatenate(joined, axis=-1), names["projection"])
            x = plain._block(x, plain.config.num_layers - 1, names["block"])
            normed = plain._norm(x, names["output"])
            all_logits.append(plain._unembed(normed))
            hidden = x if self.form == "deepseek" else normed
        return all_logits

    def _names(self, head: int) -> dict[str, str]:
        if self.form == "deepseek":
            layer = f"model.layers.{self.plain.config.num_layers + head}"
            return {
                "e": f"{layer}.enorm",
                "h": f"{layer}.hnorm",
                "projection": f"{layer}.eh_proj",
                "block": layer,
                "output": f"{layer}.shared_head.norm",
            }
        if self.form == "mimo":
            layer = f"model.mtp_layers.{head}"
            return {
                "e": f"{layer}.token_layernorm",
                "h": f"{layer}.hidden_layernorm",
                "projection": f"{layer}.input_proj",
                "block": layer,
                "output": f"{layer}.final_layernorm",
            }
        return {
            "e": "mtp.pre_fc_norm_embedding",
            "h": "mtp.pre_fc_norm_hidden",
            "projection": "mtp.fc",
            "block": f"mtp.layers.{head}",
            "output": "mtp.norm",
        }

"""Tiny models with random multi-token-prediction heads, and drafters that watch what the heads name."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from rollout_spec.draft import DraftConfig
from rollout_spec.draft.drafter import TokenSequence
from rollout_spec.draft.heads import HeadDrafter
from rollout_spec.models import MTPConfig
from rollout_spec.models.config import MTPForm
from rollout_spec.tree import DraftTree
from tests.helpers.tiny_models import TinyModel, random_params, tiny_model

Named = tuple[NDArray[np.int32], NDArray[np.float32]]


@functools.cache
def model_with_heads(name: str, form: MTPForm, heads: int, seed: int = 0) -> TinyModel:
    """The trunk of `tiny_model(name)`, so that what is expected of it is expected here too."""
    trunk = tiny_model(name)
    config = dataclasses.replace(trunk.config, mtp=MTPConfig(form, heads))
    params = {**trunk.params, "mtp": random_params(config, seed)["mtp"]}
    return TinyModel(config, params, trunk.plain)


class WatchedHeads(HeadDrafter):
    """Notes what the heads named behind each text."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.named: dict[tuple[int, ...], Named] = {}
        self.texts: dict[Hashable, list[int]] = {}

    def start(self, request_id: Hashable, prompt: TokenSequence, group_id: Hashable = None) -> None:
        super().start(request_id, prompt, group_id)
        self.texts[request_id] = np.asarray(prompt).tolist()

    def extend(self, request_id: Hashable, tokens: TokenSequence) -> None:
        super().extend(request_id, tokens)
        self.texts[request_id] += np.asarray(tokens).tolist()

    def offer(self, request_id: Hashable, tokens: NDArray[np.int32], probs: NDArray[np.float32]) -> None:
        super().offer(request_id, tokens, probs)
        if len(tokens) == self.config.look_ahead:
            self.named[tuple(self.texts[request_id])] = (tokens.copy(), probs.copy())


class OracleHeads(WatchedHeads):
    """Proposes what will come, with a wrong leaf beside it now and then, whatever the heads named."""

    def __init__(self, config: DraftConfig, sequences: Sequence[Sequence[int]], vocab_size: int) -> None:
        super().__init__(config)
        self._sequences = [list(sequence) for sequence in sequences]
        self._vocab_size = vocab_size

    def propose(self, request_ids: Sequence[Hashable], budgets: Sequence[int]) -> list[DraftTree]:
        trees = []
        for name, budget in zip(request_ids, budgets, strict=True):
            text = self.texts[name]
            whole = next((one for one in self._sequences if one[: len(text)] == text), text)
            ahead = whole[len(text) : len(text) + budget]
            if len(text) % 3 == 0 and len(ahead) > 2:  # the second token is wrong, so only one is accepted
                ahead[1] = (ahead[1] + 1) % self._vocab_size
            trees.append(
                DraftTree.path(ahead, np.full(len(ahead), 0.9, np.float32) ** np.arange(1, len(ahead) + 1))
            )
        return trees

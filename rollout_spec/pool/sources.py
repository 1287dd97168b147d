"""What a pool makes its engines of."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..config import EngineConfig
from ..engine import RolloutEngine
from ..errors import ConfigError
from ..models import ModelConfig
from ..tokenizer import Tokenizer
from .weights import StoredWeights


@dataclass(frozen=True, eq=False)
class FromPath:
    """Every engine loads the model itself."""

    path: str
    config: EngineConfig
    dtype: Any

    def __call__(self) -> RolloutEngine:
        return RolloutEngine.from_pretrained(self.path, self.config, dtype=self.dtype)


@dataclass(frozen=True, eq=False)
class FromParams:
    """Every engine takes the params from the object store, where they are once."""

    model_config: ModelConfig
    params: StoredWeights
    tokenizer: Tokenizer | None
    config: EngineConfig

    def __call__(self) -> RolloutEngine:
        params = jax.tree.map(jnp.array, self.params())
        return RolloutEngine(self.model_config, params, tokenizer=self.tokenizer, config=self.config)


Model = str | os.PathLike[str] | tuple[ModelConfig, Any] | Callable[[], RolloutEngine]


def maker(
    model: Model, config: EngineConfig, *, tokenizer: Tokenizer | None, dtype: Any
) -> Callable[[], RolloutEngine]:
    """What builds an engine in an actor.

    model: a folder or file; (model_config, params); or a function without arguments that returns an engine.
    """
    if isinstance(model, str | os.PathLike):
        return FromPath(os.path.abspath(model), config, dtype)
    if isinstance(model, tuple) and len(model) == 2 and isinstance(model[0], ModelConfig):
        return FromParams(model[0], StoredWeights(model[1]), tokenizer, config)
    if callable(model):
        return model
    raise ConfigError(
        "model must be a path, a pair (model_config, params), or a function that returns an engine; "
        f"got {type(model).__name__}"
    )

"""Lossless speculative rollouts for LLM reinforcement learning, in JAX.

Names are imported when first used, so that `rollout_spec.draft` works without importing JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import RolloutError

if TYPE_CHECKING:
    from .config import EngineConfig as EngineConfig
    from .draft.config import DraftConfig as DraftConfig
    from .engine import RolloutEngine as RolloutEngine
    from .outputs import Completion as Completion
    from .outputs import DraftStats as DraftStats
    from .outputs import RolloutOutput as RolloutOutput
    from .pool.pool import RolloutPool as RolloutPool
    from .sampling import SamplingParams as SamplingParams
    from .weights.report import WeightUpdateReport as WeightUpdateReport

_HOMES = {
    "Completion": "outputs",
    "DraftConfig": "draft.config",
    "DraftStats": "outputs",
    "EngineConfig": "config",
    "RolloutEngine": "engine",
    "RolloutOutput": "outputs",
    "RolloutPool": "pool.pool",
    "SamplingParams": "sampling",
    "WeightUpdateReport": "weights.report",
}

__all__ = [*_HOMES, "RolloutError"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

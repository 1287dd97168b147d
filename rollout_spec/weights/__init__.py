"""Weights: names and layouts of checkpoints, the forms in which they come, and their checksum.

What needs more than names is imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rollout_spec.weights.names import expected_names, expected_shapes, from_hf, hf_name, is_ignored, to_hf

if TYPE_CHECKING:
    from rollout_spec.weights.adapters import Adapter as Adapter
    from rollout_spec.weights.checksums import checksum as checksum
    from rollout_spec.weights.orbax import OrbaxCheckpoint as OrbaxCheckpoint
    from rollout_spec.weights.report import TokenSpan as TokenSpan
    from rollout_spec.weights.report import WeightUpdateReport as WeightUpdateReport

_HOMES = {
    "Adapter": "adapters",
    "OrbaxCheckpoint": "orbax",
    "checksum": "checksums",
    "TokenSpan": "report",
    "WeightUpdateReport": "report",
}

__all__ = [*_HOMES, "expected_names", "expected_shapes", "from_hf", "hf_name", "is_ignored", "to_hf"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)

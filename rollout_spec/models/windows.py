"""Which layers of a checkpoint see a sliding window only, as config.json says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_KINDS = ("full_attention", "sliding_attention")


def windows_of_layer_types(
    layer_types: Sequence[str], sliding_window: Any, faults: list[str]
) -> tuple[int | None, ...]:
    """`ModelConfig.windows` of `layer_types` and `sliding_window`; faults name other kinds and missing widths."""
    unknown = sorted(set(layer_types) - set(_KINDS))
    if unknown:
        faults.append(f"layer_types has {', '.join(unknown)}: supported are {' and '.join(_KINDS)}")
    if "sliding_attention" not in layer_types:
        return ()
    if isinstance(sliding_window, bool) or not isinstance(sliding_window, int) or sliding_window < 1:
        faults.append(
            f"layer_types has sliding_attention, but sliding_window is {sliding_window!r}: needs a width"
        )
        return ()
    return tuple(sliding_window if kind == "sliding_attention" else None for kind in layer_types)


def qwen_windows(config: Mapping[str, Any], faults: list[str]) -> tuple[int | None, ...]:
    """Qwen2's and Qwen3's: on the layers from `max_window_layers` on, or by `layer_types`, if switched on at all."""
    sliding_window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = config.get("max_window_layers", 28)
        layers = range(config.get("num_hidden_layers") or 0)
        layer_types = [_KINDS[sliding_window is not None and layer >= first] for layer in layers]
    return windows_of_layer_types(layer_types, sliding_window, faults)

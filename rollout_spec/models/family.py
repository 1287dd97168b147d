"""What a model family tells the rest of the package about itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from rollout_spec.models.config import ModelConfig
from rollout_spec.models.decoder import DecoderModel


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture: its module and how its checkpoints differ from others'."""

    name: str
    """`ModelConfig.architecture`; `general.architecture` in GGUF files."""
    module: Callable[[ModelConfig], DecoderModel]
    huggingface_architectures: tuple[str, ...]
    """Class names that config.json may list under `architectures`."""
    huggingface_options: Callable[[Mapping[str, Any], list[str]], dict[str, Any]]
    """(config.json, faults) -> fields of ModelConfig that the family sets its own way.

    Appends to `faults` a sentence for each option that would change the results and isn't supported.
    """
    model_types: tuple[str, ...] = ()
    """What `model_type` in config.json may say beside the family's name."""
    rope_by_layer_type: bool = False
    """Whether config.json gives layers with a window rotary options of their own."""
    default_rope_theta: float = 10_000.0
    """Base of the rotary embedding where config.json names none."""
    options_read: frozenset[str] = frozenset()
    """Options of config.json that other families refuse, and this one's `huggingface_options` reads."""
    in_gguf: bool = False
    """Whether GGUF files of this architecture are read."""
    gguf_options: Callable[[Callable[..., Any], dict[str, Any], list[str]], dict[str, Any]] | None = None
    """(metadata value by key, fields read so far, faults) -> fields of ModelConfig set in the family's own way."""
    gguf_rotary_interleaved: bool = False
    """Whether GGUF files hold the rows of q and k with the two halves of a rotary pair side by side."""
    gguf_norm_offset: bool = False
    """Whether GGUF files hold 1 + scale in place of the scales of norms."""

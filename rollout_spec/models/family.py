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
    """`ModelConfig.architecture`; `model_type` in config.json; `general.architecture` in GGUF files."""
    module: Callable[[ModelConfig], DecoderModel]
    huggingface_architectures: tuple[str, ...]
    """Class names that config.json may list under `architectures`."""
    huggingface_options: Callable[[Mapping[str, Any], list[str]], dict[str, Any]]
    """(config.json, faults) -> fields of ModelConfig that the family sets its own way.

    Appends to `faults` a sentence for each option that would change the results and isn't supported.
    """
    gguf_rotary_interleaved: bool = False
    """Whether GGUF files hold the rows of q and k with the two halves of a rotary pair side by side."""

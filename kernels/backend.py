"""Which implementation of a kernel runs, and how a Pallas kernel runs where there is no TPU."""

from __future__ import annotations

from typing import Any

import jax

BACKENDS = ("auto", "pallas", "reference")


def resolve_backend(backend: str) -> str:
    """ "pallas" or "reference": "auto" is "pallas" for a TPU, and the XLA reference elsewhere."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}; got {backend!r}")
    if backend == "auto":
        return "pallas" if _platform() == "tpu" else "reference"
    return backend


def interpret_mode() -> Any:
    """What a Pallas kernel takes as `interpret`: TPU interpret mode where it is traced for a CPU, else False."""
    if _platform() != "cpu":
        return False
    from jax.experimental.pallas import tpu as pltpu  # takes a while to import, and few calls need it

    return pltpu.InterpretParams()


def device_kind() -> str:
    """Of the device that is traced for, in small letters, as in "tpu v4" and "cpu"."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    return (described or jax.devices()[0]).device_kind.lower()


def _platform() -> str:
    """What is traced for: the mesh in force may describe a TPU that isn't there, to compile for it."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        return described.device_kind.split()[0].lower()
    return jax.default_backend()

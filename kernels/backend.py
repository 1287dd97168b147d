"""Which implementation of a kernel runs, and how a Pallas kernel runs where there is no TPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

BACKENDS = ("auto", "pallas", "reference")


def resolve_backend(backend: str) -> str:
    """ "pallas" or "reference": "auto" is "pallas" where jax runs on a TPU, and the XLA reference elsewhere."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}; got {backend!r}")
    if backend == "auto":
        return "pallas" if jax.default_backend() == "tpu" else "reference"
    return backend


def compiled_or_interpreted(kernel: Callable[..., Any], *args: Any) -> Any:
    """`kernel(*args, interpret=...)`, compiled when lowered for a TPU, in Pallas's TPU interpret mode for a CPU."""
    from jax.experimental.pallas import tpu as pltpu  # takes a while to import, and few calls need it

    return lax.platform_dependent(
        *args,
        cpu=lambda *args: kernel(*args, interpret=pltpu.InterpretParams()),
        tpu=lambda *args: kernel(*args, interpret=False),
    )

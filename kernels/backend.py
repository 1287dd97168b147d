"""Which implementation of a kernel runs."""

from __future__ import annotations

BACKENDS = ("auto", "reference")


def resolve_backend(backend: str) -> str:
    """The implementation for `backend`. In this version every platform runs the XLA reference."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}; got {backend!r}")
    return "reference"

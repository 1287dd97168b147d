"""How the compiled functions are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any]) -> Any:
    """Numba machine code that releases the GIL, kept on disk between runs.

    Where neither the package's folder nor the user's cache folder can be written, it is compiled anew in each
    process instead.
    """
    # Sums may be reordered, so that they use vector instructions; nan and infinity keep their meaning.
    fastmath = {"reassoc", "contract", "nsz"}
    try:
        return njit(cache=True, nogil=True, error_model="numpy", fastmath=fastmath)(function)
    except RuntimeError:  # numba found no folder to keep the machine code in
        return njit(nogil=True, error_model="numpy", fastmath=fastmath)(function)

"""Pallas kernels on the CPU, in TPU interpret mode with its race detector."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu


@contextlib.contextmanager
def race_detection() -> Iterator[Callable[[], None]]:
    """Interprets with race detection what is called inside. Yields a check, to be called after every call of a kernel,
    that fails where two copies or accesses raced in it.

    Copies run as late as they may, so that reading what hasn't been waited for is seen; fresh memory holds NaN.
    """
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait")

    def check() -> None:
        races = interpret_pallas_call.races
        assert races is not None, "nothing was interpreted"
        assert not races.races_found
        interpret_pallas_call.races = None

    try:
        with pltpu.force_tpu_interpret_mode(params):
            yield check
    finally:
        pltpu.reset_tpu_interpret_mode_state()

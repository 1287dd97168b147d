"""Everything the compiled code works on, as a tuple of flat arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NODE = np.dtype(
    [
        ("token", "<i4"),
        ("parent", "<i4"),
        ("prob", "<f4"),  # of being reached and accepted
        ("mixed", "<f4"),  # the mixture's probability given the parent, before calibration
        ("grade", "<i4"),  # row of the calibration table
    ],
    align=True,
)

# Columns of a request's row.
GROUP, OWN_FIRST, OWN_ROWS, LENGTH, DRAFTED, FAMILIAR = range(6)
ROW_SIZE = 6


class State(NamedTuple):
    """The arrays of one drafter."""

    history: NDArray  # int64[max lines * LINE, 2]: pairs seen in outputs, everywhere and by group
    control: NDArray  # int64[CONTROL_SIZE]: the history's size, see counts.py
    ages: NDArray  # float32[TICKS]: what a sighting of each tick still counts
    weights: NDArray  # float32[BUCKETS, WEIGHTS]: of the mixture
    calibration: NDArray  # float32[GRADES, GRID + 1]
    texts: NDArray  # int32[rows, 5]: the requests' own texts, see own.py
    requests: (
        NDArray  # int64[R, ROW_SIZE]: group, place and length of the own text, size of the last draft, streak
    )
    drafts: NDArray  # NODE[R, 63]: each request's last draft, until it is known what was accepted

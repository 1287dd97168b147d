"""Room for the requests' own tables, in one array of lines."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .counts import LINE, SLOT

SMALLEST_LINES = 16


class PrivateTables:
    """Blocks of 2**k lines in one growing array; a freed block serves the next table of its size."""

    def __init__(self) -> None:
        self.slots: NDArray = np.zeros(1024 * LINE, SLOT)
        self._end = 0  # lines ever handed out
        self._free: dict[int, list[int]] = {}

    @property
    def memory_bytes(self) -> int:
        return int(self.slots.nbytes)

    def allocate(self, lines: int) -> int:
        """First line of an empty block of `lines` lines."""
        free = self._free.get(lines)
        if free:
            first = free.pop()
            # Emptied here and not when freed, so that ending a request costs nothing.
            self.slots[first * LINE : (first + lines) * LINE] = np.zeros((), SLOT)
            return first
        first, self._end = self._end, self._end + lines
        if self._end * LINE > len(self.slots):
            larger = np.zeros(max(2 * len(self.slots), self._end * LINE), SLOT)
            larger[: len(self.slots)] = self.slots
            self.slots = larger
        return first

    def free(self, first: int, lines: int) -> None:
        self._free.setdefault(lines, []).append(first)

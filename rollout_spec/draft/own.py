"""A request's own text, and where in it a context stood before.

No counts are kept: the text itself is searched. Each place is linked to the last place before it after the same
token, and to the last after the same NEAR tokens (as LZ77 compressors find matches), so that a context's earlier
places are found newest first. At most MATCHES of either chain are taken, so that a text of any length, or of one
token repeated, costs no more.

The text of a request is a block of one int32 array [rows, 5]. Row i of a block holds the text's token i, the links
of place i, and an entry of each of two hash tables that name the chains' newest places. A place is the number of
tokens before it, so place p is followed by token p; 0 ends a chain, for nothing stands before it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .compiled import compiled
from .config import LONGEST_MATCH
from .state import LENGTH, OWN_FIRST, OWN_ROWS

TOKEN, AFTER_NEAR, AFTER_LAST, NEAR_HEAD, LAST_HEAD = range(5)
COLUMNS = 5
SMALLEST_ROWS = 64
KEPT_ROWS = 1 << 18
"""A larger array is given back when no request runs."""
NEAR = 3
MATCHES = 32
_STEPS = 2 * MATCHES
"""Places looked at, foreign ones that share a table's entry included."""

_MULTIPLIER = 0x2545F491
_MASK = (1 << 32) - 1


@compiled
def near_entry(last: int, second: int, third: int, rows: int) -> int:
    """Entry of the table for the last NEAR tokens."""
    bits = ((last * _MULTIPLIER & _MASK) ^ second) * _MULTIPLIER & _MASK
    bits = (bits ^ third) * _MULTIPLIER & _MASK
    return (bits ^ bits >> 15) & (rows - 1)


@compiled
def last_entry(last: int, rows: int) -> int:
    bits = last * _MULTIPLIER & _MASK
    return (bits ^ bits >> 15) & (rows - 1)


@compiled
def link(texts: NDArray, first: int, rows: int, place: int) -> None:
    """Puts a place, whose following token is known, at the head of its chains."""
    at = first + place
    last = texts[at - 1, TOKEN]
    head = first + last_entry(last, rows)
    texts[at, AFTER_LAST] = texts[head, LAST_HEAD]
    texts[head, LAST_HEAD] = place
    if place >= NEAR:
        head = first + near_entry(last, texts[at - 2, TOKEN], texts[at - 3, TOKEN], rows)
        texts[at, AFTER_NEAR] = texts[head, NEAR_HEAD]
        texts[head, NEAR_HEAD] = place


@compiled
def append(texts: NDArray, row: NDArray, token: int) -> None:
    """Adds a token to a request's text, for which its block has room."""
    first, length = row[OWN_FIRST], row[LENGTH]
    texts[first + length, TOKEN] = token
    if length > 0:
        link(texts, first, row[OWN_ROWS], length)
    row[LENGTH] = length + 1


@compiled
def repeats(texts: NDArray, row: NDArray, token: int) -> bool:
    """Whether the text's last NEAR tokens stood in it before, and `token` followed the last time."""
    first, length = row[OWN_FIRST], row[LENGTH]
    if length <= NEAR:
        return False
    end = first + length
    entry = near_entry(texts[end - 1, TOKEN], texts[end - 2, TOKEN], texts[end - 3, TOKEN], row[OWN_ROWS])
    place = texts[first + entry, NEAR_HEAD]
    if place < NEAR or texts[first + place, TOKEN] != token:
        return False
    same = 0
    while same < NEAR and texts[first + place - 1 - same, TOKEN] == texts[end - 1 - same, TOKEN]:
        same += 1
    return same == NEAR


@compiled
def move_text(texts: NDArray, row: NDArray, first: int, rows: int) -> None:
    """Moves a request's text to an empty, larger block."""
    old = row[OWN_FIRST]
    for i in range(row[LENGTH]):
        texts[first + i, TOKEN] = texts[old + i, TOKEN]
        if i > 0:
            link(texts, first, rows, i)
    row[OWN_FIRST], row[OWN_ROWS] = first, rows


@compiled
def common_tokens(texts: NDArray, first: int, place: int, context: NDArray, length: int) -> int:
    """How many tokens before a place equal the last of context[:LONGEST_MATCH] (newest last, `length` of them)."""
    most = min(place, length)
    at = first + place - 1
    same = 0
    while same < most and texts[at - same, TOKEN] == context[LONGEST_MATCH - 1 - same]:
        same += 1
    return same


@compiled
def find(
    texts: NDArray, row: NDArray, context: NDArray, length: int, followers: NDArray, matched: NDArray
) -> int:
    """Fills followers and matched, int64[2 * MATCHES], with what followed the places where the context stood.

    Returns how many there are: the newest MATCHES that match NEAR tokens or more, then those of the newest that
    match fewer.
    """
    first, rows = row[OWN_FIRST], row[OWN_ROWS]
    found = 0
    last = context[LONGEST_MATCH - 1]
    if length >= NEAR:
        entry = near_entry(last, context[LONGEST_MATCH - 2], context[LONGEST_MATCH - 3], rows)
        place = texts[first + entry, NEAR_HEAD]
        steps = 0
        while place > 0 and steps < _STEPS and found < MATCHES:
            same = common_tokens(texts, first, place, context, length)
            if same >= NEAR:
                followers[found], matched[found] = texts[first + place, TOKEN], same
                found += 1
            place = texts[first + place, AFTER_NEAR]
            steps += 1
    near = found
    place = texts[first + last_entry(last, rows), LAST_HEAD]
    steps = 0
    while place > 0 and steps < _STEPS and found < near + MATCHES:
        same = common_tokens(texts, first, place, context, min(length, NEAR))
        if 0 < same < NEAR:
            followers[found], matched[found] = texts[first + place, TOKEN], same
            found += 1
        place = texts[first + place, AFTER_LAST]
        steps += 1
    return found


class OwnTexts:
    """Blocks of 2**k rows in one growing array; a freed block serves the next text of its size."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.rows: NDArray[np.int32] = np.zeros((SMALLEST_ROWS, COLUMNS), np.int32)
        self._end = 0  # rows ever handed out
        self._free: dict[int, list[int]] = {}
        self._blocks = 0  # in use

    @property
    def memory_bytes(self) -> int:
        return int(self.rows.nbytes)

    def allocate(self, rows: int) -> int:
        """First row of an empty block."""
        self._blocks += 1
        free = self._free.get(rows)
        if free:
            first = free.pop()
            # Emptied here and not when freed, so that ending a request costs nothing.
            self.rows[first : first + rows] = 0
            return first
        first, self._end = self._end, self._end + rows
        if self._end > len(self.rows):
            larger = np.zeros((max(2 * len(self.rows), self._end), COLUMNS), np.int32)
            larger[: len(self.rows)] = self.rows
            self.rows = larger
        return first

    def free(self, first: int, rows: int) -> None:
        """Takes a block back."""
        self._blocks -= 1
        self._free.setdefault(rows, []).append(first)
        if self._blocks == 0 and len(self.rows) > KEPT_ROWS:
            self._clear()

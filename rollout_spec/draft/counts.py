"""The counts: a hash table of (context, next token) pairs in one flat array.

A slot is 16 bytes, two int64 words, and holds one pair:

    word 0 = context's hash (47 bits) << 16 | tick (16 bits): when the pair was last seen
    word 1 = token (31 bits) << 32 | count (16 bits) << 16 | group (16 bits): the only one that saw it, or SHARED

Four slots are a line (64 bytes, a cache line). A pair lies in one of two lines, which its context's hash names; so
the followers of a context are found by reading two lines. A context with more than FOLLOWERS followers goes on to
the next level: two more lines, named by a changed hash.

When both lines are full, a pair of them moves to its other line if there is room, and else the pair of them that
is worth least is forgotten: the least seen, and the longest ago. Forgetting thus costs no more than learning, and
happens a pair at a time.

Evidence by group costs no second copy: a pair that one group alone saw carries that group's number. When another
group sees it too, it is marked SHARED, and each group gets a pair of its own under a hash salted with its number.

The table grows a line at a time, by linear hashing (Litwin, 1980): while a table of 2**k lines doubles, its lines
0, 1, ... are split in order, each into itself and the one 2**k above, which takes the pairs that have one more bit
of their hash set. So growing is a part of learning too, and the table is never much larger than what it holds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .compiled import compiled, prefetch

SLOT_BYTES = 16
LINE = 4
"""Slots in a line."""
ONE = 64
"""What one sighting adds to a slot's count."""
COUNT_LIMIT = 65_000
"""Above it all counts of a context are halved."""
SHARED = 0
"""Group of a pair that several groups saw."""
FOLLOWERS = 4
"""Most slots that one context takes of its two lines; the rest of its followers go to the next level's lines."""
LEVELS = 12
"""Times it can go on, so that a context keeps at most LEVELS * FOLLOWERS followers."""
FULL_PERCENT = 78
"""Share of the slots in use at which the table grows."""
SPLITS_OWED = 8
"""Lines split for each pair that is forgotten while the table could still grow: its lines filled by chance."""
HALVING = 4
"""The worth of an unused pair halves every 2**HALVING ticks."""
TICKS = 1 << 12
"""Ticks are counted modulo this."""
OLDEST = TICKS // 2
"""Pairs seen longer ago, in ticks, are taken for so old."""
SWEEP = TICKS // 4
"""The whole table is looked through for them in so many ticks."""

# Entries of the control array, int64[CONTROL_SIZE]. MASK is 2**k - 1 for the power of two at or above LINES.
LINES, MASK, MAX_LINES, USED, TICK, TOKENS, TOKENS_PER_TICK, TOKENS_AT_TICK, SWEPT, OWED = range(10)
CONTROL_SIZE = 16

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_SECOND = 0x5851F42D4C957F2D
_LEVEL_STEP = 0x1E3779B97F4B
_KEY_MASK = (1 << 47) - 1
_SHIFT_32 = np.uint64(32)
_SHIFT_29 = np.uint64(29)
_SHIFT_17 = np.uint64(17)
_16_BITS = 0xFFFF
_1_TICK = 1 << 16  # words 0 that differ by less have the same hash


@compiled
def extend_hash(running: np.uint64, token: int) -> np.uint64:
    """The running hash of a context with one earlier token put before it; uint64."""
    return (running ^ np.uint64(token + 1)) * _MULTIPLIER + (running >> _SHIFT_29)


@compiled
def mixed(x: np.uint64) -> Any:
    """47 well-mixed bits, as a positive int64."""
    x = (x ^ (x >> _SHIFT_32)) * _MIX
    x = (x ^ (x >> _SHIFT_32)) * _MIX
    return max(np.int64(1), np.int64(x >> _SHIFT_17))


@compiled
def key_of_context(running: np.uint64) -> int:
    """The hash under which a context's pairs are kept; running is the context's running hash."""
    return mixed(running)


@compiled
def key_in_group(key: int, group: int) -> int:
    """The hash under which a group's own pairs of a context are kept, those that are shared."""
    return mixed(np.uint64(key) * _MULTIPLIER + np.uint64(group))


@compiled
def next_level(key: int) -> int:
    return max(1, (key + _LEVEL_STEP) & _KEY_MASK)


@compiled
def home(bits: int, lines: int, mask: int) -> int:
    """A line for some bits of hash."""
    line = bits & mask
    if line >= lines:  # not split yet
        line &= mask >> 1
    return line


@compiled
def homes(key: int, lines: int, mask: int) -> tuple[int, int]:
    """The two lines a context's pairs may lie in."""
    return home(key, lines, mask), home((key * _SECOND) >> 24, lines, mask)


@compiled
def prefetch_lines(slots: NDArray, key: int, lines: int, mask: int) -> None:
    line_a, line_b = homes(key, lines, mask)
    prefetch(slots, line_a * LINE)
    prefetch(slots, line_b * LINE)


@compiled
def seat(slots: NDArray, line_a: int, line_b: int, key: int, token: int, tick: int) -> tuple[int, int, int]:
    """Where the pair (key, token) is or should go in two lines.

    Returns (slot, kind, same). kind: 0 it is there, 1 the slot is free, 2 the slot holds a pair to forget, 3 the
    context has its share of the lines already and the slot holds the least of them. same: how many pairs of the
    context the lines hold, as far as was looked.
    """
    wanted = key << 16
    same, free, most_free = 0, -1, 0
    for side in range(2):
        start = (line_a if side == 0 else line_b) * LINE
        free_here, first = 0, -1
        for i in range(start, start + LINE):
            word = slots[i, 0]
            if (word ^ wanted) < _1_TICK:
                if slots[i, 1] >> 32 == token:
                    return i, 0, same + 1
                same += 1
            elif word == 0:
                free_here += 1
                if first < 0:
                    first = i
        if free_here > most_free:  # the emptier line
            most_free, free = free_here, first
        if line_a == line_b:
            break
    if same >= FOLLOWERS:
        return least_worth(slots, line_a, line_b, key, True, tick), 3, same
    if free >= 0:
        return free, 1, same
    return least_worth(slots, line_a, line_b, key, False, tick), 2, same


@compiled
def least_worth(slots: NDArray, line_a: int, line_b: int, key: int, same: bool, tick: int) -> int:
    """Slot of the pair in two lines, of one context or of any, that was seen least and longest ago."""
    weakest, weakest_worth = 0, 1 << 62
    for side in range(2):
        start = (line_a if side == 0 else line_b) * LINE
        for i in range(start, start + LINE):
            word = slots[i, 0]
            if word == 0 or (same and word >> 16 != key):
                continue
            age = (tick - word) & (TICKS - 1)
            count = (slots[i, 1] >> 16) & _16_BITS
            halvings = age >> HALVING
            worth = (count << 32 >> (halvings if halvings < 40 else 40)) - age
            if worth < weakest_worth:
                weakest, weakest_worth = i, worth
    return weakest


@compiled
def move(slots: NDArray, i: int, j: int) -> None:
    """Moves the pair in slot i to the free slot j."""
    slots[j, 0], slots[j, 1] = slots[i, 0], slots[i, 1]
    slots[i, 0] = slots[i, 1] = 0


@compiled
def swap(slots: NDArray, i: int, j: int) -> None:
    """Exchanges two pairs of a context that lie in lines of different levels."""
    tick_i, tick_j = slots[i, 0] & _16_BITS, slots[j, 0] & _16_BITS
    slots[i, 0] += tick_j - tick_i
    slots[j, 0] += tick_i - tick_j
    slots[i, 1], slots[j, 1] = slots[j, 1], slots[i, 1]


@compiled
def free_slot_of_other_line(slots: NDArray, i: int, lines: int, mask: int) -> tuple[int, int]:
    """The other line that the pair in slot i may lie in, and a free slot of it or -1."""
    line_a, line_b = homes(slots[i, 0] >> 16, lines, mask)
    other = line_b if line_a == i // LINE else line_a
    for j in range(other * LINE, other * LINE + LINE):
        if slots[j, 0] == 0:
            return other, j
    return other, -1


@compiled
def make_room(slots: NDArray, line_a: int, line_b: int, lines: int, mask: int) -> int:
    """Frees a slot of two full lines by moving one pair, or two, to their other lines; returns it, or -1."""
    for side in range(2):
        start = (line_a if side == 0 else line_b) * LINE
        for i in range(start, start + LINE):
            prefetch_lines(slots, slots[i, 0] >> 16, lines, mask)
    for side in range(2):
        start = (line_a if side == 0 else line_b) * LINE
        for i in range(start, start + LINE):
            _, j = free_slot_of_other_line(slots, i, lines, mask)
            if j >= 0:
                move(slots, i, j)
                return i
    for side in range(2):
        start = (line_a if side == 0 else line_b) * LINE
        for i in range(start, start + LINE):
            other, _ = free_slot_of_other_line(slots, i, lines, mask)
            if other in (line_a, line_b):
                continue
            for j in range(other * LINE, other * LINE + LINE):
                _, k = free_slot_of_other_line(slots, j, lines, mask)
                if k >= 0:
                    move(slots, j, k)
                    move(slots, i, j)
                    return i
    return -1


@compiled
def find_pair(slots: NDArray, key: int, token: int, lines: int, mask: int) -> int:
    """The slot of a pair in its context's two lines, or -1."""
    line_a, line_b = homes(key, lines, mask)
    for side in range(2):
        start = (line_a if side == 0 else line_b) * LINE
        for i in range(start, start + LINE):
            if (slots[i, 0] ^ key << 16) < _1_TICK and slots[i, 1] >> 32 == token:
                return i
    return -1


@compiled
def seat_in_table(slots: NDArray, control: NDArray, key: int, token: int) -> tuple[int, int, int, bool]:
    """`seat` through the levels of a context, after making room; returns (slot, kind, key of the level, known).

    A pair that was seen more often than the least of the level before changes places with it, so that the first levels
    hold what follows most often.
    """
    lines, mask, tick = control[LINES], control[MASK], control[TICK]
    i, kind, known = 0, 0, False
    before, before_a, before_b = 0, 0, 0
    for level in range(LEVELS):
        line_a, line_b = homes(key, lines, mask)
        i, kind, same = seat(slots, line_a, line_b, key, token, tick)
        known |= same > 0
        if kind == 2:
            room = make_room(slots, line_a, line_b, lines, mask)
            if room >= 0:
                i, kind = room, 1
        if kind == 0 and level > 0:
            j = least_worth(slots, before_a, before_b, before, True, tick)
            if (slots[j, 1] >> 16) & _16_BITS < (slots[i, 1] >> 16) & _16_BITS:
                swap(slots, i, j)
                return j, kind, before, known
        if kind in (1, 2) and same == FOLLOWERS - 1 and level < LEVELS - 1:
            # One of four may have been forgotten since, and the token be on the next level.
            j = find_pair(slots, next_level(key), token, lines, mask)
            if j >= 0 and j != i:
                if kind == 2:
                    control[USED] -= 1
                slots[i, 0] = key << 16 | (slots[j, 0] & _16_BITS)
                slots[i, 1] = slots[j, 1]
                slots[j, 0] = slots[j, 1] = 0
                return i, 0, key, True
        if kind != 3 or level == LEVELS - 1:
            break
        before, before_a, before_b = key, line_a, line_b
        key = next_level(key)
    return i, kind, key, known


@compiled
def scaled(units: int, factor: float) -> Any:
    return np.int64(units * factor + np.float32(0.5))


@compiled
def add(
    slots: NDArray,
    control: NDArray,
    ages: NDArray,
    i: int,
    kind: int,
    key: int,
    token: int,
    units: int,
    tick: int,
    group: int,
) -> int:
    """Adds units, last seen at tick, to the pair that `seat` placed; returns its count."""
    if kind == 0:
        held_tick = slots[i, 0] & (TICKS - 1)
        held = (slots[i, 1] >> 16) & _16_BITS
        if held_tick != tick:  # both count as of the newer one
            if (control[TICK] - held_tick) & (TICKS - 1) > (control[TICK] - tick) & (TICKS - 1):
                held = scaled(held, ages[held_tick] / ages[tick])
            else:
                units = scaled(units, ages[tick] / ages[held_tick])
                tick = held_tick
        units = min(_16_BITS, units + held)
    elif kind == 1:
        control[USED] += 1
    elif kind == 2:
        control[OWED] += SPLITS_OWED
    slots[i, 0] = key << 16 | tick
    slots[i, 1] = token << 32 | units << 16 | group
    return units


@compiled
def halve(slots: NDArray, lines: int, mask: int, key: int) -> None:
    """Halves the counts of a context, which keeps their proportions."""
    for _ in range(LEVELS):
        line_a, line_b = homes(key, lines, mask)
        for side in range(2):
            start = (line_a if side == 0 else line_b) * LINE
            for i in range(start, start + LINE):
                if slots[i, 0] >> 16 == key:
                    word = slots[i, 1]
                    count = (((word >> 16) & _16_BITS) + 1) >> 1
                    slots[i, 1] = (word >> 32) << 32 | count << 16 | (word & _16_BITS)
            if line_a == line_b:
                break
        key = next_level(key)


@compiled
def see_pair(
    slots: NDArray, control: NDArray, ages: NDArray, first: int, token: int, units: int, tick: int, group: int
) -> None:
    """Counts units of a pair that nobody else sees."""
    i, kind, key, _ = seat_in_table(slots, control, first, token)
    if add(slots, control, ages, i, kind, key, token, units, tick, group) > COUNT_LIMIT:
        halve(slots, control[LINES], control[MASK], first)


@compiled
def see(
    slots: NDArray,
    control: NDArray,
    ages: NDArray,
    first: int,
    token: int,
    units: int,
    tick: int,
    group: int,
    by_group: bool,
) -> bool:
    """Counts sightings, by `group`, of `token` after the context with key `first`; by_group: for the group too.

    Returns whether anything had been seen after the context before.
    """
    i, kind, key, known = seat_in_table(slots, control, first, token)
    owner = slots[i, 1] & _16_BITS
    if kind == 0 and owner != group:
        if by_group:
            if (
                owner != SHARED
            ):  # a second group: what was the first one's alone gets a pair under its own key
                count = (slots[i, 1] >> 16) & _16_BITS
                then = slots[i, 0] & (TICKS - 1)
                slots[i, 1] ^= owner  # SHARED is 0
                see_pair(slots, control, ages, key_in_group(first, owner), token, count, then, owner)
            if group != SHARED:
                see_pair(slots, control, ages, key_in_group(first, group), token, units, tick, group)
            if (slots[i, 0] ^ key << 16) >= _1_TICK or slots[i, 1] >> 32 != token:  # the above took its slot
                i, kind, key, _ = seat_in_table(slots, control, first, token)
        group = SHARED
    if add(slots, control, ages, i, kind, key, token, units, tick, group) > COUNT_LIMIT:
        halve(slots, control[LINES], control[MASK], first)
    return known


@compiled
def grow(slots: NDArray, control: NDArray) -> None:
    """Splits lines until the table is no fuller than FULL_PERCENT and none is owed, or it has its largest size."""
    while control[LINES] < control[MAX_LINES] and (
        control[OWED] > 0 or control[USED] * 100 > FULL_PERCENT * LINE * control[LINES]
    ):
        control[OWED] = max(0, control[OWED] - 1)
        new = control[LINES]
        if new > control[MASK]:
            control[MASK] = 2 * control[MASK] + 1
        old = new & (control[MASK] >> 1)
        control[LINES] = new + 1
        for i in range(LINE):
            at = old * LINE + i
            if slots[at, 0] != 0:
                line_a, line_b = homes(slots[at, 0] >> 16, control[LINES], control[MASK])
                if line_a != old and line_b != old:
                    move(slots, at, new * LINE + i)


@compiled
def advance_tick(slots: NDArray, control: NDArray, ages: NDArray) -> None:
    """Begins a new tick, and sees to it that no pair's tick comes round again."""
    control[TOKENS_AT_TICK] = control[TOKENS]
    tick = (control[TICK] + 1) & (TICKS - 1)
    control[TICK] = tick
    ages[tick] = 1
    for _ in range(control[LINES] // SWEEP + 1):
        line = control[SWEPT] if control[SWEPT] < control[LINES] else 0
        control[SWEPT] = line + 1
        for i in range(line * LINE, line * LINE + LINE):
            age = (tick - slots[i, 0]) & (TICKS - 1)
            if slots[i, 0] != 0 and age > OLDEST:
                slots[i, 0] = (slots[i, 0] >> 16) << 16 | ((tick - OLDEST) & (TICKS - 1))


@compiled
def has_context(slots: NDArray, key: int, lines: int, mask: int) -> bool:
    line_a, line_b = homes(key, lines, mask)
    for side in range(2):
        start = (line_a if side == 0 else line_b) * LINE
        for i in range(start, start + LINE):
            if slots[i, 0] >> 16 == key:
                return True
    return False


@compiled
def insert_all(
    slots: NDArray,
    control: NDArray,
    ages: NDArray,
    theirs: NDArray,
    their_control: NDArray,
    their_ages: NDArray,
) -> None:
    """Counts all pairs of another table, int64[N, 2], as if seen as long ago as there. Theirs is halved on the way."""
    lines, mask = their_control[LINES], their_control[MASK]
    for n in range(len(theirs)):
        if theirs[n, 0] == 0:
            continue
        first = theirs[n, 0] >> 16
        for _ in range(LEVELS - 1):  # back from a deeper level to the context's own key
            before = (first - _LEVEL_STEP) & _KEY_MASK
            if not has_context(theirs, before, lines, mask):
                break
            first = before
        token, group = theirs[n, 1] >> 32, theirs[n, 1] & _16_BITS
        then = theirs[n, 0] & (TICKS - 1)
        tick = (control[TICK] - ((their_control[TICK] - then) & (TICKS - 1))) & (TICKS - 1)
        held = held_units(slots, control, first, token)
        for _ in range(16):
            if held + ((theirs[n, 1] >> 16) & _16_BITS) <= COUNT_LIMIT:
                break
            halve(slots, control[LINES], control[MASK], first)
            halve(theirs, lines, mask, first)
            held = held_units(slots, control, first, token)
        units = scaled((theirs[n, 1] >> 16) & _16_BITS, their_ages[then] / ages[tick])
        units = max(1, min(units, COUNT_LIMIT))
        see(slots, control, ages, first, token, units, tick, group, True)
        grow(slots, control)


@compiled
def held_units(slots: NDArray, control: NDArray, first: int, token: int) -> int:
    """The count of a pair, 0 if it isn't there."""
    key = first
    for _ in range(LEVELS):
        i = find_pair(slots, key, token, control[LINES], control[MASK])
        if i >= 0:
            return (slots[i, 1] >> 16) & _16_BITS
        key = next_level(key)
    return 0


def unpacked(slots: NDArray[np.int64], ages: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    """The fields of all pairs of slots [N, 2]: key, tick, token, count (sightings, aged) and group, each [pairs]."""
    used = slots[slots[:, 0] != 0]
    ticks = used[:, 0] & (TICKS - 1)
    return {
        "key": used[:, 0] >> 16,
        "tick": ticks,
        "token": used[:, 1] >> 32,
        "count": ((used[:, 1] >> 16) & _16_BITS) * ages[ticks] / ONE,
        "group": used[:, 1] & _16_BITS,
    }

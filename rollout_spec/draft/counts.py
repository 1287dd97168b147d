"""The counts: a hash table of (context, next token) pairs in one flat array.

A slot is 16 bytes and holds one pair: a 48-bit hash of the context, the token that followed, how often, when last,
and which group saw it. Four slots are a line (64 bytes, a cache line). A pair lies in one of two lines, which its
context's hash names; so the followers of a context are found by reading two lines. A context with more than
FOLLOWERS followers goes on to the next level: two more lines, named by a changed hash.

When both lines are full, a pair of them moves to its other line if there is room, and else the pair of them that
is worth least is forgotten: the least seen, and the longest ago. Forgetting thus costs no more than learning, and
happens a pair at a time.

Evidence by group costs no second copy: a pair that one group alone saw carries that group's number. When another
group sees it too, it is marked SHARED, and each group gets a pair of its own under a hash salted with its number.

Lines are numbered in the order of the hashes: home = hash * lines / 2**32. The table therefore grows in place by
any factor, a few lines at a time, from the last line to the first; MIGRATING is the lowest old line that moved.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .compiled import compiled

SLOT = np.dtype(
    [
        ("check", "<u4"),  # high 32 bits of the context's hash; they choose the line
        ("tag", "<u2"),  # 16 more bits of it
        ("tick", "<u2"),  # when the pair was last seen
        ("token", "<i4"),
        ("count", "<u2"),  # times seen, in units of 1 / ONE; 0 marks a free slot
        ("group", "<u2"),  # the only group that saw it, or SHARED
    ],
    align=True,
)
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
LEVELS = 4
"""Times it can go on, so that a context keeps at most LEVELS * FOLLOWERS followers."""
FULL_PERCENT = 82
"""Share of the slots in use at which the table grows."""
HALVING = 4
"""The worth of an unused pair halves every 2**HALVING ticks."""

# Entries of the control array, int64[CONTROL_SIZE].
OLD_LINES, LINES, MIGRATING, MAX_LINES, USED, TICK, TOKENS, TOKENS_PER_TICK, TOKENS_AT_TICK = range(9)
CONTROL_SIZE = 16

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_SECOND = 0x5851F42D4C95
_LEVEL_STEP = 0x9E3779B97F4A
_MASK_48 = (1 << 48) - 1
_SHIFT_32 = np.uint64(32)
_SHIFT_29 = np.uint64(29)


@compiled
def extend_hash(running: np.uint64, token: int) -> np.uint64:
    """The running hash of a context with one earlier token put before it; uint64."""
    return (running ^ np.uint64(token + 1)) * _MULTIPLIER + (running >> _SHIFT_29)


@compiled
def finish_hash(running: np.uint64, salt: int) -> np.int64:
    """48 well-mixed bits, as a non-negative int64, of a running hash and a salt (a group, or 0)."""
    x = running + np.uint64(salt) * _MIX
    x = (x ^ (x >> _SHIFT_32)) * _MIX
    x = (x ^ (x >> _SHIFT_32)) * _MIX
    return np.int64(x >> np.uint64(16))


@compiled
def key_of(slot: Any) -> np.int64:
    """The 48-bit hash of a slot's context."""
    return (np.int64(slot.check) << 16) | np.int64(slot.tag)


@compiled
def home(check: int, old_lines: int, lines: int, migrating: int) -> int:
    """A line for 32 bits of hash: of the grown table, if the old line has moved already."""
    line = (check * old_lines) >> 32
    if line >= migrating:
        line = (check * lines) >> 32
    return line


@compiled
def homes(key: int, old_lines: int, lines: int, migrating: int) -> tuple[int, int]:
    """The two lines a context's pairs may lie in; key is its 48-bit hash."""
    second = (key * _SECOND) & _MASK_48
    return home(key >> 16, old_lines, lines, migrating), home(second >> 16, old_lines, lines, migrating)


@compiled
def seat(slots: NDArray, line_a: int, line_b: int, key: int, token: int, tick: int) -> tuple[int, int]:
    """Where the pair (key, token) is or should go in two lines.

    Returns (slot, kind): 0 it is there, 1 the slot is free, 2 the slot holds a pair to forget, 3 the context has
    its share of the lines already and the slot holds the least of them.
    """
    check, tag = np.uint32(key >> 16), np.uint16(key & 0xFFFF)
    same, free, most_free = 0, -1, 0
    for line in (line_a, line_b):
        free_here, first = 0, -1
        for i in range(line * LINE, line * LINE + LINE):
            slot = slots[i]
            if slot.count == 0:
                free_here += 1
                if first < 0:
                    first = i
            elif slot.check == check and slot.tag == tag:
                if slot.token == token:
                    return i, 0
                same += 1
        if free_here > most_free:  # the emptier line
            most_free, free = free_here, first
        if line_a == line_b:
            break
    if same >= FOLLOWERS:
        return least_worth(slots, line_a, line_b, key, True, tick), 3
    if free >= 0:
        return free, 1
    return least_worth(slots, line_a, line_b, key, False, tick), 2


@compiled
def least_worth(slots: NDArray, line_a: int, line_b: int, key: int, same: bool, tick: int) -> int:
    """Slot of the pair in two lines, of one context or of any, that was seen least and longest ago."""
    weakest, weakest_worth = 0, np.int64(1 << 62)
    for line in (line_a, line_b):
        for i in range(line * LINE, line * LINE + LINE):
            slot = slots[i]
            if slot.count == 0 or (same and key_of(slot) != key):
                continue
            age = (tick - np.int64(slot.tick)) & 0xFFFF
            halvings = age >> HALVING
            worth = (np.int64(slot.count) << 32 >> (halvings if halvings < 40 else 40)) - age
            if worth < weakest_worth:
                weakest, weakest_worth = i, worth
    return weakest


@compiled
def move_out(slots: NDArray, i: int, old_lines: int, lines: int, migrating: int) -> tuple[int, bool]:
    """Moves the pair in slot i to a free slot of its other line; returns that line and whether it had one."""
    line = i // LINE
    line_a, line_b = homes(key_of(slots[i]), old_lines, lines, migrating)
    other = line_b if line_a == line else line_a
    for j in range(other * LINE, other * LINE + LINE):
        if slots[j].count == 0:
            slots[j] = slots[i]
            slots[i].count = 0
            return other, True
    return other, False


@compiled
def make_room(slots: NDArray, line_a: int, line_b: int, old_lines: int, lines: int, migrating: int) -> int:
    """Frees a slot of two full lines by moving one pair, or two, to their other lines; returns it, or -1."""
    for line in (line_a, line_b):
        for i in range(line * LINE, line * LINE + LINE):
            _, moved = move_out(slots, i, old_lines, lines, migrating)
            if moved:
                return i
    for line in (line_a, line_b):
        for i in range(line * LINE, line * LINE + LINE):
            other, _ = move_out(slots, i, old_lines, lines, migrating)
            if other in (line_a, line_b):
                continue
            for j in range(other * LINE, other * LINE + LINE):
                _, moved = move_out(slots, j, old_lines, lines, migrating)
                if moved:
                    slots[j] = slots[i]
                    slots[i].count = 0
                    return i
    return -1


@compiled
def seat_in_table(
    slots: NDArray, old_lines: int, lines: int, migrating: int, key: int, token: int, tick: int
) -> tuple[int, int, int]:
    """`seat` through the levels of a context, after making room; returns (slot, kind, key of the level)."""
    i, kind = 0, 0
    for level in range(LEVELS):
        line_a, line_b = homes(key, old_lines, lines, migrating)
        i, kind = seat(slots, line_a, line_b, key, token, tick)
        if kind == 2:
            room = make_room(slots, line_a, line_b, old_lines, lines, migrating)
            if room >= 0:
                i, kind = room, 1
        if kind != 3 or level == LEVELS - 1:
            break
        key = next_level(key)
    return i, kind, key


@compiled
def seat_in_history(slots: NDArray, control: NDArray, key: int, token: int) -> tuple[int, int, int]:
    """`seat_in_table` for the history."""
    old_lines, lines, migrating = control[OLD_LINES], control[LINES], control[MIGRATING]
    return seat_in_table(slots, old_lines, lines, migrating, key, token, control[TICK])


@compiled
def next_level(key: int) -> int:
    return (key + _LEVEL_STEP) & _MASK_48


@compiled
def write(slots: NDArray, i: int, key: int, token: int, count: int, tick: int, group: int) -> None:
    slot = slots[i]
    slot.check = key >> 16
    slot.tag = key & 0xFFFF
    slot.tick = tick
    slot.token = token
    slot.count = count
    slot.group = group


@compiled
def add(
    slots: NDArray, i: int, kind: int, key: int, token: int, units: int, tick: int, group: int, ages: NDArray
) -> int:
    """Adds units to the pair that `seat` placed; returns 1 when it took a free slot."""
    if kind != 0:
        write(slots, i, key, token, units, tick, group)
        return 1 if kind == 1 else 0
    slot = slots[i]
    slot.count = min(65_535, np.int64(slot.count * ages[np.int64(slot.tick)] + 0.5) + units)
    slot.tick = tick
    return 0


@compiled
def halve(slots: NDArray, old_lines: int, lines: int, migrating: int, key: int) -> None:
    """Halves the counts of a context, which keeps their proportions."""
    for _ in range(LEVELS):
        line_a, line_b = homes(key, old_lines, lines, migrating)
        for line in (line_a, line_b):
            for i in range(line * LINE, line * LINE + LINE):
                if slots[i].count != 0 and key_of(slots[i]) == key:
                    slots[i].count = (np.int64(slots[i].count) + 1) >> 1
            if line_a == line_b:
                break
        key = next_level(key)


@compiled
def see(slots: NDArray, control: NDArray, ages: NDArray, running: np.uint64, token: int, group: int) -> None:
    """Counts one sighting, by `group`, of `token` after the context whose running hash is `running`."""
    tick = control[TICK]
    first = finish_hash(running, 0)
    i, kind, key = seat_in_history(slots, control, first, token)
    owner = np.int64(slots[i].group)
    if kind == 0 and owner != group:
        if owner != SHARED:  # a second group: what was the first one's alone gets a pair under its own key
            slot = slots[i]
            units = np.int64(slot.count)
            then = np.int64(slot.tick)
            slot.group = SHARED
            see_in_group(slots, control, ages, running, token, owner, units, then)
        see_in_group(slots, control, ages, running, token, group, ONE, tick)
        i, kind, key = seat_in_history(slots, control, first, token)  # the above may have taken its slot
        group = SHARED
    control[USED] += add(slots, i, kind, key, token, ONE, tick, group, ages)
    if slots[i].count > COUNT_LIMIT:
        halve(slots, control[OLD_LINES], control[LINES], control[MIGRATING], first)


@compiled
def see_in_group(
    slots: NDArray,
    control: NDArray,
    ages: NDArray,
    running: np.uint64,
    token: int,
    group: int,
    units: int,
    tick: int,
) -> None:
    first = finish_hash(running, group)
    i, kind, key = seat_in_history(slots, control, first, token)
    control[USED] += add(slots, i, kind, key, token, units, tick, group, ages)
    if slots[i].count > COUNT_LIMIT:
        halve(slots, control[OLD_LINES], control[LINES], control[MIGRATING], first)


@compiled
def grow(slots: NDArray, control: NDArray, lines_to_move: int) -> None:
    """Starts growing a table that is nearly full, or moves some lines of one that is growing."""
    if control[MIGRATING] == 0:
        if control[USED] * 100 < FULL_PERCENT * LINE * control[LINES] or control[LINES] == control[MAX_LINES]:
            return
        control[OLD_LINES] = control[LINES]
        control[MIGRATING] = control[LINES]
        control[LINES] = min(control[MAX_LINES], control[LINES] + (control[LINES] >> 2) + 1)
    moved = np.empty(LINE, SLOT)
    while lines_to_move > 0 and control[MIGRATING] > 0:
        lines_to_move -= 1
        line = control[MIGRATING] - 1
        count = 0
        for i in range(line * LINE, line * LINE + LINE):
            slot = slots[i]
            if slot.count != 0:
                key = key_of(slot)
                a, b = homes(key, control[OLD_LINES], control[OLD_LINES], 0)
                if a == line or b == line:
                    moved[count] = slot
                    count += 1
                    slot.count = 0
        control[MIGRATING] = line
        for j in range(count):
            pair = moved[j]
            key = key_of(pair)
            a, b = homes(key, control[OLD_LINES], control[LINES], line)
            i, kind = seat(slots, a, b, key, pair.token, control[TICK])
            if kind == 2:
                room = make_room(slots, a, b, control[OLD_LINES], control[LINES], line)
                if room >= 0:
                    i, kind = room, 1
            if kind >= 2:
                control[USED] -= 1
            slots[i] = pair
    if control[MIGRATING] == 0:
        control[OLD_LINES] = control[LINES]

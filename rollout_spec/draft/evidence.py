"""What is known of a context: which experts have seen it, and how often each token followed.

A context is the last n tokens, or n tokens before the last one: what skips over a token that nobody foresaw finds the
text again behind it. Such a form is called a shape. An expert is a source (everything, the request's group, the
request itself) and a shape. Shapes that skip are looked up in everything only.

Lookups go from the longest shape to the shortest. Once a long context has been seen several times and the same token
always followed, no others are looked at, since they would hardly change the outcome.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .compiled import compiled
from .config import LONGEST_MATCH
from .counts import (
    FOLLOWERS,
    LEVELS,
    LINE,
    LINES,
    MASK,
    ONE,
    SHARED,
    TICKS,
    extend_hash,
    homes,
    key_in_group,
    key_of_context,
    next_level,
    prefetch_lines,
)
from .own import MATCHES, find
from .state import GROUP, State

PLAIN_SHAPES = 6
SHAPES = 8
LENGTHS = np.array([1, 2, 3, 5, 8, 16, 2, 5])
"""Tokens of each shape; from PLAIN_SHAPES on, of those before the last token."""
_SKIP_SEED = np.uint64(0xA24BAED4963EE407)  # far from any token, so that no other shape hashes alike

IN_GROUP = SHAPES
IN_OWN = IN_GROUP + PLAIN_SHAPES
EXPERTS = IN_OWN + PLAIN_SHAPES
"""Numbered: the shapes in everything, from IN_GROUP the plain ones in the group, from IN_OWN in the own text."""

CANDIDATES = 128
"""Most different tokens considered at a node."""
ENTRIES = EXPERTS * LEVELS * FOLLOWERS
DECISIVE = np.float32(5 * ONE)
DECISIVE_SHAPE = 4
"""A context of this shape or longer that was seen so often, always with the same follower, decides alone."""

QUICK_SHAPES = 2
"""Shapes of a source that a quick look takes."""
FEW_LEVELS = 3
"""Levels of followers that are read where a longer context is known too: they hold those seen most often."""

_PLACES = 256
_LOWEST_BIT = np.array([0] + [(n & -n).bit_length() - 1 for n in range(1, 256)])


class Evidence(NamedTuple):
    """Filled by `collect`. Experts that know something are active, and numbered in the order they were asked.

    The counts are a sparse matrix of candidates and active experts: an entry for each that isn't 0.
    """

    tokens: NDArray  # int64[CANDIDATES]
    probs: NDArray  # float32[CANDIDATES]: the mixture's
    experts: NDArray  # int64[EXPERTS + 1]: the active experts
    totals: NDArray  # float32[EXPERTS + 1]: all that they counted, in units of 1 / ONE
    most: NDArray  # float32[EXPERTS + 1]: their largest count
    columns: NDArray  # int64[EXPERTS + 1]: column of their weight
    scale: NDArray  # float32[EXPERTS + 1]: weight / (total + DISCOUNT), the weights summing to one
    entry_candidate: NDArray  # int64[ENTRIES]
    entry_active: NDArray  # int64[ENTRIES]
    entry_count: NDArray  # float32[ENTRIES]
    keys: NDArray  # int64[SHAPES]: hash of the context in each shape, 0 if it is too short
    followers: NDArray  # int64[2 * MATCHES]: candidates that followed places of the own text
    matched: NDArray  # int64[2 * MATCHES]: how many shapes, or tokens, match before them
    places: NDArray  # int64[_PLACES]: hash table of the candidates, generation << 8 | candidate
    generation: NDArray  # int64[1]: places of earlier generations are free


class Collected(NamedTuple):
    """How much of an Evidence is filled, and what matched."""

    candidates: int
    active: int
    entries: int
    matched: int  # shapes up to the longest that everything knows; 0 is none
    matched_in_group: int  # the same of the group


def new_evidence() -> Evidence:
    """Room for one context at a time."""
    experts = EXPERTS + 1
    return Evidence(
        tokens=np.empty(CANDIDATES, np.int64),
        probs=np.empty(CANDIDATES, np.float32),
        experts=np.empty(experts, np.int64),
        totals=np.empty(experts, np.float32),
        most=np.empty(experts, np.float32),
        columns=np.empty(experts, np.int64),
        scale=np.empty(experts, np.float32),
        entry_candidate=np.empty(ENTRIES, np.int64),
        entry_active=np.empty(ENTRIES, np.int64),
        entry_count=np.empty(ENTRIES, np.float32),
        keys=np.empty(SHAPES, np.int64),
        followers=np.empty(2 * MATCHES, np.int64),
        matched=np.empty(2 * MATCHES, np.int64),
        places=np.zeros(_PLACES, np.int64),
        generation=np.zeros(1, np.int64),
    )


@compiled
def hash_context(context: NDArray, length: int, keys: NDArray) -> None:
    """Fills keys, int64[SHAPES], with the hashes of context[LONGEST_MATCH] (newest last, `length` of them)."""
    running, used = np.uint64(0), 0
    for shape in range(SHAPES):
        if shape == PLAIN_SHAPES:
            running, used = _SKIP_SEED, 1
        needed = LENGTHS[shape] + (1 if shape >= PLAIN_SHAPES else 0)
        keys[shape] = 0
        if needed > length:
            continue
        while used < needed:
            used += 1
            running = extend_hash(running, context[LONGEST_MATCH - used])
        keys[shape] = key_of_context(running)


@compiled
def candidate(evidence: Evidence, count: int, token: int, adding: bool) -> int:
    """Index of a token among the first `count` candidates; if it isn't there, -1 or, when adding, `count`.

    A candidate that is added when there is no room for it gets -1 too.
    """
    generation = evidence.generation[0]
    place = (token * 0x9E3779B1 >> 16) & (_PLACES - 1)
    while evidence.places[place] >> 8 == generation:
        index = evidence.places[place] & 0xFF
        if evidence.tokens[index] == token:
            return index
        place = (place + 1) & (_PLACES - 1)
    if not adding or count == CANDIDATES:
        return -1
    evidence.tokens[count] = token
    evidence.places[place] = generation << 8 | count
    return count


@compiled
def add_entry(evidence: Evidence, entries: int, index: int, active: int, units: float) -> None:
    evidence.entry_candidate[entries] = index
    evidence.entry_active[entries] = active
    evidence.entry_count[entries] = units
    evidence.totals[active] += units
    evidence.most[active] = max(evidence.most[active], units)


@compiled
def matches(slots: NDArray, line: int, wanted: int) -> int:
    """A bit for each slot of a line that holds a pair of the context whose key << 16 is `wanted`."""
    start = line * LINE
    bits: Any = 0
    for i in range(LINE):  # without branches, which would be mispredicted
        bits |= ((slots[start + i, 0] ^ wanted) < 1 << 16) << i
    return bits


@compiled
def gather(
    state: State, key: int, group: int, levels: int, evidence: Evidence, count: int, active: int, entries: int
) -> tuple[int, int, bool]:
    """Enters the followers of a context under active expert number `active`.

    What only that group saw is entered under number `active` + 1 too; a group of -1 saw nothing. Returns
    (candidates, entries, whether any follower is shared by groups).
    """
    slots, lines, mask = state.history, state.control[LINES], state.control[MASK]
    shared = False
    for _ in range(levels):
        line_a, line_b = homes(key, lines, mask)
        hits = matches(slots, line_a, key << 16)
        if line_b != line_a:
            hits |= matches(slots, line_b, key << 16) << LINE
        followers = 0
        while hits > 0:
            bit = _LOWEST_BIT[hits]
            hits &= hits - 1
            followers += 1
            i = line_a * LINE + bit if bit < LINE else (line_b - 1) * LINE + bit
            word = slots[i, 1]
            index = candidate(evidence, count, word >> 32, True)
            if index < 0:
                continue
            count = max(count, index + 1)
            units = np.float32((word >> 16) & 0xFFFF) * state.ages[slots[i, 0] & (TICKS - 1)]
            add_entry(evidence, entries, index, active, units)
            entries += 1
            owner = word & 0xFFFF
            if owner == group:
                add_entry(evidence, entries, index, active + 1, units)
                entries += 1
            shared |= owner == SHARED
        if followers < FOLLOWERS - 1:  # a full level may have lost one since
            break
        key = next_level(key)
    return count, entries, shared


@compiled
def gather_own(
    evidence: Evidence, found: int, most_shapes: int, count: int, active: int, entries: int
) -> tuple[int, int, int]:
    """Enters what followed the `found` places of the own text; returns (candidates, entries, active experts)."""
    longest = 0
    for f in range(found):
        shape = 0
        while shape < PLAIN_SHAPES and LENGTHS[shape] <= evidence.matched[f]:
            shape += 1
        evidence.matched[f] = shape
        longest = max(longest, shape)
        index = candidate(evidence, count, evidence.followers[f], True)
        count = max(count, index + 1)
        evidence.followers[f] = index
    for shape in range(longest - 1, max(-1, longest - 1 - most_shapes), -1):
        evidence.totals[active] = evidence.most[active] = 0
        begin = entries
        for f in range(found):
            index = evidence.followers[f]
            if evidence.matched[f] <= shape or index < 0:
                continue
            e = begin
            while e < entries and evidence.entry_candidate[e] != index:
                e += 1
            if e == entries:
                add_entry(evidence, entries, index, active, ONE)
                entries += 1
            else:
                evidence.entry_count[e] += ONE
                evidence.totals[active] += ONE
                evidence.most[active] = max(evidence.most[active], evidence.entry_count[e])
        if entries > begin:
            evidence.experts[active] = IN_OWN + shape
            active += 1
    return count, entries, active


@compiled
def collect(
    state: State,
    row: NDArray,
    context: NDArray,
    length: int,
    max_match: int,
    longest: int,
    quick: bool,
    evidence: Evidence,
) -> Collected:
    """Fills evidence, but for probs, with what followed context[LONGEST_MATCH] (newest last, `length` of them).

    longest: how many plain shapes may be known. quick: for a context that hardly matters.
    """
    lines, mask = state.control[LINES], state.control[MASK]
    group, keys = row[GROUP], evidence.keys
    length = min(length, max_match)
    most_shapes = QUICK_SHAPES if quick else PLAIN_SHAPES
    evidence.generation[0] += 1
    hash_context(context, length, keys)
    for shape in range(SHAPES):  # all at once, so that they come from memory together
        if keys[shape] > 0 and (shape < longest or (shape >= PLAIN_SHAPES and not quick)):
            prefetch_lines(state.history, keys[shape], lines, mask)
    count, active, entries, matched, matched_in_group, known = 0, 0, 0, 0, 0, 0
    decided = False
    for shape in range(longest - 1, -1, -1):
        if keys[shape] == 0:
            continue
        everywhere, in_group = active, active + 1
        evidence.totals[everywhere] = evidence.most[everywhere] = 0
        evidence.totals[in_group] = evidence.most[in_group] = 0
        levels = LEVELS if known == 0 and not quick else FEW_LEVELS
        count, entries, shared = gather(
            state, keys[shape], group, levels, evidence, count, everywhere, entries
        )
        if evidence.totals[everywhere] == 0:
            continue
        evidence.experts[everywhere] = shape
        active += 1
        matched = max(matched, shape + 1)
        if shared:
            key = key_in_group(keys[shape], group)
            count, entries, _ = gather(state, key, -1, levels, evidence, count, in_group, entries)
        if evidence.totals[in_group] > 0:
            evidence.experts[in_group] = IN_GROUP + shape
            active += 1
            matched_in_group = max(matched_in_group, shape + 1)
        known += 1
        total = evidence.totals[everywhere]
        decided = shape >= DECISIVE_SHAPE and total >= DECISIVE and evidence.most[everywhere] == total
        if decided or known == most_shapes:
            break
    if not quick and not decided:
        for shape in range(PLAIN_SHAPES, SHAPES):
            if keys[shape] == 0:
                continue
            evidence.totals[active] = evidence.most[active] = 0
            count, entries, _ = gather(state, keys[shape], -1, FEW_LEVELS, evidence, count, active, entries)
            if evidence.totals[active] > 0:
                evidence.experts[active] = shape
                active += 1
    if not decided:
        found = find(state.texts, row, context, length, evidence.followers, evidence.matched)
        count, entries, active = gather_own(evidence, found, most_shapes, count, active, entries)
    return Collected(count, active, entries, matched, matched_in_group)

"""From counts to one probability a token: experts, mixed with weights learnt online.

A context is the last n tokens, or n tokens before the last one or more: what skips over a token that nobody
foresaw finds the text again behind it. An expert is a source (everything, the request's group, the request
itself) and such a shape of context. It gives the token x, which followed the context c(x) times of c in all,

    p_e(x) = c(x) / (c + DISCOUNT),

and the mixture is p(x) = sum_e w_e p_e(x), the weights of the experts that have seen their context summing to one.
The weight of an expert depends on how often it has seen the context and how sure it is (`sureness`), all of
them on how long a context the group has seen. Once the token x that came is known, each weight moves towards its
expert's share of p(x), which is expectation maximisation an example at a time:

    w_e <- (1 - RATE) w_e + RATE w_e p_e(x) / p(x).

One more expert, NOBODY, gives every token FLOOR, so that weight can also move to "none of these".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .compiled import compiled
from .counts import (
    FOLLOWERS,
    LEVELS,
    LINE,
    LINES,
    MIGRATING,
    OLD_LINES,
    ONE,
    SHARED,
    extend_hash,
    finish_hash,
    homes,
    next_level,
)
from .state import GROUP, OWN_FIRST, OWN_LINES, State

_SKIP_SEED = np.uint64(0xA24BAED4963EE407)  # far from any token, so that no other shape hashes alike

SHAPES = 8
LENGTHS = np.array([1, 2, 3, 5, 8, 16, 2, 5])
SKIPS = np.array([0, 0, 0, 0, 0, 0, 1, 1])  # those that skip come last
LONG_ENOUGH = 5
"""Shapes after which a match is so long that skipping isn't tried."""

EXPERTS = 3 * SHAPES  # everything, then the group, then the request itself
SURENESSES = 9
NOBODY = EXPERTS * SURENESSES
WEIGHTS = NOBODY + 1
BUCKETS = SHAPES + 1
CANDIDATES = 48
"""Most different tokens considered at a node."""

DISCOUNT = np.float32(0.1 * ONE)
FLOOR = np.float32(1e-4)
RATE = np.float32(0.03)
LEAST_WEIGHT = np.float32(1e-6)


class Evidence(NamedTuple):
    """What the experts know of one context; filled by `predict`."""

    tokens: NDArray  # int32[CANDIDATES]
    probs: NDArray  # float32[CANDIDATES]: the mixture
    seen: NDArray  # float32[CANDIDATES, EXPERTS]: counts, in units of 1 / ONE
    totals: NDArray  # float32[EXPERTS]
    most: NDArray  # float32[EXPERTS]: the largest count
    columns: NDArray  # int64[EXPERTS]: column of the expert's weight
    scale: NDArray  # float32[EXPERTS]: weight / (total + DISCOUNT)


@compiled
def new_evidence() -> Evidence:
    return Evidence(
        np.empty(CANDIDATES, np.int32),
        np.empty(CANDIDATES, np.float32),
        np.empty((CANDIDATES, EXPERTS), np.float32),
        np.empty(EXPERTS, np.float32),
        np.empty(EXPERTS, np.float32),
        np.empty(EXPERTS, np.int64),
        np.empty(EXPERTS, np.float32),
    )


@compiled
def hash_context(
    context: NDArray, length: int, shape: int, state: np.uint64, used: int
) -> tuple[np.uint64, int]:
    """The running hash of context[:length] in a shape, from the shorter one's; returns (hash, tokens used).

    The tokens used are 0 when the context is too short for the shape.
    """
    skip = SKIPS[shape]
    needed = LENGTHS[shape] + skip
    if needed > length:
        return np.uint64(0), 0
    if skip > 0:
        state, used = np.uint64(skip) * _SKIP_SEED, skip
    while used < needed:
        used += 1
        state = extend_hash(state, context[length - used])
    return state, used


@compiled
def position(tokens: NDArray, count: int, token: int) -> int:
    """Index of token among tokens[:count], or count."""
    for i in range(count):
        if tokens[i] == token:
            return i
    return count


@compiled
def gather(
    slots: NDArray,
    old_lines: int,
    lines: int,
    migrating: int,
    key: int,
    group: int,
    expert: int,
    evidence: Evidence,
    ages: NDArray,
    count: int,
) -> tuple[int, bool]:
    """Adds the followers of a context to the evidence of an expert; returns (candidates, whether any is shared).

    With a group, what only that group saw counts for the group's expert of the same shape too.
    """
    shared = False
    for _ in range(LEVELS):
        check, tag = np.uint32(key >> 16), np.uint16(key & 0xFFFF)
        line_a, line_b = homes(key, old_lines, lines, migrating)
        followers = 0
        for line in (line_a, line_b):
            start = line * LINE
            for i in range(start, start + LINE):
                slot = slots[i]
                if slot.check != check or slot.tag != tag or slot.count == 0:
                    continue
                followers += 1
                c = position(evidence.tokens, count, slot.token)
                if c == count:
                    if count == CANDIDATES:
                        continue
                    evidence.tokens[c] = slot.token
                    evidence.seen[c, :] = 0
                    count += 1
                units = slot.count * ages[np.int64(slot.tick)]
                evidence.seen[c, expert] += units
                evidence.totals[expert] += units
                evidence.most[expert] = max(evidence.most[expert], evidence.seen[c, expert])
                if group == SHARED:
                    continue
                owner = np.int64(slot.group)
                if owner == group:
                    e = expert + SHAPES
                    evidence.seen[c, e] += units
                    evidence.totals[e] += units
                    evidence.most[e] = max(evidence.most[e], evidence.seen[c, e])
                elif owner == SHARED:
                    shared = True
            if line_a == line_b:
                break
        if followers < FOLLOWERS:
            break
        key = next_level(key)
    return count, shared


@compiled
def predict(
    state: State, row: NDArray, context: NDArray, length: int, max_match: int, evidence: Evidence
) -> tuple[int, int]:
    """Fills evidence with what may follow context[:length] (newest last); returns (candidates, bucket)."""
    history, control, ages, totals = state.history, state.control, state.ages, evidence.totals
    old_lines, lines, migrating = control[OLD_LINES], control[LINES], control[MIGRATING]
    group, own_first, own_lines = row[GROUP], row[OWN_FIRST], row[OWN_LINES]
    own = state.private[own_first * LINE : (own_first + own_lines) * LINE]
    totals[:] = 0
    evidence.most[:] = 0
    count, matched, matched_in_group = 0, 0, 0
    in_history, in_own = True, True
    running, used = np.uint64(0), 0
    for shape in range(SHAPES):
        skips = SKIPS[shape] > 0
        if skips:
            if matched >= LONG_ENOUGH:
                break
            in_history, in_own = True, True
        elif not (in_history or in_own):  # a longer context can't be known where a shorter one isn't
            continue
        running, used = hash_context(context, min(length, max_match), shape, running, used)
        if used == 0:
            continue
        key = finish_hash(running, 0)
        if in_history:
            count, shared = gather(
                history, old_lines, lines, migrating, key, group, shape, evidence, ages, count
            )
            if shared:
                e = SHAPES + shape
                key_in_group = finish_hash(running, group)
                count, _ = gather(
                    history, old_lines, lines, migrating, key_in_group, SHARED, e, evidence, ages, count
                )
            in_history = totals[shape] > 0
            if in_history and not skips:
                matched = shape + 1
                if totals[SHAPES + shape] > 0:
                    matched_in_group = shape + 1
        if in_own:
            e = 2 * SHAPES + shape
            count, _ = gather(own, own_lines, own_lines, 0, key, SHARED, e, evidence, ages, count)
            in_own = totals[e] > 0
    mix(state.weights[matched_in_group], evidence, count)
    return count, matched_in_group


@compiled
def mix(weights: NDArray, evidence: Evidence, count: int) -> None:
    """Fills the evidence's probs from what its experts saw."""
    if weights[NOBODY] == 0:  # a bucket never used before
        weights[:] = 1
    norm = weights[NOBODY]
    for e in range(EXPERTS):
        if evidence.totals[e] > 0:
            evidence.columns[e] = e * SURENESSES + sureness(evidence.totals[e], evidence.most[e])
            norm += weights[evidence.columns[e]]
    for e in range(EXPERTS):
        evidence.scale[e] = 0
        if evidence.totals[e] > 0:
            evidence.scale[e] = weights[evidence.columns[e]] / (norm * (evidence.totals[e] + DISCOUNT))
    for c in range(count):
        p = np.float32(0)
        for e in range(EXPERTS):
            p += evidence.scale[e] * evidence.seen[c, e]
        evidence.probs[c] = min(p, np.float32(1))


@compiled
def sureness(total: float, most: float) -> int:
    """0 to 8: seen about once, two or three times or more, by: no token, most or all of the followers alike."""
    often = 0 if total < 1.5 * ONE else (1 if total < 3.5 * ONE else 2)
    alike = 2 if most >= np.float32(0.98) * total else (1 if 2 * most > total else 0)
    return often * 3 + alike


@compiled
def reward(weights: NDArray, evidence: Evidence, count: int, token: int) -> None:
    """Moves the weights that `predict` used, now that `token` is what came."""
    c = position(evidence.tokens, count, token)
    norm = weights[NOBODY]
    for e in range(EXPERTS):
        if evidence.totals[e] > 0:
            norm += weights[evidence.columns[e]]
    by_nobody = weights[NOBODY] / norm * FLOOR
    given = by_nobody + (evidence.probs[c] if c < count else np.float32(0))
    for e in range(EXPERTS):
        if evidence.totals[e] > 0:
            share = evidence.scale[e] * evidence.seen[c, e] / given if c < count else np.float32(0)
            i = evidence.columns[e]
            weights[i] = max(LEAST_WEIGHT, (1 - RATE) * weights[i] + RATE * norm * share)
    weights[NOBODY] = max(LEAST_WEIGHT, (1 - RATE) * weights[NOBODY] + RATE * norm * by_nobody / given)

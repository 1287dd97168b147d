"""From counts to one probability a token: experts, mixed with weights learnt online.

An expert is a source (everything, the request's group, the request itself) and a context length n. It gives the
token x, which followed the last n tokens c(x) times of c times in all, the probability

    p_e(x) = c(x) / (c + DISCOUNT).

The mixture is p(x) = sum_e w_e p_e(x), with weights w of the bucket that says how long the longest match is in
each source and how sure the longest one is. Once the token x that came is known, each expert's weight moves
towards its share of p(x) (expectation maximisation, one example at a time):

    w_e <- (1 - rate) w_e + rate w_e p_e(x) / p(x).

One more expert gives any token FLOOR, so that weights can also move to "none of these".
"""

from __future__ import annotations

import numpy as np

from .compiled import compiled
from .counts import (
    FOLLOWERS,
    LEVELS,
    LINES,
    MIGRATING,
    OLD_LINES,
    SHARED,
    extend_hash,
    finish_hash,
    homes,
    next_level,
)

LENGTHS = np.array([1, 2, 3, 4, 6, 8, 10], np.int64)
NUM_LENGTHS = 7
SOURCES = 3
EXPERTS = SOURCES * NUM_LENGTHS
NONE = EXPERTS
VISITS = EXPERTS + 1
STRIDE = EXPERTS + 3
BUCKETS = 8 * 8 * 8 * 12
CONTEXT = 10
CANDIDATES = 48
DISCOUNT = np.float32(0.1)
FLOOR = np.float32(1e-4)
RATE = np.float32(0.03)


@compiled
def candidate(tokens, count, token):
    for c in range(count):
        if tokens[c] == token:
            return c
    return count


@compiled
def gather(
    slots,
    start,
    old_lines,
    lines,
    migrating,
    levels,
    key,
    group,
    ages,
    evidence,
    tokens,
    count,
    expert,
    totals,
):
    """Reads the followers of a context.

    group < 0: a plain source; rows `expert` get every pair. Otherwise the source is everything: rows `expert` get
    every pair and rows expert + NUM_LENGTHS those that only `group` saw. Returns (candidates, some pair is shared).
    """
    shared = False
    for _ in range(levels):
        check, tag = np.uint32(key >> 16), np.uint16(key & 0xFFFF)
        a, b = homes(key, old_lines, lines, migrating)
        same = 0
        for line in (a, b):
            first = (start + line) * 4
            for i in range(first, first + 4):
                slot = slots[i]
                if slot.check == check and slot.tag == tag and slot.count != 0:
                    same += 1
                    token = slot.token
                    c = candidate(tokens, count, token)
                    if c == count:
                        if count == CANDIDATES:
                            continue
                        tokens[c] = token
                        evidence[:, c] = 0
                        count += 1
                    seen = slot.count * ages[np.int64(slot.tick)]
                    evidence[expert, c] += seen
                    totals[expert] += seen
                    if group >= 0:
                        owner = np.int64(slot.group)
                        if owner == group:
                            evidence[expert + NUM_LENGTHS, c] += seen
                            totals[expert + NUM_LENGTHS] += seen
                        elif owner == SHARED:
                            shared = True
            if a == b:
                break
        if same < FOLLOWERS:
            break
        key = next_level(key)
    return count, shared


@compiled
def predict(
    slots, own, control, ages, weights, row, context, length, lengths, evidence, totals, tokens, probs
):
    """Fills tokens and probs with what may follow context[:length] (newest last); returns (count, bucket).

    row: int64 (group, first slot of the request's own table, its lines).
    """
    group, own_start, own_lines = row[0], row[1], row[2]
    totals[:] = 0
    count = 0
    state = np.uint64(0)
    used = 0
    in_history, in_own = True, own_lines > 0
    longest_all, longest_group, longest_own = 0, 0, 0
    for rank in range(lengths):
        n = LENGTHS[rank]
        if n > length or not (in_history or in_own):
            break
        while used < n:
            used += 1
            state = extend_hash(state, context[length - used])
        key = finish_hash(state, 0)
        if in_history:
            old, new, moving = control[OLD_LINES], control[LINES], control[MIGRATING]
            count, shared = gather(
                slots, 0, old, new, moving, LEVELS, key, group, ages, evidence, tokens, count, rank, totals
            )
            if totals[rank] == 0:
                in_history = False
            else:
                longest_all = rank + 1
                if shared:
                    group_key = finish_hash(state, group)
                    count, _ = gather(
                        slots,
                        0,
                        old,
                        new,
                        moving,
                        LEVELS,
                        group_key,
                        -1,
                        ages,
                        evidence,
                        tokens,
                        count,
                        NUM_LENGTHS + rank,
                        totals,
                    )
                if totals[NUM_LENGTHS + rank] > 0:
                    longest_group = rank + 1
        if in_own:
            expert = 2 * NUM_LENGTHS + rank
            count, _ = gather(
                own,
                own_start,
                own_lines,
                own_lines,
                0,
                1,
                key,
                -1,
                ages,
                evidence,
                tokens,
                count,
                expert,
                totals,
            )
            if totals[expert] == 0:
                in_own = False
            else:
                longest_own = rank + 1
    # How sure the group's longest match is.
    sure = 0
    if longest_group > 0:
        expert = NUM_LENGTHS + longest_group - 1
        most = np.float32(0)
        for c in range(count):
            most = max(most, evidence[expert, c])
        total = totals[expert]
        size = 1 if total < 96 else (2 if total < 224 else 3)
        sure = size * 3 + (2 if most >= total * 0.98 else (1 if most * 2 > total else 0))
    bucket = ((longest_all * 8 + longest_group) * 8 + longest_own) * 12 + sure
    mix = weights[bucket]
    if mix[NONE] == 0:
        mix[: EXPERTS + 1] = 1
    norm = mix[NONE]
    for e in range(EXPERTS):
        if totals[e] > 0:
            norm += mix[e]
    probs[:count] = 0
    for e in range(EXPERTS):
        if totals[e] > 0:
            scale = mix[e] / (norm * (totals[e] + DISCOUNT * 64))
            for c in range(count):
                probs[c] += scale * evidence[e, c]
    return count, bucket


@compiled
def reward(weights, bucket, evidence, totals, tokens, count, probs, token):
    """Moves the bucket's weights by one step of expectation maximisation, after `predict` and the true token."""
    mix = weights[bucket]
    c = candidate(tokens, count, token)
    norm = mix[NONE]
    for e in range(EXPERTS):
        if totals[e] > 0:
            norm += mix[e]
    nothing = mix[NONE] / norm
    given = nothing * FLOOR
    if c < count:
        given += probs[c]
    rate = RATE
    mix[VISITS] += 1
    for e in range(EXPERTS):
        if totals[e] > 0:
            share = mix[e] / norm
            p = share * evidence[e, c] / (totals[e] + DISCOUNT * 64) if c < count else np.float32(0)
            mix[e] = max(np.float32(1e-6), (1 - rate) * share + rate * p / given)
    mix[NONE] = max(np.float32(1e-6), (1 - rate) * nothing + rate * nothing * FLOOR / given)

"""The compiled entry points: learn tokens, draft a batch of trees, move tables. All release the GIL."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .calibration import calibrated, grade_of, settle
from .compiled import compiled
from .config import LONGEST_MATCH
from .counts import (
    COUNT_LIMIT,
    LINE,
    ONE,
    TICK,
    TOKENS,
    TOKENS_AT_TICK,
    TOKENS_PER_TICK,
    USED,
    add,
    finish_hash,
    grow,
    halve,
    key_of,
    seat_in_history,
    seat_in_table,
    see,
)
from .mixture import SHAPES, hash_context, new_evidence, predict, reward
from .state import DRAFTED, GROUP, LENGTH, NODE, OWN_FIRST, OWN_LINES, OWN_USED, TEXT, State

LINES_MOVED_PER_TOKEN = 16


@compiled
def learn(state: State, r: int, new: NDArray, max_match: int, is_output: bool) -> int:
    """Learns the next tokens of request r; returns how many fitted its own table, which the caller then enlarges.

    A prompt is learnt for the request alone, an output for its group and everything too.
    """
    control, row = state.control, state.requests[r]
    context = row[TEXT : TEXT + LONGEST_MATCH]
    if row[DRAFTED] > 0:
        settle(state.calibration, state.drafts[r], row[DRAFTED], new)
        row[DRAFTED] = 0
    own = state.private[row[OWN_FIRST] * LINE : (row[OWN_FIRST] + row[OWN_LINES]) * LINE]
    evidence = new_evidence()
    for done in range(len(new)):
        if row[OWN_USED] + SHAPES > row[OWN_LINES] * (LINE - 1):  # three quarters full
            return done
        token, length = new[done], row[LENGTH]
        if is_output and length > 0:
            count, bucket = predict(state, row, context, length, max_match, evidence)
            if count > 0:
                reward(state.weights[bucket], evidence, count, token)
        running, used = np.uint64(0), 0
        for shape in range(SHAPES):
            running, used = hash_context(context, min(length, max_match), shape, running, used)
            if used == 0:
                continue
            if is_output:
                see(state.history, control, state.ages, running, token, row[GROUP])
            key = finish_hash(running, 0)
            i, kind, level = seat_in_table(own, row[OWN_LINES], row[OWN_LINES], 0, key, token, control[TICK])
            row[OWN_USED] += add(own, i, kind, level, token, ONE, control[TICK], 0, state.ages)
            if own[i].count > COUNT_LIMIT:
                halve(own, row[OWN_LINES], row[OWN_LINES], 0, key)
        row[LENGTH] = append(context, length, token)
        if is_output:
            grow(state.history, control, LINES_MOVED_PER_TOKEN)
            control[TOKENS] += 1
            if control[TOKENS] - control[TOKENS_AT_TICK] >= control[TOKENS_PER_TICK]:
                control[TOKENS_AT_TICK] = control[TOKENS]
                control[TICK] = (control[TICK] + 1) & 0xFFFF
                state.ages[control[TICK]] = 1
    return len(new)


@compiled
def append(context: NDArray, length: int, token: int) -> int:
    """Puts token after context[:length], dropping the oldest where there is no room; returns the new length."""
    if length == LONGEST_MATCH:
        for i in range(LONGEST_MATCH - 1):
            context[i] = context[i + 1]
        length -= 1
    context[length] = token
    return length + 1


@compiled
def draft(
    state: State,
    batch: NDArray,
    budgets: NDArray,
    max_match: int,
    branching: bool,
    min_prob: float,
    tokens: NDArray,
    parents: NDArray,
    probs: NDArray,
) -> NDArray[np.int64]:
    """Drafts a tree for each request of batch; returns int64[B], the nodes of each.

    Fills tokens, parents and probs, each [B, at least the largest budget], depth first.
    """
    most = tokens.shape[1]
    sizes = np.zeros(len(batch), np.int64)
    evidence = new_evidence()
    waiting = np.empty(most + 1, NODE)
    contexts = np.empty((most + 1, LONGEST_MATCH), np.int64)  # row n + 1 ends in node n, row 0 in the root
    lengths = np.empty(most + 1, np.int64)
    depths = np.zeros(most + 1, np.int64)
    for b in range(len(batch)):
        row, nodes = state.requests[batch[b]], state.drafts[batch[b]]
        contexts[0] = row[TEXT : TEXT + LONGEST_MATCH]
        lengths[0] = row[LENGTH]
        budget = budgets[b] if row[LENGTH] > 0 else 0
        size, num_waiting, parent, reached = 0, 0, -1, np.float32(1)
        while size < budget:
            at = parent + 1
            count, _ = predict(state, row, contexts[at], lengths[at], max_match, evidence)
            likeliest = 0
            for c in range(1, count):
                if evidence.probs[c] > evidence.probs[likeliest]:
                    likeliest = c
            grade = grade_of(depths[at] + 1)
            for c in range(count):
                mixed = evidence.probs[c]
                prob = reached * calibrated(state.calibration, grade, mixed)
                if prob >= min_prob and (branching or c == likeliest):
                    num_waiting = push(
                        waiting, num_waiting, budget - size, evidence.tokens[c], parent, prob, mixed, grade
                    )
            if num_waiting == 0:
                break
            num_waiting -= 1
            node = size
            nodes[node] = waiting[num_waiting]
            at = nodes[node].parent + 1
            contexts[node + 1] = contexts[at]
            lengths[node + 1] = append(contexts[node + 1], lengths[at], nodes[node].token)
            depths[node + 1] = depths[at] + 1
            parent, reached = node, nodes[node].prob
            size += 1
        row[DRAFTED] = size
        sizes[b] = size
        lay_out(nodes, size, tokens[b], parents[b], probs[b])
    return sizes


@compiled
def push(
    waiting: NDArray, count: int, room: int, token: int, parent: int, prob: float, mixed: float, grade: int
) -> int:
    """Adds a node to those waiting, likeliest last, of which only the `room` likeliest are kept."""
    if count >= room:
        if prob <= waiting[0].prob:
            return count
        count -= 1
        for i in range(count):
            waiting[i] = waiting[i + 1]
    at = count
    while at > 0 and waiting[at - 1].prob >= prob:
        waiting[at] = waiting[at - 1]
        at -= 1
    node = waiting[at]
    node.token, node.parent, node.prob, node.mixed, node.grade = token, parent, prob, mixed, grade
    return count + 1


@compiled
def lay_out(nodes: NDArray, size: int, tokens: NDArray, parents: NDArray, probs: NDArray) -> None:
    """Writes a tree depth first, the likelier child first: its likeliest path is then mostly contiguous."""
    pending = np.empty(size, np.int64)
    place = np.empty(size, np.int64)
    num_pending, placed, parent = 0, 0, -1
    while True:
        for n in range(size - 1, parent, -1):  # nodes were made likeliest first
            if nodes[n].parent == parent:
                pending[num_pending] = n
                num_pending += 1
        if num_pending == 0:
            return
        num_pending -= 1
        parent = pending[num_pending]
        node = nodes[parent]
        place[parent] = placed
        tokens[placed], probs[placed] = node.token, node.prob
        parents[placed] = -1 if node.parent < 0 else place[node.parent]
        placed += 1


@compiled
def rehash(private: NDArray, old_first: int, old_lines: int, first: int, lines: int) -> None:
    """Copies a request's own table to an empty, larger place."""
    old = private[old_first * LINE : (old_first + old_lines) * LINE]
    new = private[first * LINE : (first + lines) * LINE]
    for i in range(len(old)):
        pair = old[i]
        if pair.count != 0:
            j, _, _ = seat_in_table(new, lines, lines, 0, key_of(pair), pair.token, np.int64(pair.tick))
            new[j] = pair


@compiled
def insert_all(history: NDArray, control: NDArray, pairs: NDArray) -> None:
    """Puts pairs into an empty history, forgetting what it has no room for."""
    for i in range(len(pairs)):
        if pairs[i].count != 0:
            j, kind, _ = seat_in_history(history, control, key_of(pairs[i]), pairs[i].token)
            if kind == 1:
                control[USED] += 1
            history[j] = pairs[i]
            grow(history, control, LINES_MOVED_PER_TOKEN)

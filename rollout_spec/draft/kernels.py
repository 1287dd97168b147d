"""The compiled entry points: learn tokens, draft a batch of trees. Both release the GIL."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .calibration import calibrated, grade_of, least_mixed, settle
from .compiled import compiled
from .config import LONGEST_MATCH
from .counts import (
    LINES,
    MASK,
    ONE,
    TICK,
    TOKENS,
    TOKENS_AT_TICK,
    TOKENS_PER_TICK,
    advance_tick,
    grow,
    key_in_group,
    next_level,
    prefetch_lines,
    see,
)
from .evidence import LENGTHS, PLAIN_SHAPES, SHAPES, collect, hash_context
from .mixture import mix, reward
from .own import TOKEN, append, repeats
from .state import DRAFTED, FAMILIAR, GROUP, LENGTH, OWN_FIRST, State
from .workspace import Workspace

DEEPEN = 4
"""A context is counted in so many shapes more than the longest of its shapes that is known already."""
REWARD_ALL = 1 << 11
REWARD_FAMILIAR = 1 << 14
REWARD_NEW_EVERY, REWARD_EVERY = 4, 8
"""The mixture's weights follow every token up to REWARD_ALL tokens of history; up to REWARD_FAMILIAR they follow
every token in familiar text and one in REWARD_NEW_EVERY elsewhere, where they matter less; then one in REWARD_EVERY."""
OFTEN_SHARED = 2
"""Shapes so short that most of their contexts are known to several groups and have many followers."""
FAMILIAR_SHAPE = 3
"""A token behind a known context of this shape or longer is familiar."""
QUICK_BELOW = np.float32(0.03)
"""What follows a node less likely than this is looked at quickly."""


@compiled
def learn_prompt(state: State, r: int, tokens: NDArray) -> None:
    """Appends tokens, int32[T], to the own text of request r, which has room for them."""
    for t in range(len(tokens)):
        append(state.texts, state.requests[r], tokens[t])


@compiled
def learn_all(
    state: State, batch: NDArray, tokens: NDArray, ends: NDArray, max_match: int, workspace: Workspace
) -> None:
    """Learns tokens[ends[b - 1] : ends[b]] for each request of batch, int64[B]; tokens int32[T], ends int64[B]."""
    begin = 0
    for b in range(len(batch)):
        learn(state, batch[b], tokens[begin : ends[b]], max_match, workspace)
        begin = ends[b]


@compiled
def learn(state: State, r: int, tokens: NDArray, max_match: int, workspace: Workspace) -> None:
    """Learns the next output tokens, int32[T], of request r, whose own text has room for them."""
    history, control, ages, row = state.history, state.control, state.ages, state.requests[r]
    evidence, context = workspace.evidence, workspace.contexts[0]
    if row[DRAFTED] > 0:
        settle(state.calibration, state.drafts[r], row[DRAFTED], tokens)
        row[DRAFTED] = 0
    length = fill_context(state.texts, row, context)
    hash_context(context, min(length, max_match), workspace.keys[0])
    for t in range(len(tokens)):
        token, keys, next_keys = tokens[t], workspace.keys[t & 1], workspace.keys[(t + 1) & 1]
        if length > 0 and control[TOKENS] % rewarded_every(control[TOKENS], row[FAMILIAR]) == 0:
            collected = collect(state, row, context, length, max_match, PLAIN_SHAPES, False, evidence)
            if collected.candidates > 0:
                weights = state.weights[collected.matched_in_group]
                mix(weights, evidence, collected)
                reward(weights, evidence, collected, token)
        familiar = repeats(state.texts, row, token)
        extend_context(context, context, token)
        append(state.texts, row, token)
        length = min(length + 1, LONGEST_MATCH)
        hash_context(context, min(length, max_match), next_keys)
        for shape in range(SHAPES):  # they come from memory while this token is counted
            if next_keys[shape] > 0:
                prefetch_lines(history, next_keys[shape], control[LINES], control[MASK])
                if shape < OFTEN_SHARED:
                    key = key_in_group(next_keys[shape], row[GROUP])
                    prefetch_lines(history, key, control[LINES], control[MASK])
                    key = next_level(next_keys[shape])
                    prefetch_lines(history, key, control[LINES], control[MASK])
        deepest = DEEPEN - 1
        for shape in range(SHAPES):
            if keys[shape] == 0 or LENGTHS[shape] > LENGTHS[min(deepest, PLAIN_SHAPES - 1)]:
                continue
            by_group = shape < PLAIN_SHAPES
            tick = control[TICK]
            known = see(history, control, ages, keys[shape], token, ONE, tick, row[GROUP], by_group)
            if known and by_group:
                deepest = shape + DEEPEN
                familiar = familiar or shape >= FAMILIAR_SHAPE
        row[FAMILIAR] = row[FAMILIAR] + 1 if familiar else 0
        grow(history, control)
        control[TOKENS] += 1
        if control[TOKENS] - control[TOKENS_AT_TICK] >= control[TOKENS_PER_TICK]:
            advance_tick(history, control, ages)


@compiled
def rewarded_every(tokens_learnt: int, familiar: int) -> int:
    """One in how many tokens moves the mixture's weights."""
    if tokens_learnt < REWARD_ALL:
        return 1
    if tokens_learnt < REWARD_FAMILIAR:
        return 1 if familiar > 0 else REWARD_NEW_EVERY
    return REWARD_EVERY


@compiled
def fill_context(texts: NDArray, row: NDArray, context: NDArray) -> int:
    """Copies the last tokens of a request's text to the end of context[LONGEST_MATCH]; returns how many."""
    length = min(row[LENGTH], LONGEST_MATCH)
    end = row[OWN_FIRST] + row[LENGTH]
    for i in range(length):
        context[LONGEST_MATCH - 1 - i] = texts[end - 1 - i, TOKEN]
    return length


@compiled
def extend_context(context: NDArray, shorter: NDArray, token: int) -> None:
    """Fills context[LONGEST_MATCH] with another, which may be the same, and one more token."""
    for i in range(LONGEST_MATCH - 1):
        context[i] = shorter[i + 1]
    context[LONGEST_MATCH - 1] = token


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
    sizes: NDArray,
    workspace: Workspace,
) -> None:
    """Drafts a tree for each request of batch, int64[B]; sizes, int64[B], gets the nodes of each.

    Fills tokens, parents and probs, each [B, at least the largest budget], depth first.
    """
    for b in range(len(batch)):
        row, nodes = state.requests[batch[b]], state.drafts[batch[b]]
        size = 0
        if row[LENGTH] > 0:
            size = grow_tree(state, row, nodes, budgets[b], max_match, branching, min_prob, workspace)
        row[DRAFTED] = size
        sizes[b] = size
        lay_out(nodes, size, tokens[b], parents[b], probs[b], workspace)


@compiled
def grow_tree(
    state: State,
    row: NDArray,
    nodes: NDArray,
    budget: int,
    max_match: int,
    branching: bool,
    min_prob: float,
    workspace: Workspace,
) -> int:
    """Fills nodes with a tree, always adding the likeliest node that isn't in it yet; returns its size."""
    evidence, waiting, contexts = workspace.evidence, workspace.waiting, workspace.contexts
    lengths, depths, longest = workspace.lengths, workspace.depths, workspace.longest
    lengths[0] = fill_context(state.texts, row, contexts[0])
    longest[0], depths[0] = PLAIN_SHAPES, 0
    size, num_waiting, parent, reached = 0, 0, -1, np.float32(1)
    while size < budget:
        at = parent + 1
        quick = reached < QUICK_BELOW
        collected = collect(state, row, contexts[at], lengths[at], max_match, longest[at], quick, evidence)
        mix(state.weights[collected.matched_in_group], evidence, collected)
        longest[at] = collected.matched
        likeliest = 0
        if not branching:
            for c in range(1, collected.candidates):
                if evidence.probs[c] > evidence.probs[likeliest]:
                    likeliest = c
        grade = grade_of(depths[at] + 1)
        room = budget - size
        least_prob = min_prob
        if num_waiting >= room:
            least_prob = max(min_prob, waiting[num_waiting - room].prob)
        least = least_mixed(state.calibration, grade, least_prob / reached)
        for c in range(collected.candidates):
            mixed = min(evidence.probs[c], np.float32(1))
            if mixed < least or (not branching and c != likeliest):
                continue
            prob = reached * calibrated(state.calibration, grade, mixed)
            if prob >= least_prob:
                num_waiting = push(waiting, num_waiting, room, evidence.tokens[c], parent, prob, mixed, grade)
        if num_waiting == 0:
            break
        num_waiting -= 1
        nodes[size] = waiting[num_waiting]
        node = nodes[size]
        at = node.parent + 1
        extend_context(contexts[size + 1], contexts[at], node.token)
        lengths[size + 1] = min(lengths[at] + 1, LONGEST_MATCH)
        depths[size + 1] = depths[at] + 1
        longest[size + 1] = min(longest[at] + 1, PLAIN_SHAPES)
        parent, reached = size, node.prob
        size += 1
    return size


@compiled
def push(
    waiting: NDArray, count: int, room: int, token: int, parent: int, prob: float, mixed: float, grade: int
) -> int:
    """Adds a node to those waiting, likeliest last, of which only the `room` likeliest are kept."""
    if count >= room:
        if prob <= waiting[count - room].prob:
            return count
        for i in range(room - 1):
            waiting[i] = waiting[i + 1 + count - room]
        count = room - 1
    at = count
    while at > 0 and waiting[at - 1].prob >= prob:
        waiting[at] = waiting[at - 1]
        at -= 1
    node = waiting[at]
    node.token, node.parent, node.prob, node.mixed, node.grade = token, parent, prob, mixed, grade
    return count + 1


@compiled
def lay_out(
    nodes: NDArray, size: int, tokens: NDArray, parents: NDArray, probs: NDArray, workspace: Workspace
) -> None:
    """Writes a tree depth first, the likelier child first: its likeliest path is then mostly contiguous."""
    pending, place = workspace.pending, workspace.place
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

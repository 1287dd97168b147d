"""The two compiled entry points: learn tokens, and draft a batch of trees. Both release the GIL."""

from __future__ import annotations

import numpy as np

from .compiled import compiled
from .counts import (
    LINE,
    ONE,
    TICK,
    TOKENS,
    TOKENS_AT_TICK,
    TOKENS_PER_TICK,
    USED,
    add,
    extend_hash,
    finish_hash,
    grow,
    homes,
    key_of,
    seat,
    seat_in_history,
    see,
)
from .mixture import CANDIDATES, CONTEXT, EXPERTS, LENGTHS, predict, reward

# Columns of the request rows, int64[R, ROW].
GROUP, OWN_START, OWN_LINES, OWN_USED, LENGTH, TEXT = 0, 1, 2, 3, 4, 5
ROW = TEXT + CONTEXT


@compiled
def learn(slots, own, control, ages, weights, requests, r, new, lengths, output):
    """Learns new tokens of request r, one after another; returns how many fitted its own table."""
    row = requests[r]
    context = row[TEXT : TEXT + CONTEXT]
    evidence = np.empty((EXPERTS, CANDIDATES), np.float32)
    totals = np.empty(EXPERTS, np.float32)
    tokens = np.empty(CANDIDATES, np.int32)
    probs = np.empty(CANDIDATES, np.float32)
    for position in range(len(new)):
        if row[OWN_USED] + lengths > 3 * row[OWN_LINES]:
            return position
        token = new[position]
        length = row[LENGTH]
        if output and length > 0:
            count, bucket = predict(
                slots,
                own,
                control,
                ages,
                weights,
                row,
                context,
                length,
                lengths,
                evidence,
                totals,
                tokens,
                probs,
            )
            if count > 0:
                reward(weights, bucket, evidence, totals, tokens, count, probs, token)
        state = np.uint64(0)
        used = 0
        for rank in range(lengths):
            n = LENGTHS[rank]
            if n > length:
                break
            while used < n:
                used += 1
                state = extend_hash(state, context[length - used])
            if output:
                see(slots, control, ages, state, token, row[GROUP])
            key = finish_hash(state, 0)
            a, b = homes(key, row[OWN_LINES], row[OWN_LINES], 0)
            first = row[OWN_START]
            i, kind = seat(own, first + a, first + b, key, token, control[TICK])
            row[OWN_USED] += add(own, i, kind, key, token, ONE, control[TICK], 0, ages)
        if length == CONTEXT:
            context[:-1] = context[1:]
            context[CONTEXT - 1] = token
        else:
            context[length] = token
            row[LENGTH] = length + 1
        if output:
            grow(slots, control, 16)
            control[TOKENS] += 1
            if control[TOKENS] - control[TOKENS_AT_TICK] >= control[TOKENS_PER_TICK]:
                control[TOKENS_AT_TICK] = control[TOKENS]
                control[TICK] = (control[TICK] + 1) & 0xFFFF
                ages[control[TICK]] = 1
    return len(new)


@compiled
def rehash(own, old_first, old_lines, first, lines):
    """Copies a request's own table to an empty, larger place."""
    for i in range(old_first * LINE, (old_first + old_lines) * LINE):
        slot = own[i]
        if slot.count != 0:
            key = key_of(slot)
            a, b = homes(key, lines, lines, 0)
            j, _ = seat(own, first + a, first + b, key, slot.token, np.int64(slot.tick))
            own[j] = slot


@compiled
def insert_all(slots, control, pairs):
    """Puts pairs into a history that has none of them, forgetting what it has no room for."""
    for i in range(len(pairs)):
        if pairs[i].count != 0:
            j, kind, _ = seat_in_history(slots, control, key_of(pairs[i]), pairs[i].token)
            control[USED] += kind == 1
            slots[j] = pairs[i]
            grow(slots, control, 4)


@compiled
def draft(
    slots,
    own,
    control,
    ages,
    weights,
    requests,
    batch,
    budgets,
    lengths,
    branching,
    min_prob,
    tokens,
    parents,
    probs,
):
    """Trees for requests[batch]; fills tokens, parents, probs [len(batch), most nodes]; returns the node counts."""
    most = tokens.shape[1]
    sizes = np.zeros(len(batch), np.int64)
    evidence = np.empty((EXPERTS, CANDIDATES), np.float32)
    totals = np.empty(EXPERTS, np.float32)
    next_tokens = np.empty(CANDIDATES, np.int32)
    next_probs = np.empty(CANDIDATES, np.float32)
    texts = np.empty((most + 1, CONTEXT), np.int64)
    text_lengths = np.empty(most + 1, np.int64)
    node_tokens = np.empty(most, np.int32)
    node_parents = np.empty(most, np.int32)
    node_probs = np.empty(most, np.float32)
    waiting_probs = np.empty(most + 1, np.float32)  # sorted, likeliest last
    waiting_tokens = np.empty(most + 1, np.int32)
    waiting_parents = np.empty(most + 1, np.int32)
    stack = np.empty(most + 1, np.int32)
    number = np.empty(most, np.int32)
    for b in range(len(batch)):
        row = requests[batch[b]]
        budget = min(budgets[b], most)
        if budget <= 0 or row[LENGTH] == 0:
            continue
        text_lengths[0] = row[LENGTH]
        texts[0] = row[TEXT : TEXT + CONTEXT]
        size = 0
        waiting = 0
        node = -1
        reached = np.float32(1)
        while True:
            count, _ = predict(
                slots,
                own,
                control,
                ages,
                weights,
                row,
                texts[node + 1],
                text_lengths[node + 1],
                lengths,
                evidence,
                totals,
                next_tokens,
                next_probs,
            )
            room = budget - size
            best = -1
            if not branching:
                for c in range(count):
                    if best < 0 or next_probs[c] > next_probs[best]:
                        best = c
            for c in range(count):
                if best >= 0 and c != best:
                    continue
                p = reached * min(next_probs[c], np.float32(1))
                if p < min_prob:
                    continue
                if waiting >= room:
                    if p <= waiting_probs[0]:
                        continue
                    waiting_probs[: waiting - 1] = waiting_probs[1:waiting]
                    waiting_tokens[: waiting - 1] = waiting_tokens[1:waiting]
                    waiting_parents[: waiting - 1] = waiting_parents[1:waiting]
                    waiting -= 1
                at = waiting
                while at > 0 and waiting_probs[at - 1] >= p:
                    waiting_probs[at] = waiting_probs[at - 1]
                    waiting_tokens[at] = waiting_tokens[at - 1]
                    waiting_parents[at] = waiting_parents[at - 1]
                    at -= 1
                waiting_probs[at] = p
                waiting_tokens[at] = next_tokens[c]
                waiting_parents[at] = node
                waiting += 1
            if waiting == 0:
                break
            waiting -= 1
            parent = waiting_parents[waiting]
            node = size
            reached = waiting_probs[waiting]
            node_tokens[node] = waiting_tokens[waiting]
            node_parents[node] = parent
            node_probs[node] = reached
            size += 1
            if size == budget:
                break
            length = text_lengths[parent + 1]
            if length == CONTEXT:
                texts[node + 1, :-1] = texts[parent + 1, 1:]
                texts[node + 1, CONTEXT - 1] = node_tokens[node]
            else:
                texts[node + 1] = texts[parent + 1]
                texts[node + 1, length] = node_tokens[node]
                length += 1
            text_lengths[node + 1] = length
        sizes[b] = size
        # Depth first, likeliest child first: nodes were made likeliest first.
        top = 0
        placed = 0
        for n in range(size - 1, -1, -1):
            if node_parents[n] == -1:
                stack[top] = n
                top += 1
        while top > 0:
            top -= 1
            n = stack[top]
            number[n] = placed
            tokens[b, placed] = node_tokens[n]
            parents[b, placed] = -1 if node_parents[n] < 0 else number[node_parents[n]]
            probs[b, placed] = node_probs[n]
            placed += 1
            for child in range(size - 1, n, -1):
                if node_parents[child] == n:
                    stack[top] = child
                    top += 1
    return sizes

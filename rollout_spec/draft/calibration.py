"""From the mixture's probability to the share of such nodes that was accepted.

A table for each grade of depth maps the mixture's probability of a node given its parent, on a grid of its square
root (finer near 0, where most nodes are), to how often such a node was accepted once its parent was. The tables
start as the identity and follow what happens to each draft.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .compiled import compiled

GRID = 24
GRADES = 5
RATE = np.float32(0.002)


def identity() -> NDArray[np.float32]:
    """float32[GRADES, GRID + 1]"""
    return np.tile(np.square(np.linspace(0, 1, GRID + 1, dtype=np.float32)), (GRADES, 1))


@compiled
def grade_of(depth: int) -> int:
    """Row of the table for a node at a depth, 1 for a child of the root."""
    if depth <= 2:
        return depth - 1
    return 2 if depth <= 4 else (3 if depth <= 8 else 4)


@compiled
def calibrated(table: NDArray, grade: int, mixed: float) -> float:
    """Share accepted of the nodes of a grade and mixture probability."""
    at = np.sqrt(mixed) * np.float32(GRID)
    i = min(int(at), GRID - 1)
    part = at - np.float32(i)
    return table[grade, i] * (1 - part) + table[grade, i + 1] * part


@compiled
def least_mixed(table: NDArray, grade: int, share: float) -> np.float32:
    """A mixture probability below which no node is accepted as often as `share`; quicker than asking for each."""
    i = 0
    while i < GRID and table[grade, i] < share and table[grade, i + 1] < share:
        i += 1
    root = np.float32(i) / np.float32(GRID)
    return root * root


@compiled
def settle(table: NDArray, nodes: NDArray, size: int, accepted: NDArray) -> None:
    """Moves the table by what became of the draft nodes[:size], now that the request's next tokens are known."""
    parent = -1
    for a in range(len(accepted)):
        reached = -1
        for n in range(parent + 1, size):
            node = nodes[n]
            if node.parent != parent:
                continue
            hit = np.float32(1) if node.token == accepted[a] else np.float32(0)
            step = RATE * (hit - calibrated(table, node.grade, node.mixed))
            at = np.sqrt(node.mixed) * np.float32(GRID)
            i = min(int(at), GRID - 1)
            part = at - np.float32(i)
            for side in range(2):
                moved = table[node.grade, i + side] + step * (part if side else 1 - part)
                table[node.grade, i + side] = min(np.float32(1), max(np.float32(0), moved))
            if hit > 0:
                reached = n
        if reached < 0:
            return
        parent = reached

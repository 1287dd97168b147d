"""Scratch arrays of one thread that drafts or learns; compiled code allocates nothing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..tree import MAX_NODES
from .config import LONGEST_MATCH
from .evidence import SHAPES, Evidence, new_evidence
from .state import NODE


class Workspace(NamedTuple):
    """Reused from call to call. Row n + 1 of contexts, lengths, depths and longest is node n's, row 0 the root's."""

    evidence: Evidence
    keys: NDArray  # int64[2, SHAPES]: of the contexts of the token being learnt and of the next
    contexts: NDArray  # int64[MAX_NODES + 1, LONGEST_MATCH]: newest token last
    lengths: NDArray  # int64[MAX_NODES + 1]: tokens of the context
    depths: NDArray  # int64[MAX_NODES + 1]
    longest: NDArray  # int64[MAX_NODES + 1]: shapes of the context that may be known
    waiting: NDArray  # NODE[MAX_NODES + 1]: nodes that could come next, likeliest last
    pending: NDArray  # int64[MAX_NODES]
    place: NDArray  # int64[MAX_NODES]


def new_workspace() -> Workspace:
    """Room for one tree at a time."""
    rows = MAX_NODES + 1
    return Workspace(
        evidence=new_evidence(),
        keys=np.zeros((2, SHAPES), np.int64),
        contexts=np.zeros((rows, LONGEST_MATCH), np.int64),
        lengths=np.zeros(rows, np.int64),
        depths=np.zeros(rows, np.int64),
        longest=np.zeros(rows, np.int64),
        waiting=np.zeros(rows, NODE),
        pending=np.zeros(MAX_NODES, np.int64),
        place=np.zeros(MAX_NODES, np.int64),
    )

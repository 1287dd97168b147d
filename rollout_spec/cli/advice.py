"""What measured speeds say about how to set the drafter, in words."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..tree import MAX_NODES
from .comparison import Comparison

PAYS, COSTS = 1.03, 0.97
"""Ratios of speed beyond which a difference is taken for one; what lies between is as fast."""
_BETTER = 1.03
"""How much faster other max_nodes must be, over all numbers of slots, to be recommended."""
_NEARLY_ALL = 0.8
"""Share of max_nodes that steps verify on average from which more may help."""
_UNSTEADY = 0.15
"""Difference between the rounds' ratios, of the same comparison, from which they say little."""


@dataclass(frozen=True)
class Advice:
    """draft: arguments of DraftConfig to set, {} to leave the defaults. sentences: why, and what else to know."""

    draft: dict[str, int | str]
    sentences: tuple[str, ...]


def advise(comparisons: Sequence[Comparison], nodes: Sequence[int]) -> Advice:
    """By the last epoch, in which the history knows the prompts. nodes: the max_nodes compared, the usual one first."""
    usual = nodes[0]
    best = max(nodes, key=lambda one: _overall(comparisons, one))
    gain = _overall(comparisons, best) / _overall(comparisons, usual)
    if gain < _BETTER:
        best = usual
    paying = [one for one in comparisons if one.ratio(best) >= PAYS]
    costing = [one for one in comparisons if one.ratio(best) <= COSTS]
    same = [one for one in comparisons if COSTS < one.ratio(best) < PAYS]

    draft: dict[str, int | str] = {}
    sentences = [_verdict(best, paying, same, costing)]
    if not paying:
        draft = {"kind": "none"}
        sentences.append('Set DraftConfig(kind="none"): without a history to keep it is no slower.')
    elif best != usual:
        draft = {"max_nodes": best}
        sentences.append(
            f"Set DraftConfig(max_nodes={best}): over all slots {gain:.2f}x the speed of max_nodes={usual}."
        )
    elif not costing:
        sentences.append("Leave the defaults: where drafts would not pay, the engine makes none.")
    else:
        sentences.append("Leave the defaults where it pays.")
    if paying and costing:
        sentences.append(f'With {_slots(costing)} set DraftConfig(kind="none").')
    sentences += _remarks(comparisons, best)
    return Advice(draft, tuple(sentences))


def _overall(comparisons: Sequence[Comparison], nodes: int) -> float:
    return statistics.geometric_mean(one.ratio(nodes) for one in comparisons)


def _verdict(
    nodes: int, paying: Sequence[Comparison], same: Sequence[Comparison], costing: Sequence[Comparison]
) -> str:
    """As "Drafting pays 1.42x at 1 slot and 1.10x at 4, changes nothing at 16."."""
    parts = []
    if paying:
        parts.append(f"pays {_ratios(nodes, paying)}")
    if same:
        parts.append(f"changes nothing at {_slots(same)}")
    if costing:
        parts.append(f"slows down to {_ratios(nodes, costing)}")
    return f"Drafting {', '.join(parts)}."


def _remarks(comparisons: Sequence[Comparison], nodes: int) -> Iterator[str]:
    later = [one for one in comparisons if one.ratio(nodes) >= PAYS > one.ratio(nodes, epoch=0)]
    if later:
        yield (
            f"At {_slots(later)} it pays for prompts that were asked before: keep one engine through the training, "
            "or its history (save_history, load_history)."
        )
    eager = [one for one in comparisons if one.epochs[-1][nodes].nodes_per_step >= _NEARLY_ALL * nodes]
    if eager and nodes < MAX_NODES:
        yield (
            f"At {_slots(eager)} steps verify nearly all of max_nodes={nodes}: measure more with "
            f"--nodes {nodes},{min(MAX_NODES, 2 * nodes)}."
        )
    unsteady = [one for one in comparisons if max(one.ratios(nodes)) - min(one.ratios(nodes)) > _UNSTEADY]
    if unsteady:
        yield (
            f"At {_slots(unsteady)} the rounds differ much, because prompts do or the machine is busy: "
            "more --rounds say more."
        )


def _ratios(nodes: int, ones: Sequence[Comparison]) -> str:
    return _listed([f"{one.ratio(nodes):.2f}x at {_slots([one])}" for one in ones])


def _slots(ones: Sequence[Comparison]) -> str:
    """As "1 slot" or "4 and 16 slots"."""
    return (
        f"{_listed([str(one.slots) for one in ones])} slot{'' if [one.slots for one in ones] == [1] else 's'}"
    )


def _listed(words: Sequence[str]) -> str:
    """As "1, 4 and 16"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)

"""A draft tree's checks, masks and orders."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_spec.errors import DraftError
from rollout_spec.tree import MAX_NODES, DraftTree, ancestor_words


def tree_of(tokens: list[int], parents: list[int], probs: list[float]) -> DraftTree:
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(probs, np.float32))


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    parents: list[int] = []
    tokens: list[int] = []
    probs: list[float] = []
    for i in range(draw(st.integers(0, MAX_NODES))):
        parents.append(draw(st.integers(-1, i - 1)))
        tokens.append(i)
        probs.append(
            (probs[parents[-1]] if parents[-1] >= 0 else 1.0) * draw(st.sampled_from([1.0, 0.9, 0.25]))
        )
    return tree_of(tokens, parents, probs)


def paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """Root-to-node token paths with their probabilities: the tree without its numbering."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return dict(zip(found, tree.probs.tolist(), strict=True))


@given(trees())
def test_well_formed_trees_pass_and_have_ancestors_of_their_paths(tree: DraftTree) -> None:
    tree.validate()
    words = tree.ancestors()
    assert words.shape == (len(tree) + 1, 2)
    assert words.dtype == np.uint32
    assert words[0].tolist() == [1, 0]
    for node in range(len(tree)):
        above, walk = {0}, node
        while walk >= 0:
            above.add(walk + 1)
            walk = int(tree.parents[walk])
        low, high = (int(word) for word in words[node + 1])
        assert {j for j in range(64) if (low | high << 32) >> j & 1} == above
        assert tree.depths()[node] == len(above) - 1


@given(trees())
def test_depth_first_keeps_the_tree_and_puts_the_likeliest_child_next(tree: DraftTree) -> None:
    ordered = tree.depth_first().validate()
    assert paths(ordered) == paths(tree)
    for node in range(len(ordered)):
        children = np.flatnonzero(ordered.parents == node)
        if len(children):
            assert children[0] == node + 1
            assert ordered.probs[children[0]] == ordered.probs[children].max()


@given(trees(), st.integers(0, MAX_NODES + 1))
def test_likeliest_keeps_the_best_nodes_and_their_parents(tree: DraftTree, count: int) -> None:
    kept = tree.likeliest(count).validate()
    assert len(kept) == min(count, len(tree))
    assert paths(kept).items() <= paths(tree).items()
    assert sorted(kept.probs.tolist(), reverse=True) == sorted(tree.probs.tolist(), reverse=True)[: len(kept)]


def test_a_path_is_a_chain_and_accepted_follows_it() -> None:
    tree = DraftTree.path([5, 6, 7]).validate()
    assert tree.parents.tolist() == [-1, 0, 1]
    assert tree.accepted([5, 6, 9]) == [0, 1]
    assert tree.accepted([]) == []
    assert DraftTree().validate().accepted([1]) == []


def test_every_fault_is_listed() -> None:
    bad = tree_of([1, 1, -4, 9], [-1, -1, 2, 0], [0.5, 0.5, 1.5, 0.2])
    with pytest.raises(DraftError) as caught:
        bad.validate(max_nodes=3, vocab_size=8)
    for part in ("at most 3 nodes", "[-1, i)", "[0, 8)", "siblings", "probs must lie"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (tree_of([1, 2], [-1], [1.0, 1.0]), "one length"),
        (tree_of([1, 2], [-1, 0], [0.5, 0.6]), "exceed its parent"),
        (tree_of([1], [-1], [np.nan]), "probs must lie"),
        (tree_of([1], [-2], [0.5]), "[-1, i)"),
    ],
)
def test_single_faults_are_named(tree: DraftTree, message: str) -> None:
    with pytest.raises(DraftError, match=re.escape(message)):
        tree.validate()


def test_ancestor_words_reach_the_second_word() -> None:
    words = ancestor_words(np.arange(-1, 62))
    assert words[63].tolist() == [0xFFFFFFFF, 0xFFFFFFFF]
    assert words[32].tolist() == [0xFFFFFFFF, 1]

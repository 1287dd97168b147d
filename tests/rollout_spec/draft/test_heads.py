"""Trees of what heads named: their shape, their probabilities, and the two drafters in one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_spec.draft import DraftConfig
from rollout_spec.draft.heads import HeadDrafter
from rollout_spec.draft.hybrid import HybridDrafter, merged
from rollout_spec.errors import HistoryError
from rollout_spec.tree import DraftTree

CONFIG = DraftConfig(kind="mtp", head_depth=3, head_choices=2)
NAMES = np.array([[5, 6], [7, 8], [9, 5]], np.int32)
PROBS = np.array([[0.8, 0.1], [0.6, 0.3], [0.5, 0.2]], np.float32)


def test_the_likeliest_of_each_depth_is_a_chain_and_the_others_are_leaves_beside_it() -> None:
    drafter = HeadDrafter(CONFIG)
    drafter.start(1, [1, 2])
    drafter.offer(1, NAMES, PROBS)
    (tree,) = drafter.propose([1], [16])
    tree.validate(max_nodes=6)
    assert tree.tokens.tolist() == [5, 6, 7, 8, 9, 5]
    assert tree.parents.tolist() == [-1, -1, 0, 0, 2, 2]
    np.testing.assert_allclose(tree.probs, [0.8, 0.1, 0.48, 0.24, 0.24, 0.096], rtol=1e-5)
    (fewer,) = drafter.propose([1], [3])
    assert fewer.validate(max_nodes=3).tokens.tolist() == [5, 7, 8]
    (chain,) = HeadDrafter(DraftConfig(kind="mtp", branching=False)).propose([1], [3])
    assert len(chain) == 0, "nothing was offered to this one"


def test_an_offer_is_spent_once_tokens_are_known() -> None:
    drafter = HeadDrafter(CONFIG)
    drafter.start(1, [1])
    drafter.offer(1, NAMES, PROBS)
    drafter.extend(1, [5, 8])
    assert len(drafter.propose([1], [8])[0]) == 0
    drafter.offer(1, NAMES, PROBS)
    drafter.offer(1, NAMES[:0], PROBS[:0])  # the heads were not asked
    assert len(drafter.propose([1], [8])[0]) == 0
    drafter.finish(1)
    assert not drafter.has_offer(1)


def test_probabilities_become_what_was_accepted() -> None:
    rng = np.random.default_rng(0)
    drafter = HeadDrafter(CONFIG)
    drafter.start(1, [1])
    for _ in range(3000):  # the head says 0.8, and is right in half the cases; then at every depth
        drafter.offer(1, NAMES, PROBS)
        drafter.extend(1, [5, 7, 9, 1] if rng.random() < 0.5 else [4])
    drafter.offer(1, NAMES, PROBS)
    (tree,) = drafter.propose([1], [16])
    found = dict(zip(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True), tree.probs, strict=True))
    assert found[-1, 5] == pytest.approx(0.5, abs=0.06)
    chain = tree.probs[tree.accepted([5, 7, 9])]
    assert chain[-1] == pytest.approx(0.5, abs=0.06)
    drafter.new_version(1)
    assert drafter.calibration.seen.max() < 600


def test_the_calibration_is_saved_and_loaded_and_no_other_file(tmp_path: Path) -> None:
    drafter, other = HeadDrafter(CONFIG), HeadDrafter(CONFIG)
    drafter.start(1, [1])
    drafter.offer(1, NAMES, PROBS)
    drafter.extend(1, [5])
    drafter.save(tmp_path / "heads")
    other.load(tmp_path / "heads")
    np.testing.assert_array_equal(other.calibration.hits, drafter.calibration.hits)
    deeper = HeadDrafter(DraftConfig(kind="mtp", head_depth=5))
    with pytest.raises(HistoryError, match="same kind, head_depth"):
        deeper.load(tmp_path / "heads")
    HybridDrafter().save(tmp_path / "trie")
    with pytest.raises(HistoryError):
        other.load(tmp_path / "trie")


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    tokens, parents, probs = [], [], []
    taken: set[tuple[int, int]] = set()
    for node in range(draw(st.integers(0, 10))):
        parent, token = draw(st.integers(-1, node - 1)), draw(st.integers(0, 4))
        parent = min(parent, len(tokens) - 1)
        if (parent, token) in taken:
            continue
        taken.add((parent, token))
        above = 1.0 if parent < 0 else probs[parent]
        tokens.append(token)
        parents.append(parent)
        probs.append(above * draw(st.floats(0.01, 1.0)))
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(probs, np.float32))


def paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append((*found[parent], token) if parent >= 0 else (token,))
    return dict(zip(found, tree.probs.tolist(), strict=True))


@given(trees(), trees())
def test_a_merged_tree_has_the_paths_of_both_with_the_larger_probability(
    one: DraftTree, other: DraftTree
) -> None:
    tree = merged(one, other).validate()
    mine, theirs = paths(one), paths(other)
    wanted = {path: max(mine.get(path, 0.0), theirs.get(path, 0.0)) for path in mine.keys() | theirs.keys()}
    assert paths(tree) == wanted


def test_a_hybrid_proposes_what_either_knows() -> None:
    drafter = HybridDrafter(DraftConfig(kind="hybrid", min_prob=0.01))
    drafter.start(0, [1, 2, 3])
    drafter.extend(0, [11, 12, 13])
    drafter.start(1, [1, 2, 3])
    drafter.heads.offer(1, NAMES, PROBS)
    (tree,) = drafter.propose([1], [16])
    tree.validate(max_nodes=16)
    children = tree.tokens[tree.parents == -1].tolist()
    assert {5, 11} <= set(children)
    assert drafter.gained > 0.5
    for name in (0, 1):
        drafter.finish(name)
    assert drafter.memory_bytes > 0

"""The test drafters draft valid trees of every shape, and the truth where they know it."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_spec.draft import Drafter
from tests.helpers.drafters import AdversarialDrafter, OracleDrafter, WatchingDrafter


def test_adversarial_trees_are_valid_and_of_every_shape() -> None:
    drafter = AdversarialDrafter(vocab_size=300, seed=0)
    drafter.start("a", [1, 2])
    trees = [drafter.propose(["a"], [63])[0].validate(vocab_size=300) for _ in range(200)]
    sizes = [len(tree) for tree in trees]
    assert min(sizes) == 0
    assert max(sizes) == 63
    depths = [int(tree.depths().max(initial=0)) for tree in trees]
    assert 63 in depths
    assert any(depth == 1 and size > 20 for depth, size in zip(depths, sizes, strict=True))
    assert any(not np.array_equal(tree.parents, tree.depth_first().parents) for tree in trees)


@pytest.mark.parametrize("mixed", [False, True])
def test_oracle_drafts_every_sequence_that_fits_the_context(mixed: bool) -> None:
    first, second = [5, 6, 7, 8, 9], [5, 6, 4, 3, 2]
    drafter = OracleDrafter([first, second], vocab_size=50, mixed=mixed)
    drafter.start(0, [5, 6])
    lengths = set()
    for _ in range(50):
        tree = drafter.propose([0], [40])[0].validate(vocab_size=50)
        lengths.add((len(tree.accepted(first[2:])), len(tree.accepted(second[2:]))))
    assert (3, 3) in lengths
    assert mixed or lengths == {(3, 3)}
    drafter.extend(0, [7])
    if not mixed:
        assert drafter.propose([0], [1])[0].tokens.tolist() == [8]


def test_watching_drafter_refuses_calls_that_break_the_contract() -> None:
    drafter = WatchingDrafter()
    assert isinstance(drafter, Drafter)
    drafter.start("a", [1])
    drafter.extend("a", [2, 3])
    drafter.finish("a")
    assert drafter.ended == [[1, 2, 3]]
    for call in (
        lambda: drafter.extend("a", [4]),
        lambda: drafter.finish("a"),
        lambda: drafter.propose(["a"], [1]),
    ):
        with pytest.raises(AssertionError, match="never started or has finished"):
            call()

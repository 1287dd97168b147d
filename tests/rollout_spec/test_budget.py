"""The draft budget: the choice against trying everything, and learnt step times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from rollout_spec.draft.budget import NodeBudget, StepOption, StepTimes, share_nodes
from rollout_spec.step import StepShape
from rollout_spec.tree import DraftTree
from tests.helpers.drafters import random_tree

CPU_SECONDS = {1: 1.0, 4: 1.2, 8: 1.35, 17: 1.8, 64: 3.0}


def size(tokens: int, sequences: int = 1) -> StepShape:
    return StepShape(tokens, sequences, tokens)


def times_of(seconds: dict[int, float], measurements: int = 3) -> StepTimes:
    times = StepTimes()
    for _ in range(measurements):
        for tokens, value in seconds.items():
            times.record(size(tokens), value)
    return times


def options_for(decoding: int, sizes: Sequence[int]) -> list[StepOption]:
    """Sizes that fit `decoding` tokens, and the room they leave."""
    return [StepOption(size(tokens), tokens - decoding) for tokens in sizes if tokens >= decoding]


def best_by_trying(
    probs: Sequence[NDArray], options: Sequence[StepOption], seconds: dict[int, float]
) -> float:
    """The most expected tokens per second of every size with every choice of nodes that leaves no orphan."""
    choices = itertools.product(*[range(len(p) + 1) for p in probs])
    best = 0.0
    for counts in choices:
        # Of one request's nodes the likeliest come first, as a child is never likelier than its parent.
        gained = sum(np.sort(p)[::-1][:count].sum() for p, count in zip(probs, counts, strict=True))
        for option in options:
            if sum(counts) <= option.capacity:
                best = max(best, (len(probs) + gained) / seconds[option.size.tokens])
    return best


@pytest.mark.parametrize("seed", range(25))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    disturbed = sorted(value * rng.uniform(0.8, 1.3) for value in CPU_SECONDS.values())
    seconds = dict(zip(CPU_SECONDS, disturbed, strict=True))
    probs = []
    for _ in range(int(rng.integers(1, 4))):
        tree = random_tree(rng, int(rng.integers(0, 9)), 50, [], "mixed")
        probs.append((tree.probs * rng.choice([0.02, 0.5, 1.0])).astype(np.float32))
    options = options_for(len(probs), list(seconds))
    budget = share_nodes(probs, options, times_of(seconds))
    assert sum(budget.nodes) <= next(o.capacity for o in options if o.size == budget.size)
    gained = sum(np.sort(p)[::-1][:count].sum() for p, count in zip(probs, budget.nodes, strict=True))
    assert budget.expected_tokens == pytest.approx(len(probs) + gained)
    rate = budget.expected_tokens / seconds[budget.size.tokens]
    assert rate == pytest.approx(best_by_trying(probs, options, seconds))


@pytest.mark.parametrize("seed", range(10))
def test_the_chosen_nodes_are_a_tree_with_their_parents(seed: int) -> None:
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, 12, 50, [], "mixed") for _ in range(3)]
    trees.append(DraftTree.path([1, 2, 3, 4]))  # equal probabilities all the way down
    options = [StepOption(size(4), 0), StepOption(size(64), 20)]
    budget = share_nodes([tree.probs for tree in trees], options, times_of({4: 1.0, 64: 1.0}))
    assert sum(budget.nodes) == 20
    assert budget.nodes[3] == 4
    for tree, count in zip(trees, budget.nodes, strict=True):
        kept = tree.likeliest(count).validate()
        assert len(kept) == count
        assert kept.probs.sum() == pytest.approx(np.sort(tree.probs)[::-1][:count].sum())


def choose(*probs: Sequence[float], seconds: dict[int, float] = CPU_SECONDS) -> NodeBudget:
    arrays = [np.array(p, np.float32) for p in probs]
    return share_nodes(arrays, options_for(len(probs), list(seconds)), times_of(seconds))


def test_unlikely_nodes_are_not_worth_a_larger_step() -> None:
    assert choose([0.05, 0.02, 0.01, 0.01]) == NodeBudget(size(1), (0,), 1.0)
    assert choose([]) == NodeBudget(size(1), (0,), 1.0)
    assert choose([], []).nodes == (0, 0)


def test_a_size_once_paid_for_is_filled() -> None:
    """Two requests need the size of four anyway: its other two places go to the likeliest nodes."""
    budget = choose([0.02, 0.01], [0.05, 0.03])
    assert (budget.size, budget.nodes) == (size(4), (0, 2))


def test_nodes_go_to_the_requests_where_they_are_likeliest() -> None:
    budget = choose([0.9, 0.8, 0.7, 0.6], [0.3, 0.1], [0.85, 0.05, 0.04])
    assert budget.size == size(8)
    assert budget.nodes == (4, 0, 1)


def test_the_last_one_running_gets_more_than_one_of_many() -> None:
    likely = [0.8**depth for depth in range(1, 31)]
    (alone,) = choose(likely).nodes
    among = choose(*[likely] * 12).nodes
    assert alone == 7
    assert max(among) - min(among) <= 1
    assert max(among) < alone


def test_of_equally_good_sizes_the_smaller_is_chosen() -> None:
    assert choose([0.25, 0.0], seconds={1: 1.0, 2: 1.25, 3: 1.25}).size == size(1)
    assert choose([0.5, 0.0], seconds={2: 1.0, 3: 1.0, 4: 1.0}).size == size(2)


def test_no_drafts_are_worth_anything_where_steps_cost_by_the_token() -> None:
    linear = {tokens: float(tokens) for tokens in (1, 2, 4, 8)}
    assert choose([0.99, 0.98, 0.97], seconds=linear).nodes == (0,)


def test_all_drafts_are_worth_it_where_larger_steps_cost_nothing() -> None:
    flat = {tokens: 1.0 for tokens in (1, 2, 4, 8)}
    assert choose([0.01] * 7, seconds=flat).nodes == (7,)


# Step times


def drafts(times: StepTimes, prob: float = 0.9) -> int:
    """How many of three nodes with this probability a single request gets, in sizes of one and four tokens."""
    options = options_for(1, [1, 4])
    return sum(share_nodes([np.array([prob] * 3, np.float32)], options, times).nodes)


def test_nothing_is_drafted_before_the_plain_step_was_measured_a_few_times() -> None:
    times, measured = StepTimes(), 0
    while drafts(times) == 0:
        times.record(size(1), 1.0)
        measured += 1
        assert measured < 10
    assert measured >= 2


def test_a_plain_step_not_measured_for_long_is_measured_again() -> None:
    times = times_of({1: 1.0, 4: 1.2})
    drafted = 0
    for _ in range(2000):
        chosen = size(4) if drafts(times) else size(1)
        drafted += chosen == size(4)
        times.record(chosen, 1.0 if chosen == size(1) else 1.2)
    assert 0.95 < drafted / 2000 < 1


def test_a_plain_step_that_seems_slower_than_a_larger_one_is_measured_again() -> None:
    """Drafts must not be verified because the machine was busy when the plain step was measured."""
    times = times_of({1: 10.0, 4: 1.2})
    for _ in range(20):
        if drafts(times, prob=0.01):
            times.record(size(4), 1.2)
        else:
            times.record(size(1), 1.0)
    assert times.expected(size(1)) == 1.0
    assert drafts(times, prob=0.01) == 0


def test_a_size_is_never_expected_to_take_longer_than_larger_ones_do() -> None:
    times = times_of({1: 1.0, 8: 5.0, 64: 3.0})
    assert times.expected(size(8)) == 3.0
    assert times.expected(size(4)) <= 3.0


def test_a_few_outliers_do_not_move_an_expected_time() -> None:
    times = StepTimes()
    for number in range(40):
        times.record(size(4), 100.0 if number % 5 == 4 else 1.0 + 0.01 * (number % 3))
    assert times.expected(size(4)) == pytest.approx(1.01, abs=0.01)


def test_expected_times_follow_a_machine_that_changes() -> None:
    times = StepTimes()
    for _ in range(100):
        times.record(size(4), 1.0)
    for _ in range(20):
        times.record(size(4), 3.0)
    assert times.expected(size(4)) == 3.0


def test_sizes_not_yet_measured_are_guessed_from_measured_ones() -> None:
    times = StepTimes()
    assert times.expected(size(16)) > times.expected(size(4)) > times.expected(size(1)) > 0
    ratio = times.expected(size(16)) / times.expected(size(4))
    times.record(size(4), 20e-3)
    assert times.expected(size(4)) == 20e-3
    assert times.expected(size(16)) == pytest.approx(20e-3 * ratio)
    assert times.expected(size(1)) < 20e-3
    times.record(size(64), 50e-3)
    assert 20e-3 < times.expected(size(16)) < times.expected(size(48)) < 50e-3

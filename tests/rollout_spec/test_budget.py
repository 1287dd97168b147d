"""The draft budget: the choice against trying everything, and learnt step times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from rollout_spec.draft.budget import HostTimes, NodeBudget, StepOption, StepTimes, share_nodes
from rollout_spec.step_inputs import StepShape
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


def options_for(decoding: int, seconds: dict[int, float]) -> list[StepOption]:
    """Sizes that fit `decoding` tokens, the room they leave and what they take; first the step without drafts."""
    fitting = [
        StepOption(size(tokens), tokens - decoding, value)
        for tokens, value in seconds.items()
        if tokens >= decoding
    ]
    return [StepOption(fitting[0].size, 0, fitting[0].seconds), *fitting]


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
    options = options_for(len(probs), seconds)
    budget = share_nodes(probs, options, len(probs))
    assert sum(budget.nodes) <= budget.option.capacity
    gained = sum(np.sort(p)[::-1][:count].sum() for p, count in zip(probs, budget.nodes, strict=True))
    assert budget.expected_tokens == pytest.approx(len(probs) + gained)
    rate = budget.expected_tokens / budget.option.seconds
    best = best_by_trying(probs, options, seconds)
    assert rate == pytest.approx(best) or (sum(budget.nodes) == 0 and rate * 1.02 > best)


@pytest.mark.parametrize("seed", range(10))
def test_the_chosen_nodes_are_a_tree_with_their_parents(seed: int) -> None:
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, 12, 50, [], "mixed") for _ in range(3)]
    trees.append(DraftTree.path([1, 2, 3, 4]))  # equal probabilities all the way down
    options = [StepOption(size(4), 0, 1.0), StepOption(size(64), 20, 1.0)]
    budget = share_nodes([tree.probs for tree in trees], options, len(trees))
    assert sum(budget.nodes) == 20
    assert budget.nodes[3] == 4
    for tree, count in zip(trees, budget.nodes, strict=True):
        kept = tree.likeliest(count).validate()
        assert len(kept) == count
        assert kept.probs.sum() == pytest.approx(np.sort(tree.probs)[::-1][:count].sum())


def choose(*probs: Sequence[float], seconds: dict[int, float] = CPU_SECONDS) -> NodeBudget:
    arrays = [np.array(p, np.float32) for p in probs]
    return share_nodes(arrays, options_for(len(probs), seconds), len(probs))


def test_unlikely_nodes_are_not_worth_a_larger_step() -> None:
    plain = StepOption(size(1), 0, 1.0)
    assert choose([0.05, 0.02, 0.01, 0.01]) == NodeBudget(plain, (0,), 1.0)
    assert choose([]) == NodeBudget(plain, (0,), 1.0)
    assert choose([], []).nodes == (0, 0)


def test_a_size_once_paid_for_is_filled() -> None:
    """Two requests need the size of four anyway: its other two places go to the likeliest nodes."""
    budget = choose([0.02, 0.01], [0.05, 0.03])
    assert (budget.option.size, budget.nodes) == (size(4), (0, 2))


def test_nodes_go_to_the_requests_where_they_are_likeliest() -> None:
    budget = choose([0.9, 0.8, 0.7, 0.6], [0.3, 0.1], [0.85, 0.05, 0.04])
    assert budget.option.size == size(8)
    assert budget.nodes == (4, 0, 1)


def test_the_last_one_running_gets_more_than_one_of_many() -> None:
    likely = [0.8**depth for depth in range(1, 31)]
    (alone,) = choose(likely).nodes
    among = choose(*[likely] * 12).nodes
    assert alone == 7
    assert max(among) - min(among) <= 1
    assert max(among) < alone


def test_of_equally_good_sizes_the_smaller_is_chosen() -> None:
    assert choose([0.25, 0.0], seconds={1: 1.0, 2: 1.25, 3: 1.25}).option.size == size(1)
    assert choose([0.5, 0.0], seconds={2: 1.0, 3: 1.0, 4: 1.0}).option.size == size(2)


def test_no_drafts_are_worth_anything_where_steps_cost_by_the_token() -> None:
    linear = {tokens: float(tokens) for tokens in (1, 2, 4, 8)}
    assert choose([0.99, 0.98, 0.97], seconds=linear).nodes == (0,)


def test_all_drafts_are_worth_it_where_larger_steps_cost_nothing() -> None:
    flat = {tokens: 1.0 for tokens in (1, 2, 4, 8)}
    assert choose([0.01] * 7, seconds=flat).nodes == (7,)


def test_drafts_must_earn_the_hosts_time_too() -> None:
    """Filling a step's padding costs the device nothing, but drafting costs the host something."""
    probs = [np.array([0.05, 0.05], np.float32)] * 2
    plain = StepOption(size(4), 0, 1.0)
    assert share_nodes(probs, [plain, StepOption(size(4), 2, 1.01)], 2).nodes == (2, 0)
    assert share_nodes(probs, [plain, StepOption(size(4), 2, 1.10)], 2).nodes == (0, 0)


def test_requests_that_do_not_draft_count_as_tokens() -> None:
    """One request of eight whose draft adds half a token: not worth what a larger step costs the other seven."""
    options = [StepOption(size(8), 0, 1.0), StepOption(size(12), 4, 1.2)]
    probs = [np.array([0.5], np.float32)]
    assert share_nodes(probs, options, 1).nodes == (1,)
    assert share_nodes(probs, options, 8).nodes == (0,)


# Step times


def test_a_plain_step_counts_as_known_once_measured_a_few_times_and_not_for_ever() -> None:
    times = StepTimes()
    for _ in range(2):
        times.record(size(1), 1.0)
        assert not times.knows(size(1))
    times.record(size(1), 1.0)
    assert times.knows(size(1))
    for _ in range(1000):
        times.record(size(4), 1.2)
    assert not times.knows(size(1))
    assert times.knows(size(4))


def test_a_size_is_never_expected_to_take_longer_than_larger_ones_do() -> None:
    times = times_of({1: 1.0, 8: 5.0, 64: 3.0})
    assert times.expected(size(8)) == pytest.approx(3.0)
    assert times.expected(size(4)) <= 3.0 + 1e-9


def test_a_few_outliers_do_not_move_an_expected_time() -> None:
    times = StepTimes()
    for number in range(40):
        times.record(size(4), 100.0 if number % 5 == 4 else 1.0 + 0.01 * (number % 3))
    assert times.expected(size(4)) == pytest.approx(1.01, rel=0.02)


def test_expected_times_follow_a_machine_that_changes() -> None:
    times = StepTimes()
    for _ in range(100):
        times.record(size(4), 1.0)
    for _ in range(20):
        times.record(size(4), 3.0)
    assert times.expected(size(4)) == pytest.approx(3.0, rel=0.05)


def test_a_machine_that_slows_down_does_not_make_the_other_sizes_look_fast() -> None:
    times = times_of({1: 1.0, 4: 1.2, 8: 1.35}, measurements=6)
    for _ in range(10):
        times.record(size(8), 2.7)
    assert times.expected(size(1)) == pytest.approx(2.0, rel=0.1)
    assert times.expected(size(4)) == pytest.approx(2.4, rel=0.1)


def test_a_size_that_became_slower_than_others_is_found_out() -> None:
    times = times_of({1: 1.0, 4: 1.2}, measurements=6)
    for number in range(400):
        if number % 40 == 0:
            times.record(size(1), 1.0)
        else:
            times.record(size(4), 2.4)
    assert times.expected(size(4)) / times.expected(size(1)) == pytest.approx(2.4, rel=0.1)


def test_a_wrong_first_measurement_is_forgotten() -> None:
    for wrong in (0.3, 10.0):
        times = StepTimes()
        times.record(size(1), wrong)
        for _ in range(10):
            times.record(size(1), 1.0)
            times.record(size(4), 1.2)
        assert times.expected(size(1)) == pytest.approx(1.0, rel=0.1)
        assert times.expected(size(4)) == pytest.approx(1.2, rel=0.1)


def test_cached_tokens_cost_what_was_found_for_as_many_sequences() -> None:
    times = StepTimes()
    times.compare_cached(16, 16, 1616, [1.5, 1.4, 9.0])
    for _ in range(3):
        times.record(size(16, 16), 1.0, 0)
        times.record(size(16, 4), 1.0, 0)
    assert times.expected(size(16, 16), 16) * 1.5 == pytest.approx(times.expected(size(16, 16), 1616))
    assert times.expected(size(16, 4), 1616) == pytest.approx(1.0)
    times.record(size(16, 16), times.expected(size(16, 16), 3000), 3000)
    assert times.speed == pytest.approx(1.0)


def test_sizes_not_yet_measured_are_guessed_from_measured_ones() -> None:
    times = StepTimes()
    assert times.expected(size(16)) > times.expected(size(4)) > times.expected(size(1)) > 0
    ratio = times.expected(size(16)) / times.expected(size(4))
    times.record(size(4), 20e-3)
    assert times.expected(size(4)) == 20e-3
    assert times.expected(size(16)) == pytest.approx(20e-3 * ratio)


def test_host_times_are_medians_and_drafting_is_never_cheaper() -> None:
    host = HostTimes()
    assert host.expected(False) == host.expected(True) == 0.0
    for seconds in (1.0, 1.0, 9.0):
        host.record(False, seconds)
    assert host.expected(False) == host.expected(True) == 1.0
    host.record(True, 3.0)
    assert (host.expected(False), host.expected(True)) == (1.0, 3.0)

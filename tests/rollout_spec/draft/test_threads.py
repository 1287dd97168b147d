"""Several threads and processes: the same trees, and nothing lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rollout_spec.draft import DraftConfig, TrieDrafter, threads
from rollout_spec.draft.threads import MOST_THREADS, run_in_parts
from rollout_spec.tree import DraftTree


def listed(trees: list[DraftTree]) -> list[tuple[list[int], list[int], list[float]]]:
    return [(tree.tokens.tolist(), tree.parents.tolist(), tree.probs.tolist()) for tree in trees]


def with_requests(number: int, seed: int = 0) -> TrieDrafter:
    rng = np.random.default_rng(seed)
    drafter = TrieDrafter(DraftConfig(capacity_tokens=10_000))
    for request in range(number):
        drafter.start(request, rng.integers(0, 5, 20), group_id=request % 7)
        drafter.extend(request, rng.integers(0, 5, 20))
    return drafter


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that threads are used on a machine of one core too."""
    monkeypatch.setattr(threads, "_cores", lambda: 4)


@pytest.mark.parametrize(
    ("count", "least"), [(0, 1), (1, 1), (7, 3), (64, 16), (65, 16), (1_000, 16), (5, 9)]
)
def test_parts_make_up_the_whole_and_are_long_enough(four_cores: None, count: int, least: int) -> None:
    parts: dict[int, slice] = {}
    run_in_parts(lambda number, part: parts.__setitem__(number, part), count, least)
    assert sorted(parts) == list(range(len(parts)))
    assert len(parts) <= min(4, MOST_THREADS)
    covered = [index for number in sorted(parts) for index in range(count)[parts[number]]]
    assert covered == list(range(count))
    if len(parts) > 1:
        assert all(part.stop - part.start >= least for part in parts.values())
        assert count >= least * len(parts)


def test_an_error_in_any_part_is_raised(four_cores: None) -> None:
    for failing in range(4):

        def work(number: int, part: slice, failing: int = failing) -> None:
            if number == failing:
                raise ValueError(f"part {number}")

        with pytest.raises(ValueError, match=f"part {failing}"):
            run_in_parts(work, 64, 16)


def test_a_batch_over_several_threads_drafts_what_each_request_alone_does(four_cores: None) -> None:
    drafter = with_requests(150)
    budgets = [number % 66 - 2 for number in range(150)]
    together = drafter.propose(range(150), budgets)
    alone = [drafter.propose([number], [budget])[0] for number, budget in enumerate(budgets)]
    assert listed(together) == listed(alone)
    assert listed(drafter.propose(range(150), budgets)) == listed(together)


@pytest.mark.parametrize("names", [[3] * 80, [n % 40 for n in range(80)], [*range(79), 0]])
def test_a_request_named_twice_gets_its_tree_twice(four_cores: None, names: list[int]) -> None:
    drafter = with_requests(80)
    trees = drafter.propose(names, [16] * len(names))
    alone = {name: drafter.propose([name], [16]) for name in set(names)}
    for name, tree in zip(names, trees, strict=True):
        assert listed([tree]) == listed(alone[name])


def test_trees_are_the_callers_own() -> None:
    drafter = with_requests(3)
    first = drafter.propose(range(3), [16] * 3)
    before = listed(first)
    for request in range(3):
        drafter.extend(request, [1, 2, 3])
    drafter.propose(range(3), [16] * 3)
    assert listed(first) == before


def test_the_same_calls_give_the_same_trees(four_cores: None) -> None:
    one, two = with_requests(64, seed=3), with_requests(64, seed=3)
    for step in range(5):
        trees = one.propose(range(64), [16] * 64)
        assert listed(trees) == listed(two.propose(range(64), [16] * 64))
        for number, tree in enumerate(trees):
            for drafter in (one, two):
                drafter.extend(number, [*tree.tokens.tolist()[:2], step])
    assert (one._history.slots == two._history.slots).all()


def _together(works: Sequence[Callable[[], None]]) -> list[BaseException]:
    failures: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return failures


def test_every_call_may_come_from_any_thread_at_once(four_cores: None, tmp_path: Path) -> None:
    drafter = with_requests(100)
    learnt = drafter.tokens_learnt

    def serve(number: int) -> None:
        rng = np.random.default_rng(number)
        for turn in range(15):
            request = (number, turn)
            drafter.start(request, rng.integers(0, 5, int(rng.choice([1, 70, 500]))))
            for _ in range(5):
                drafter.extend(request, rng.integers(0, 5, 20))
                for tree in drafter.propose([request, *range(100)], [16] * 101):
                    tree.validate(max_nodes=16)
            if turn % 3:
                drafter.start(request, [1])
            drafter.finish(request)

    def keep(number: int) -> None:
        for turn in range(10):
            drafter.new_version(turn)
            drafter.save(tmp_path / f"history {number}")
            assert drafter.facts().pairs > 0
            assert drafter.memory_bytes > 0

    works = [partial(serve, number) for number in range(6)] + [partial(keep, number) for number in range(2)]
    assert not _together(works)
    assert drafter.tokens_learnt == learnt + 6 * 15 * 5 * 20
    assert set(drafter._rows) == set(range(100))
    loaded = TrieDrafter(DraftConfig(capacity_tokens=10_000))
    loaded.load(tmp_path / "history 1")


FORK = """
import os
import numpy as np
from rollout_spec.draft import DraftConfig, TrieDrafter, threads

threads._cores = lambda: 4
rng = np.random.default_rng(0)
drafter = TrieDrafter(DraftConfig(capacity_tokens=10_000))
for request in range(64):
    drafter.start(request, rng.integers(0, 5, 40))
    drafter.extend(request, rng.integers(0, 5, 20))

def drafts():
    return [tree.tokens.tolist() for tree in drafter.propose(range(64), [16] * 64)]

expected = drafts()  # the parent's threads have started
child = os.fork()
assert drafts() == expected
if child == 0:
    drafter.extend(0, [1] * 500)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert drafts() == expected  # what the child learnt is its own
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_drafts_the_same() -> None:
    """In a process of its own, since what other tests import may not survive a fork."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], check=True, timeout=600)

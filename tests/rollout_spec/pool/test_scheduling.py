"""Every work ends once, engines with room don't idle while works wait, and moves balance the end."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.pool.lengths import LengthHistory
from rollout_spec.pool.scheduling import Scheduler, Work


def work(key: int, group: int = 0, tokens: int = 100, alone: bool = False) -> Work:
    return Work(key, group, prompt_tokens=10, max_tokens=1000, expected_tokens=tokens, alone=alone)


def scheduler_of(engines: int, slots: int = 4) -> Scheduler:
    made = Scheduler()
    for engine in range(engines):
        made.add_engine(engine, slots, lookahead=0)
    return made


def test_a_group_stays_together_where_there_is_enough_to_do() -> None:
    scheduler = scheduler_of(2)
    for key in range(16):
        scheduler.add(work(key, group=key // 4))
    given_out = scheduler.assign()
    assert len(given_out) == 8
    for engine in (0, 1):
        assert len({one.group for number, one in given_out if number == engine}) == 1


def test_one_group_is_shared_while_engines_would_idle() -> None:
    scheduler = scheduler_of(2, slots=8)
    for key in range(8):
        scheduler.add(work(key))
    engines = [engine for engine, _ in scheduler.assign()]
    assert engines.count(0) == engines.count(1) == 4


def test_a_long_prompt_keeps_a_group_together() -> None:
    scheduler = scheduler_of(2, slots=8)
    for key in range(4):
        scheduler.add(Work(key, 0, prompt_tokens=100_000, max_tokens=10, expected_tokens=5))
    assert len({engine for engine, _ in scheduler.assign()}) == 1


def test_the_longest_are_first() -> None:
    scheduler = scheduler_of(1, slots=2)
    for key, tokens in enumerate([5, 900, 30, 400]):
        scheduler.add(work(key, group=key, tokens=tokens))
    assert [one.key for _, one in scheduler.assign()] == [1, 3]


def test_a_work_that_runs_alone_has_nothing_beside_it() -> None:
    scheduler = scheduler_of(2, slots=4)
    for key in range(6):
        scheduler.add(work(key, group=key))
    scheduler.add(work(99, group=99, alone=True))
    scheduler.assign()
    while 99 in scheduler.works:
        (engine,) = [number for number, load in scheduler.engines.items() if load.exclusive]
        running = scheduler.engines[engine].running
        assert 99 not in running or list(running) == [99]
        scheduler.discard(next(iter(running)))
        scheduler.assign()
    assert not any(load.exclusive for load in scheduler.engines.values())


def test_moves_balance_the_end() -> None:
    scheduler = scheduler_of(2, slots=8)
    scheduler.close_engine(1)
    for key in range(8):
        scheduler.add(work(key, tokens=100 * (key + 1)))
    scheduler.assign()
    scheduler.open_engine(1)
    moves = scheduler.moves()
    assert 3 <= len(moves) <= 4
    assert all((move.source, move.target) == (0, 1) for move in moves)
    assert scheduler.moves() == []


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 5))
def test_whatever_happens_every_work_ends_once(seed: int, engines: int, slots: int) -> None:
    """Engines come and go, works are added, ended, withdrawn, moved and lost."""
    rng = np.random.default_rng(seed)
    scheduler = scheduler_of(engines, slots)
    unfinished: set[int] = set()
    key, number = 0, engines
    for _ in range(60):
        action = rng.integers(8)
        if action <= 2:
            for _ in range(rng.integers(1, 6)):
                scheduler.add(work(key, int(rng.integers(4)), int(rng.integers(1, 1000)), rng.random() < 0.1))
                unfinished.add(key)
                key += 1
        elif action == 3 and len(scheduler.engines) > 1:
            for lost in scheduler.remove_engine(int(rng.choice(list(scheduler.engines)))):
                scheduler.add(lost)
        elif action == 4:
            scheduler.add_engine(number, slots, lookahead=0)
            number += 1
        elif action == 5 and unfinished:
            one = int(rng.choice(sorted(unfinished)))
            assert scheduler.discard(one) is not None
            unfinished.remove(one)
        elif action == 6:
            for move in scheduler.moves():
                moved = scheduler.discard(move.key)
                assert moved is not None
                if not scheduler.place(moved, move.target):
                    scheduler.add(moved)
        else:
            for load in scheduler.engines.values():
                for one in list(load.running)[: rng.integers(0, slots + 1)]:
                    scheduler.discard(one)
                    unfinished.remove(one)  # type: ignore[arg-type]
        for engine, given_work in scheduler.assign():
            assert given_work.engine == engine
            assert given_work.key in scheduler.engines[engine].running
        assert set(scheduler.works) == unfinished
        running = [one for load in scheduler.engines.values() for one in load.running]
        assert len(running) == len(set(running)) == scheduler.running
    for _ in range(10_000):
        if not scheduler.works:
            break
        scheduler.assign()
        load = max(scheduler.engines.values(), key=lambda load: len(load.running))
        assert load.running, "works wait and no engine has any"
        scheduler.discard(next(iter(load.running)))
    assert not scheduler.works
    assert scheduler.waiting == 0


def test_lengths_are_expected_as_they_were() -> None:
    lengths = LengthHistory()
    assert lengths.expected("a", 100) == 100
    lengths.record("a", 10)
    assert lengths.expected("a", 100) == 10
    assert lengths.expected("b", 100) == 10
    for _ in range(20):
        lengths.record("a", 50)
    assert 45 < lengths.expected("a", 100) <= 50
    assert lengths.expected("a", 20) == 20

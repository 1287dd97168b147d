"""A request whose drafts fail stops paying within a few steps, is asked again cheaply, and recovers."""

from __future__ import annotations

import itertools

from rollout_spec.draft.trust import Patience, Trust


def test_drafts_as_good_as_expected_are_trusted_fully() -> None:
    trust = Trust()
    for step in range(100):
        trust.verified(2.0, (1, 3)[step % 2])
        assert trust.factor == 1.0


def test_drafts_that_fail_are_soon_distrusted() -> None:
    trust = Trust()
    factors = []
    for _ in range(8):
        trust.verified(3.0, 0)
        factors.append(trust.factor)
    assert factors == sorted(factors, reverse=True)
    assert factors[4] < 0.5


def test_distrust_fades_while_nothing_is_drafted_and_after_success() -> None:
    idle, successful = Trust(), Trust()
    for trust in (idle, successful):
        for _ in range(10):
            trust.verified(3.0, 0)
    for _ in range(150):
        idle.idle()
    for _ in range(25):
        successful.verified(2.0, 2)
    assert idle.factor > 0.9
    assert successful.factor > 0.9


def asked(patience: Patience, steps: int, longest_wait: int) -> list[int]:
    """The steps in which it is asked, in vain."""
    times = []
    for step in range(steps):
        if patience.is_over():
            times.append(step)
            patience.tried(longest_wait)
    return times


def test_what_never_pays_is_asked_ever_more_seldom_but_never_given_up() -> None:
    times = asked(Patience(), 200, longest_wait=15)
    waits = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert waits[:4] == [2, 4, 8, 16]
    assert set(waits[4:]) == {16}


def test_asking_that_costs_nothing_is_never_put_off() -> None:
    assert asked(Patience(), 10, longest_wait=0) == list(range(10))


def test_a_reward_ends_the_waiting() -> None:
    patience = Patience()
    asked(patience, 50, longest_wait=15)
    patience.rewarded()
    assert patience.is_over()
    assert patience.fruitless == 0


def test_a_text_that_begins_to_repeat_is_noticed_each_time_it_repeats_for_longer() -> None:
    trust, noticed = Trust(), []
    for familiar in range(100):
        if trust.newly_familiar(familiar):
            noticed.append(familiar)
            trust.familiar = familiar
    assert noticed == [4, 12, 28, 60]

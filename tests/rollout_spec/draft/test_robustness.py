"""Whatever is learnt and asked, the tables stay sound and the memory bounded."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_spec.draft import DraftConfig, TrieDrafter
from rollout_spec.draft import counts as table
from rollout_spec.draft.history import BYTES_PER_TOKEN, History
from rollout_spec.errors import DraftError, UnknownRequestError

CAPACITIES = (1, 2, 50, 300, 3_000)
VOCABULARIES = (1, 2, 5, 300, 2**31)
ROOT = Path(__file__).parents[3]


def assert_sound(history: History) -> None:
    """Every pair lies in one of its context's two lines, and the control array counts them."""
    slots, control = history.slots, history.control
    lines, mask = int(control[table.LINES]), int(control[table.MASK])
    assert mask == (1 << (lines - 1).bit_length()) - 1
    assert lines <= control[table.MAX_LINES]
    assert not slots[lines * table.LINE :].any()
    assert ((slots[:, 0] == 0) == (slots[:, 1] == 0)).all()
    at = np.flatnonzero(slots[:, 0])
    assert len(at) == control[table.USED]
    keys = slots[at, 0] >> 16
    homes = np.array([table.homes(int(key), lines, mask) for key in keys[:500]]).reshape(-1, 2)
    assert (homes == at[:500, None] // table.LINE).any(1).all()
    assert np.unique(keys, return_counts=True)[1].max(initial=0) <= table.FOLLOWERS
    held = table.unpacked(slots, history.ages)
    assert (held["count"] > 0).all()
    assert (held["token"] >= 0).all()
    assert np.isfinite(history.weights).all()
    assert (history.weights > 0).all()
    assert ((history.calibration >= 0) & (history.calibration <= 1)).all()


def work_at_random(seed: int, steps: int) -> TrieDrafter:
    """A drafter after many calls of all kinds, whose every answer was looked at."""
    rng = np.random.default_rng(seed)
    vocabulary, min_prob = int(rng.choice(VOCABULARIES)), float(rng.choice([1e-9, 1e-3, 0.3]))
    drafter = TrieDrafter(
        DraftConfig(
            capacity_tokens=int(rng.choice(CAPACITIES)),
            max_match=int(rng.integers(1, 17)),
            branching=bool(rng.random() < 0.8),
            min_prob=min_prob,
            version_decay=float(rng.choice([0.01, 0.9, 1.0])),
        )
    )
    often = np.minimum(rng.zipf(1.3, 5_000), vocabulary) - 1

    def tokens(most: int) -> np.ndarray:
        number = int(rng.choice([0, 1, 2, most]))
        begin = int(rng.integers(0, len(often) - number))
        return rng.integers(0, vocabulary, number) if rng.random() < 0.5 else often[begin : begin + number]

    running: list[int] = []
    for step in range(steps):
        action = rng.random()
        if action < 0.15 or not running:
            request = int(rng.integers(200))
            drafter.start(request, tokens(3_000), None if rng.random() < 0.3 else int(rng.integers(6)))
            running = list({*running, request})
        elif action < 0.2:
            drafter.finish(running.pop(int(rng.integers(len(running)))))
        elif action < 0.6:
            drafter.extend(int(rng.choice(running)), tokens(300))
        elif action < 0.65:
            drafter.new_version(step)
        else:
            requests = rng.choice(running, int(rng.choice([1, 2, 70]))).tolist()
            budgets = rng.integers(-3, 80, len(requests))
            for tree, budget in zip(drafter.propose(requests, budgets.tolist()), budgets, strict=True):
                tree.validate(max_nodes=max(0, min(63, int(budget))), vocab_size=vocabulary)
                assert (tree.probs >= np.float32(min_prob)).all()
    return drafter


@pytest.mark.parametrize("seed", range(12))
def test_any_work_leaves_the_tables_sound(seed: int) -> None:
    assert_sound(work_at_random(seed, steps=150)._history)


def wide_drafts() -> list[int]:
    """Children of the root, for budgets from 1 to 63, where more tokens follow than any budget takes."""
    drafter = TrieDrafter(DraftConfig(capacity_tokens=3_000, min_prob=1e-12))
    for follower in range(1_000, 1_100):
        drafter.start("taught", [7], group_id="g")
        drafter.extend("taught", [follower])
    own = np.stack([np.full(100, 7), np.arange(2_000, 2_100)], 1).ravel()
    drafter.start("wide", [*own.tolist(), 7], group_id="g")
    budgets = range(1, 64)
    trees = [drafter.propose(["wide"], [budget])[0].validate(max_nodes=budget) for budget in budgets]
    return [int((tree.parents < 0).sum()) for tree in trees]


def test_a_root_with_more_followers_than_the_budget_gets_the_likeliest() -> None:
    children = wide_drafts()
    assert children[-1] >= 32
    assert children == sorted(children)


BOUNDS = """
import numpy as np
from rollout_spec.draft import DraftConfig, TrieDrafter
from tests.rollout_spec.draft.test_robustness import wide_drafts, work_at_random

for seed in range(100, 112):
    work_at_random(seed, steps=120)
wide_drafts()
drafter = TrieDrafter(DraftConfig())
workspace = drafter._workspaces[0]
small = workspace.evidence._replace(entry_count=np.empty(2, np.float32))
drafter._workspaces[0] = workspace._replace(evidence=small)
drafter.start("a", [1, 2, 3, 1, 2, 4] * 9)
try:
    drafter.propose(["a"], [20])
except IndexError:
    print("bounds are checked")
"""


def test_compiled_code_never_indexes_out_of_bounds(pytestconfig: pytest.Config) -> None:
    """A second compilation, with checks, which is kept between runs of the tests."""
    environment = {
        **os.environ,
        "NUMBA_BOUNDSCHECK": "1",
        "NUMBA_CACHE_DIR": str(pytestconfig.cache.mkdir("numba_boundscheck")),
    }
    result = subprocess.run(
        [sys.executable, "-c", BOUNDS],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.stdout == "bounds are checked\n", result.stderr


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_stays_under_its_cap_however_long_it_learns() -> None:
    rng = np.random.default_rng(0)
    capacity = 40_000
    drafter = TrieDrafter(DraftConfig(capacity_tokens=capacity))
    drafter.start("a", [1])
    drafter.extend("a", [1])
    drafter.propose(["a"], [4])
    drafter.finish("a")

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    fixed = drafter.memory_bytes - drafter._history.used_slots.nbytes
    before = resident_bytes()
    for number in range(100):
        drafter.start(number, rng.integers(0, 2**31, 20))
        drafter.extend(number, rng.integers(0, 2**31, 4_000))
        drafter.finish(number)
        assert drafter.memory_bytes <= fixed + capacity * BYTES_PER_TOKEN + 4_020 * 90
    assert drafter._history.control[table.LINES] == drafter._history.control[table.MAX_LINES]
    assert resident_bytes() - before < capacity * BYTES_PER_TOKEN + (2 << 20)


@pytest.mark.parametrize("pattern", [[7], [7, 8], list(range(40)), [0, 2**31 - 1]])
def test_a_pattern_repeated_costs_linear_time_and_constant_memory(pattern: list[int]) -> None:
    drafter = TrieDrafter(DraftConfig())
    drafter.start("a", pattern * 2)
    seconds = []
    text = np.tile(pattern, 100_000 // len(pattern))
    for _ in range(4):
        begin = time.perf_counter()
        drafter.extend("a", text)
        drafter.propose(["a"], [63])
        seconds.append(time.perf_counter() - begin)
    assert seconds[-1] < 10 * min(seconds) + 0.1  # a quadratic algorithm would take minutes
    assert drafter._history.used_slots.nbytes < 300_000
    assert drafter.propose(["a"], [8])[0].tokens.tolist() == (pattern * 8)[:8]


def test_a_draft_costs_no_more_after_a_long_prompt_that_repeats_itself() -> None:
    """Nothing but the prompt knows what comes, so that its places are searched at every node."""
    seconds = {}
    for length in (1_000, 400_000):
        drafter = TrieDrafter(DraftConfig(capacity_tokens=100))
        drafter.start("a", np.tile([7, 8], length // 2))
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            drafter.propose(["a"], [63])
            times.append(time.perf_counter() - begin)
        seconds[length] = min(times)
    assert seconds[400_000] < 5 * seconds[1_000] + 0.002


@pytest.mark.parametrize(
    "convert",
    [
        list,
        tuple,
        lambda tokens: np.array(tokens, np.int64),
        lambda tokens: np.array(tokens, np.uint32),
        lambda tokens: np.array(tokens, ">i4"),
        lambda tokens: np.repeat(np.array(tokens, np.int32), 3)[::3],
        lambda tokens: [np.int32(token) for token in tokens],
        lambda tokens: np.frombuffer(
            np.array(tokens, np.int32).tobytes(), np.int32
        ),  # read-only, as JAX's are
        range,
    ],
    ids=["list", "tuple", "int64", "uint32", "big-endian", "strided", "list of int32", "read-only", "range"],
)
def test_tokens_come_in_any_form(convert: Callable[[Any], Any]) -> None:
    from rollout_spec.draft import kernels

    drafter = TrieDrafter(DraftConfig(capacity_tokens=100))
    drafter.start("plain", [1])
    drafter.extend("plain", [2])
    variants = len(kernels.learn_all.signatures), len(kernels.learn_prompt.signatures)
    tokens = range(20, 30) if convert is range else [0, 2**31 - 1, 5, 6, 7, 8, 9, 10]
    given = tokens if convert is range else convert(tokens)
    drafter.start("a", given)
    drafter.extend("a", given)
    drafter.extend("a", given[:2])
    assert drafter.propose(["a"], np.array([4], np.int32))[0].tokens.tolist() == list(tokens)[2:6]  # type: ignore[arg-type]
    assert variants == (
        len(kernels.learn_all.signatures),
        len(kernels.learn_prompt.signatures),
    )  # none was compiled


def test_budgets_may_be_anything_from_none_to_too_many() -> None:
    drafter = TrieDrafter(DraftConfig(capacity_tokens=100, min_prob=1e-20))
    for number in range(5):
        drafter.start(number, list(range(80)) * 2)
    trees = drafter.propose(range(5), [-7, 0, 1, 63, 10**9])
    assert [len(tree) for tree in trees] == [0, 0, 1, 63, 63]
    assert trees[3].tokens.tolist() == list(range(63))
    assert [len(tree) for tree in drafter.propose(range(5), [-1] * 5)] == [0] * 5
    for budget in (0, 4):
        with pytest.raises(UnknownRequestError, match="nobody"):
            drafter.propose(["nobody"], [budget])
    with pytest.raises(DraftError, match="budget"):
        drafter.propose([0], [])


def test_a_request_without_a_token_gets_no_draft_until_it_has_one() -> None:
    drafter = TrieDrafter(DraftConfig(capacity_tokens=100))
    drafter.start("taught", [7])
    drafter.extend("taught", [8, 9])
    drafter.start("empty", [])
    assert len(drafter.propose(["empty"], [8])[0]) == 0
    drafter.extend("empty", [7])
    assert drafter.propose(["empty"], [8])[0].tokens.tolist() == [8, 9]


def test_ages_stay_right_over_any_number_of_versions() -> None:
    """Ticks are counted modulo TICKS: what is old must not become new when they come round."""
    drafter = TrieDrafter(DraftConfig(capacity_tokens=1_000, version_decay=0.999))
    for _ in range(3):
        drafter.start("old", [1, 2, 3], group_id="g")
        drafter.extend("old", [40])
    held = []
    for version in range(2 * table.TICKS + 10):
        drafter.new_version(version)
        held.append(float(table.unpacked(drafter._history.used_slots, drafter._history.ages)["count"].max()))
    assert max(held[1_000:]) <= held[999]
    assert held[99] == pytest.approx(3 * 0.999**100, rel=1e-3)
    drafter.start("new", [1, 2, 3], group_id="g")
    drafter.extend("new", [50])
    drafter.start("ask", [1, 2, 3], group_id="g")
    assert drafter.propose(["ask"], [1])[0].tokens.tolist() == [50]


def test_the_ticks_of_a_small_capacity_come_round_without_harm() -> None:
    rng = np.random.default_rng(0)
    drafter = TrieDrafter(DraftConfig(capacity_tokens=64))  # a tick a token
    for _ in range(5):
        drafter.start("a", rng.integers(0, 30, 10))
        drafter.extend("a", rng.integers(0, 30, table.TICKS // 2))
    assert_sound(drafter._history)
    drafter.extend("a", [*range(100, 130), *range(100, 110)])
    drafter.start("ask", range(100, 120))
    assert drafter.propose(["ask"], [1])[0].tokens.tolist() == [120]

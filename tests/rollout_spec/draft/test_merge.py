"""Two histories merge into what learning both would have given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rollout_spec.draft import DraftConfig, TrieDrafter
from rollout_spec.draft import counts as table
from rollout_spec.errors import HistoryError
from tests.rollout_spec.draft.test_counts import evidence_of

Text = tuple[int, list[int]]  # the group it belongs to, its tokens

VOCABULARY = 12
GROUPS = 3


def texts(seed: int, number: int = 4, length: int = 30) -> list[Text]:
    rng = np.random.default_rng(seed)
    return [(number % GROUPS, rng.integers(0, VOCABULARY, length).tolist()) for number in range(number)]


def learnt(*learn: list[Text], capacity_tokens: int = 100_000, max_match: int = 2) -> TrieDrafter:
    drafter = TrieDrafter(DraftConfig(capacity_tokens=capacity_tokens, max_match=max_match))
    for number, (group, tokens) in enumerate(text for part in learn for text in part):
        drafter.start(number, tokens[:1], group_id=group)
        drafter.extend(number, tokens[1:])
        drafter.finish(number)
    return drafter


def after_each_token(drafter: TrieDrafter) -> dict[tuple[str, int, int], Counter[int]]:
    """What every group sees after every one-token context."""
    found = {}
    for group in range(GROUPS):
        for token in range(VOCABULARY):
            drafter.start("ask", [token], group_id=group)
            for (source, _), counts in evidence_of(drafter, "ask").items():
                found[source, group, token] = counts
            drafter.finish("ask")
    return found


@pytest.mark.parametrize("shared", [False, True])
def test_merging_gives_what_learning_both_gives_everywhere_and_by_group(tmp_path: Path, shared: bool) -> None:
    one = texts(1)
    two = one[:2] + texts(2)[2:] if shared else texts(2)
    learnt(two).save(tmp_path / "history")
    merged = learnt(one)
    merged.merge(tmp_path / "history")
    both = learnt(one, two)
    assert after_each_token(merged) == after_each_token(both)
    assert merged.tokens_learnt == both.tokens_learnt
    counted = after_each_token(both)["everything", 0, 0]
    assert len(counted) > table.FOLLOWERS  # so that contexts of several levels are merged too


def test_merging_with_itself_doubles_every_count(tmp_path: Path) -> None:
    drafter = learnt(texts(1))
    once = after_each_token(drafter)
    drafter.save(tmp_path / "history")
    drafter.merge(tmp_path / "history")
    assert after_each_token(drafter) == {key: counts + counts for key, counts in once.items()}


def test_counts_near_their_limit_keep_their_proportion(tmp_path: Path) -> None:
    drafter = TrieDrafter(DraftConfig(capacity_tokens=1_000, max_match=1))
    drafter.start("a", [])
    drafter.extend("a", [1, 2, 1, 2, 1, 2, 1, 3] * 1_000 + [50, 1])
    drafter.save(tmp_path / "history")
    for _ in range(3):
        drafter.merge(tmp_path / "history")
        seen = evidence_of(drafter, "a")["everything", 0]
        assert seen[2] / seen[3] == pytest.approx(3, rel=0.02)


@pytest.mark.parametrize("into", ["fresh", "old"])
def test_each_sighting_keeps_its_age(tmp_path: Path, into: str) -> None:
    drafters = {
        name: TrieDrafter(DraftConfig(capacity_tokens=1_000, version_decay=0.5)) for name in ("old", "fresh")
    }
    for name, drafter in drafters.items():
        if name == "fresh":
            for version in range(4):
                drafter.new_version(version)
        for number in range(8):
            drafter.start(number, [1], group_id="g")
            drafter.extend(number, [2])
            drafter.finish(number)
        if name == "old":
            for version in range(4):
                drafter.new_version(version)
    other = drafters["old" if into == "fresh" else "fresh"]
    other.save(tmp_path / "history")
    drafters[into].merge(tmp_path / "history")
    drafters[into].start("ask", [1], group_id="g")
    assert evidence_of(drafters[into], "ask")["everything", 0][2] == pytest.approx(8 + 8 / 16, abs=0.05)


def test_merging_into_a_smaller_capacity_stays_under_its_cap(tmp_path: Path) -> None:
    learnt(texts(1, 50, 100), max_match=16).save(tmp_path / "history")
    small = TrieDrafter(DraftConfig(capacity_tokens=200))
    used = [5, 6, 7, 8, 9, 10, 11] * 4
    small.start("used", used[:1])
    small.extend("used", used[1:])
    small.merge(tmp_path / "history")
    assert small._history.used_slots.nbytes <= 200 * 128
    assert np.count_nonzero(small._history.slots[:, 0]) == small._history.control[table.USED]
    small.start("ask", used[:9], group_id="other")
    assert small.propose(["ask"], [1])[0].tokens.tolist() == [used[9]]


def truncated(whole: bytes) -> bytes:
    return whole[:-1]


def foreign(whole: bytes) -> bytes:
    return b"PK\x03\x04" + whole[4:]


def altered(whole: bytes) -> bytes:
    return whole[:-5] + bytes([whole[-5] ^ 4]) + whole[-4:]


@pytest.mark.parametrize("spoil", [truncated, foreign, altered])
def test_merging_a_file_that_is_not_whole_is_refused_and_changes_nothing(
    tmp_path: Path, spoil: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "history"
    learnt(texts(2)).save(path)
    path.write_bytes(spoil(path.read_bytes()))
    drafter = learnt(texts(1))
    before = [array.copy() for array in drafter._state()]
    with pytest.raises(HistoryError):
        drafter.merge(path)
    for was, now in zip(before, drafter._state(), strict=True):
        assert (was == now).all()

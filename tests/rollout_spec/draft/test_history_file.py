"""Saved history: the same drafts after loading, and clear errors for files that are not whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollout_spec.draft import DraftConfig, TrieDrafter
from rollout_spec.draft.history_file import FORMAT_VERSION, write_file
from rollout_spec.errors import HistoryError
from rollout_spec.tree import DraftTree


def trained(capacity_tokens: int = 50_000) -> TrieDrafter:
    rng = np.random.default_rng(0)
    drafter = TrieDrafter(DraftConfig(capacity_tokens=capacity_tokens))
    for number in range(20):
        drafter.start(number, rng.integers(0, 9, 5), group_id=f"group {number % 4}")
        for _ in range(20):
            drafter.propose([number], [8])
            drafter.extend(number, rng.integers(0, 9, 10))
        drafter.finish(number)
    drafter.new_version(3)
    return drafter


def drafts(drafter: TrieDrafter) -> list[DraftTree]:
    rng = np.random.default_rng(1)
    for number in range(10):
        drafter.start(number, rng.integers(0, 9, 12), group_id=f"group {number % 4}")
    trees = drafter.propose(range(10), [16] * 10)
    for number in range(10):
        drafter.finish(number)
    return trees


def test_a_loaded_history_drafts_the_same(tmp_path: Path) -> None:
    drafter = trained()
    drafter.save(tmp_path / "history")
    other = TrieDrafter(DraftConfig(capacity_tokens=50_000))
    other.start("kept", [1, 2, 3, 1, 2])
    other.load(tmp_path / "history")
    assert other.tokens_learnt == drafter.tokens_learnt
    for one, two in zip(drafts(drafter), drafts(other), strict=True):
        assert one.tokens.tolist() == two.tokens.tolist()
        assert one.parents.tolist() == two.parents.tolist()
        assert one.probs.tolist() == two.probs.tolist()
    assert len(other.propose(["kept"], [4])[0]) == 4  # a running request goes on
    assert list(tmp_path.iterdir()) == [tmp_path / "history"]


def test_a_history_too_large_is_cut_down(tmp_path: Path) -> None:
    drafter = trained()
    drafter.save(tmp_path / "history")
    small = TrieDrafter(DraftConfig(capacity_tokens=500))
    empty = small.memory_bytes
    small.load(tmp_path / "history")
    assert small.memory_bytes <= empty + 500 * 128
    assert all(len(tree) for tree in drafts(small))


def test_files_that_are_not_whole_are_refused_and_change_nothing(tmp_path: Path) -> None:
    drafter = trained()
    path = tmp_path / "history"
    drafter.save(path)
    whole = path.read_bytes()
    before = [tree.tokens.tolist() for tree in drafts(drafter)]
    altered = bytearray(whole)
    altered[len(whole) // 2] ^= 1
    header = bytearray(whole)
    header[40] ^= 1
    newer = bytearray(whole)
    newer[16] += 1
    for content, message in (
        (b"", "not a history file"),
        (b"PK\x03\x04" + whole[4:], "not a history file"),
        (whole[:20], "not a history file"),
        (whole[:60], "header"),
        (bytes(header), "header"),
        (bytes(newer), f"format {FORMAT_VERSION + 1}"),
        (whole[:-1], "cut short"),
        (whole[: len(whole) // 3], "cut short"),
        (bytes(altered), "altered"),
    ):
        path.write_bytes(content)
        with pytest.raises(HistoryError, match=message):
            drafter.load(path)
    write_file(path, {}, {"slots": np.zeros(4, np.float32)})
    with pytest.raises(HistoryError, match="slots of int64"):
        drafter.load(path)
    assert [tree.tokens.tolist() for tree in drafts(drafter)] == before
    with pytest.raises(FileNotFoundError):
        drafter.load(tmp_path / "missing")

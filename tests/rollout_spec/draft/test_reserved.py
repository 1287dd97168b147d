"""Reserved memory, and files laid over it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from rollout_spec.draft import DraftConfig, TrieDrafter
from rollout_spec.draft import counts as table
from rollout_spec.draft.reserved import map_file, reserve
from rollout_spec.tree import DraftTree

PAGE = mmap.ALLOCATIONGRANULARITY


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def taught(seed: int = 0, capacity_tokens: int = 20_000) -> TrieDrafter:
    rng = np.random.default_rng(seed)
    drafter = TrieDrafter(DraftConfig(capacity_tokens=capacity_tokens))
    for number in range(8):
        drafter.start(number, rng.integers(0, 9, 4), group_id=number % 2)
        drafter.extend(number, rng.integers(0, 9, 200))
        drafter.finish(number)
    return drafter


def drafts(drafter: TrieDrafter) -> list[list[float]]:
    rng = np.random.default_rng(9)
    for number in range(8):
        drafter.start(("ask", number), rng.integers(0, 9, 10), group_id=number % 2)
    trees: list[DraftTree] = drafter.propose([("ask", number) for number in range(8)], [16] * 8)
    for number in range(8):
        drafter.finish(("ask", number))
    return [[*tree.tokens.tolist(), *tree.parents.tolist(), *tree.probs.tolist()] for tree in trees]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_reserved_memory_is_zero_and_taken_only_as_it_is_written() -> None:
    before = resident_bytes()
    region = reserve(1 << 30)
    assert region.shape == (1 << 30,)
    assert region.ctypes.data % mmap.PAGESIZE == 0
    assert resident_bytes() - before < 1 << 24
    region[::100_000_000] = 1
    assert region[99_999_990:100_000_010].sum() == 1


def test_a_mapped_file_shows_its_content_and_never_changes(tmp_path: Path) -> None:
    content = np.arange(3 * PAGE + 100, dtype=np.uint32).view(np.uint8)[: 3 * PAGE + 100]
    (tmp_path / "file").write_bytes(content.tobytes())
    region = reserve(8 * PAGE)
    with open(tmp_path / "file", "rb") as file:
        assert map_file(region, file, PAGE, 2 * PAGE + 100)
    assert (region[: 2 * PAGE + 100] == content[PAGE:]).all()
    assert not region[2 * PAGE + 100 :].any()
    region[:] = 7
    assert (tmp_path / "file").read_bytes() == content.tobytes()


@pytest.mark.parametrize(("offset", "size_bytes"), [(PAGE + 8, 100), (0, 0)])
def test_what_can_not_be_mapped_is_left_to_the_caller(tmp_path: Path, offset: int, size_bytes: int) -> None:
    (tmp_path / "file").write_bytes(bytes([1]) * 2 * PAGE)
    region = reserve(PAGE)
    with open(tmp_path / "file", "rb") as file:
        assert not map_file(region, file, offset, size_bytes)
    assert not region.any()


def test_a_history_that_can_not_be_mapped_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taught().save(tmp_path / "history")
    other = TrieDrafter(DraftConfig(capacity_tokens=20_000))
    monkeypatch.setattr("rollout_spec.draft.history.map_file", lambda *arguments: False)
    other.load(tmp_path / "history")
    assert drafts(other) == drafts(taught())


@pytest.mark.parametrize("change", ["delete", "replace by a smaller one", "save over"])
def test_a_loaded_history_outlives_its_file(tmp_path: Path, change: str) -> None:
    path = tmp_path / "history"
    original = taught()
    original.save(path)
    loaded = TrieDrafter(DraftConfig(capacity_tokens=20_000))
    loaded.load(path)
    if change == "delete":
        path.unlink()
    elif change == "save over":
        loaded.save(path)
    else:
        (tmp_path / "other").write_bytes(b"short")
        os.replace(tmp_path / "other", path)
    assert drafts(loaded) == drafts(original)
    for drafter in (original, loaded):
        drafter.start("more", [1, 2], group_id=1)
        drafter.extend("more", np.random.default_rng(5).integers(0, 9, 3_000))
    assert drafts(loaded) == drafts(original)
    if change == "save over":
        assert drafts(_loaded(path)) == drafts(taught())


def _loaded(path: Path) -> TrieDrafter:
    drafter = TrieDrafter(DraftConfig(capacity_tokens=20_000))
    drafter.load(path)
    return drafter


def test_learning_after_a_load_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "history"
    taught().save(path)
    before = path.read_bytes()
    for turn in range(2):  # a file may be loaded more than once, into one drafter too
        loaded = _loaded(path)
        for _ in range(2):
            loaded.load(path)
            assert drafts(loaded) == drafts(taught()), turn
            loaded.start("more", [1])
            loaded.extend("more", np.random.default_rng(5).integers(0, 9, 2_000))
            loaded.finish("more")
    assert path.read_bytes() == before


def test_the_table_beyond_a_loaded_history_is_empty(tmp_path: Path) -> None:
    original = taught()
    original.save(tmp_path / "history")
    loaded = _loaded(tmp_path / "history")
    lines = int(loaded._history.control[table.LINES])
    assert lines == original._history.control[table.LINES]
    assert not loaded._history.slots[lines * table.LINE :].any()


@pytest.mark.parametrize("saved_capacity", [1, 100, 200_000])
def test_a_history_loads_into_any_capacity(tmp_path: Path, saved_capacity: int) -> None:
    taught(capacity_tokens=saved_capacity).save(tmp_path / "history")
    for capacity in (1, 100, 200_000):
        loaded = TrieDrafter(DraftConfig(capacity_tokens=capacity))
        loaded.load(tmp_path / "history")
        assert loaded.tokens_learnt == 8 * 200
        assert loaded._history.used_slots.nbytes <= capacity * 128
        assert np.count_nonzero(loaded._history.slots[:, 0]) == loaded._history.control[table.USED]
        loaded.start("more", [1])
        loaded.extend("more", np.random.default_rng(5).integers(0, 9, 500))
        loaded.propose(["more"], [63])[0].validate()
        assert np.count_nonzero(loaded._history.slots[:, 0]) == loaded._history.control[table.USED]

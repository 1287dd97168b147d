"""Saved history: the same drafts after loading, and clear errors for files that are not whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_spec.draft import DraftConfig, TrieDrafter, history_file
from rollout_spec.draft import counts as table
from rollout_spec.draft.history import History
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


def saved(path: Path) -> bytes:
    drafter = TrieDrafter(DraftConfig(capacity_tokens=2_000))
    drafter.start("a", [1, 2])
    drafter.extend("a", np.random.default_rng(0).integers(0, 5, 100))
    drafter.new_version(np.int64(7))  # type: ignore[arg-type]
    drafter.save(path)
    return path.read_bytes()


def assert_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    for read in ("load", "merge"):
        drafter = TrieDrafter(DraftConfig(capacity_tokens=50))
        drafter.start("a", [1, 2])
        drafter.extend("a", [3])
        before = [array.copy() for array in drafter._history._small_arrays().values()]
        slots = drafter._history.slots.copy()
        with pytest.raises(HistoryError):
            getattr(drafter, read)(path)
        assert (drafter._history.slots == slots).all()
        for was, now in zip(before, drafter._history._small_arrays().values(), strict=True):
            assert (was == now).all()


def test_every_altered_byte_is_noticed(tmp_path: Path) -> None:
    whole = saved(tmp_path / "history")
    rng = np.random.default_rng(0)
    header = 28 + int.from_bytes(whole[20:24], "little")
    places = [*range(28), *rng.integers(28, len(whole), 40), header - 1, header, len(whole) - 1]
    for place in places:
        altered = bytearray(whole)
        altered[place] ^= 1 << int(rng.integers(8))
        assert_refused(tmp_path / "altered", bytes(altered))


def test_every_other_length_is_noticed(tmp_path: Path) -> None:
    whole = saved(tmp_path / "history")
    header = 28 + int.from_bytes(whole[20:24], "little")
    boundaries = [0, 1, 15, 16, 20, 27, 28, header - 1, header, header + 1]
    for boundary in range(history_file.ALIGNMENT, len(whole), history_file.ALIGNMENT):
        boundaries += [boundary - 1, boundary, boundary + 1]
    for length in [*boundaries, len(whole) - 1]:
        assert_refused(tmp_path / "cut", whole[:length])
    for added in (b"\0", b"x", bytes(5_000), whole):
        assert_refused(tmp_path / "longer", whole + added)


ARRAY = {"name": "slots", "dtype": "<i8", "shape": [0], "bytes": 0, "crc32": 0}
WRONG_ENTRIES: list[dict[str, Any]] = [
    {"name": []},
    {"name": None},
    {"dtype": "O"},
    {"dtype": "nonsense"},
    {"dtype": "S0"},
    {"dtype": None},
    {"shape": [7]},
    {"shape": "text"},
    {"shape": None},
    {"shape": [-1]},
    {"shape": [0, 2**70]},
    {"bytes": "8"},
    {"bytes": -8},
    {"bytes": 2**70, "shape": [2**67]},
    {"crc32": "0"},
    {"more": 1},
]
WRONG_HEADERS: list[Any] = [
    None,
    3,
    "text",
    [],
    {},
    {"facts": {}},
    {"facts": {}, "arrays": 3},
    {"facts": 3, "arrays": []},
    {"facts": None, "arrays": []},
    {"facts": {}, "arrays": [3]},
    {"facts": {}, "arrays": [{"name": "slots"}]},
    *({"facts": {}, "arrays": [ARRAY | wrong]} for wrong in WRONG_ENTRIES),
]


@pytest.mark.parametrize("content", WRONG_HEADERS, ids=str)
def test_a_header_of_another_form_is_refused(tmp_path: Path, content: object) -> None:
    header = json.dumps(content).encode()
    prefix = history_file._PREFIX.pack(history_file.FORMAT_VERSION, len(header), zlib.crc32(header))
    assert_refused(tmp_path / "history", history_file.MAGIC + prefix + header)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("MASK", 1 << 30),
        ("TICK", table.TICKS),
        ("TICK", -1),
        ("USED", -5),
        ("LINES", 0),
        ("LINES", 7),
        ("TOKENS", -1),
    ],
)
def test_a_control_array_that_contradicts_the_table_is_refused(
    tmp_path: Path, entry: str, value: int
) -> None:
    history = History(50, 0.9)
    history.control[getattr(table, entry)] = value
    facts = {"weight_version": 0, "weight_updates": 0}
    slots = (
        history.slots[: max(0, 4 * int(history.control[table.LINES]))] if entry != "LINES" else history.slots
    )
    history_file.write_file(tmp_path / "written", facts, {**history._small_arrays(), "slots": slots})
    assert_refused(tmp_path / "history", (tmp_path / "written").read_bytes())


@pytest.mark.parametrize(
    "facts", [{}, {"weight_version": "x"}, {"weight_version": 1.5}, {"weight_version": None}]
)
def test_facts_of_another_form_are_refused(tmp_path: Path, facts: dict[str, Any]) -> None:
    history = History(50, 0.9)
    arrays = {**history._small_arrays(), "slots": history.used_slots}
    history_file.write_file(tmp_path / "written", {"weight_updates": 0, **facts}, arrays)
    assert_refused(tmp_path / "history", (tmp_path / "written").read_bytes())


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    """The disk is full, as far as this process can tell: files may not grow beyond 100 kB."""
    before = saved(tmp_path / "history")
    code = f"""
import resource, signal
from rollout_spec.draft import DraftConfig, TrieDrafter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    TrieDrafter(DraftConfig(capacity_tokens=2_000)).save({str(tmp_path / "history")!r})
except OSError as error:
    print(type(error).__name__)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "OSError\n"
    assert list(tmp_path.iterdir()) == [tmp_path / "history"]
    assert (tmp_path / "history").read_bytes() == before
    drafter = TrieDrafter(DraftConfig(capacity_tokens=50))
    for place in (tmp_path / "missing" / "history", tmp_path):
        with pytest.raises((OSError, HistoryError), match=str(place)):
            drafter.save(place)
    assert list(tmp_path.iterdir()) == [tmp_path / "history"]


def test_a_saved_file_may_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        saved(tmp_path / "history")
    finally:
        os.umask(before)
    assert (tmp_path / "history").stat().st_mode & 0o777 == 0o644

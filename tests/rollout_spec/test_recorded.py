"""Recorded rollouts: both forms read alike, and anything else is refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rollout_spec.errors import HistoryError
from rollout_spec.recorded import Workload, load_workload

LINES = [
    {"epoch": 0, "prompt_token_ids": [1, 2], "completions": [{"token_ids": [3, 4]}, {"token_ids": [3]}]},
    {"epoch": 0, "prompt_token_ids": [5], "completions": [[6, 7, 8]]},
    {"epoch": 1, "prompt_token_ids": [1, 2], "completions": [{"token_ids": [4, 4]}]},
]
TOKENS = [1, 2, 3, 4, 3, 5, 6, 7, 8, 4, 4]
ROWS = [
    [0, 0, 0, 0, 2, 2, 2],
    [0, 0, 1, 0, 2, 4, 1],
    [0, 1, 0, 5, 1, 6, 3],
    [1, 0, 0, 0, 2, 9, 2],
]


def content(workload: Workload) -> list[tuple]:
    return [
        (one.epoch, one.prompt_number, one.sample, one.prompt.tolist(), one.tokens.tolist())
        for one in workload.completions
    ]


def test_lines_and_arrays_are_read_alike(tmp_path: Path) -> None:
    lines, arrays = tmp_path / "rollouts.jsonl", tmp_path / "rollouts.npz"
    lines.write_text("\n".join(map(json.dumps, LINES)) + "\n\n")
    np.savez(arrays, tokens=np.array(TOKENS), rows=np.array(ROWS))
    assert content(load_workload(lines)) == content(load_workload(arrays))
    assert load_workload(lines).epochs == [0, 1]
    assert load_workload(lines).num_tokens == 8


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        '{"prompt_token_ids": [1]}',
        '{"prompt_token_ids": [], "completions": [[1]]}',
        '{"prompt_token_ids": [1], "completions": [[1.5]]}',
        '{"prompt_token_ids": [1], "completions": [[-1]]}',
        '{"prompt_token_ids": "1 2", "completions": [[1]]}',
        '{"prompt_token_ids": [1], "completions": 3}',
    ],
)
def test_other_text_is_refused_with_what_was_expected(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(text)
    with pytest.raises(HistoryError, match="prompt_token_ids"):
        load_workload(path)


@pytest.mark.parametrize("row", [[0, 0, 0, 0, 2, 10, 9], [0, 0, 0, -3, 2, 2, 2], [0, 0, 0, 0, 0, 2, 2], [0]])
def test_rows_outside_the_tokens_are_refused(row: list[int], tmp_path: Path) -> None:
    path = tmp_path / "rollouts.npz"
    np.savez(path, tokens=np.array(TOKENS), rows=np.array([row]))
    with pytest.raises(HistoryError, match="expected"):
        load_workload(path)


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.npz"
    path.write_bytes(b"PK\x03\x04 broken")
    with pytest.raises(HistoryError, match="expected"):
        load_workload(path)
    with pytest.raises(OSError, match=r"none\.npz"):
        load_workload(tmp_path / "none.npz")

"""Recorded rollouts: prompts and the completions a policy wrote for them, to be replayed without the policy."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .errors import HistoryError

Order = Literal["staggered", "group"]

_FORMS = (
    "an .npz with `tokens` and `rows` (see `load_workload`), or JSON lines of "
    '{"epoch": 0, "prompt_token_ids": [...], "completions": [{"token_ids": [...]}, ...]}'
)


@dataclass(frozen=True, eq=False)
class Recorded:
    """One completion. prompt: int32[P]. tokens: int32[T], the completion's own."""

    epoch: int
    prompt_number: int
    sample: int
    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Workload:
    """Completions by epoch, prompt and sample. warm: int32[W], unrelated text to learn before, may be empty."""

    name: str
    completions: tuple[Recorded, ...]
    warm: NDArray[np.int32]

    @property
    def epochs(self) -> list[int]:
        return sorted({one.epoch for one in self.completions})

    @property
    def num_tokens(self) -> int:
        """Tokens of all completions, without prompts and warm text."""
        return sum(len(one.tokens) for one in self.completions)

    def epoch(self, number: int, order: Order = "staggered") -> list[Recorded]:
        """An epoch's completions as they are submitted.

        "staggered": every prompt's first sample, then every prompt's second one; "group": a prompt's samples side
        by side.
        """
        chosen = [one for one in self.completions if one.epoch == number]
        if order == "group":
            return sorted(chosen, key=lambda one: (one.prompt_number, one.sample))
        return sorted(chosen, key=lambda one: (one.sample, one.prompt_number))


def load_workload(path: Path) -> Workload:
    """Reads recorded rollouts.

    `.npz`: `tokens` int[N], all token ids in a row; `rows` int64[C, 7], for each completion its epoch, prompt and
    sample, and start and length of its prompt and of itself in `tokens`; perhaps `warm`, int[W]. Anything else is read
    as JSON lines, one prompt's completions a line, as `RolloutOutput` names them; equal prompts of one epoch are one
    group, and `epoch` may be left out where there is only one.

    Raises HistoryError for a file that is neither, OSError for one that can't be read.
    """
    try:
        workload = _from_arrays(path) if path.suffix == ".npz" else _from_lines(path)
    except (KeyError, TypeError, ValueError, IndexError, zipfile.BadZipFile) as error:
        raise HistoryError(
            f"{path} holds no recorded rollouts ({type(error).__name__}: {error}); expected {_FORMS}"
        ) from error
    if not workload.completions:
        raise HistoryError(f"{path} holds no completions; expected {_FORMS}")
    return workload


def _from_arrays(path: Path) -> Workload:
    with np.load(path) as data:
        tokens = data["tokens"].astype(np.int32)
        warm = data["warm"].astype(np.int32) if "warm" in data else np.empty(0, np.int32)
        rows = data["rows"].tolist()
    completions = []
    for epoch, number, sample, prompt_at, prompt_length, at, length in rows:
        prompt, own = tokens[prompt_at : prompt_at + prompt_length], tokens[at : at + length]
        if not (0 < len(prompt) == prompt_length and 0 < len(own) == length and min(prompt_at, at) >= 0):
            raise ValueError(f"the row of sample {sample} of prompt {number} lies outside the tokens")
        completions.append(Recorded(epoch, number, sample, prompt, own))
    return Workload(path.stem, tuple(completions), warm)


def _from_lines(path: Path) -> Workload:
    numbers: dict[bytes, int] = {}
    counts: dict[tuple[int, int], int] = {}
    completions = []
    for line_number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        entry = json.loads(line)
        if not isinstance(entry, Mapping):
            raise ValueError(f"line {line_number} is no object")
        epoch, prompt = int(entry.get("epoch", 0)), _ids(entry["prompt_token_ids"], line_number)
        number = numbers.setdefault(prompt.tobytes(), len(numbers))
        for completion in entry["completions"]:
            tokens = completion["token_ids"] if isinstance(completion, Mapping) else completion
            sample = counts.get((epoch, number), 0)
            counts[epoch, number] = sample + 1
            completions.append(Recorded(epoch, number, sample, prompt, _ids(tokens, line_number)))
    return Workload(path.stem, tuple(completions), np.empty(0, np.int32))


def _ids(values: Any, line_number: int) -> NDArray[np.int32]:
    ids = np.asarray(values)
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind != "i" or ids.min() < 0 or ids.max() >= 2**31:
        raise ValueError(f"line {line_number}: token ids must be a list of integers, at least one")
    return ids.astype(np.int32)

"""Watching a folder for new checkpoints, and telling whole ones from half-written ones."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..errors import ModelLoadError, WeightUpdateError
from ..loading import huggingface
from . import orbax
from .report import UpdateMode, WeightUpdateReport
from .sources import signature

_log = logging.getLogger(__name__)
_SHARE_OF_TIME = 0.01  # at most this share of the time goes into looking
_LAST_NUMBER = re.compile(r"(\d+)$")

Signature = tuple[tuple[str, int, int, int], ...]


class TakesWeights(Protocol):
    """What a watch needs of the engine."""

    @property
    def weight_version(self) -> int: ...

    def update_weights(
        self, weights: Any, *, version: int | None, mode: UpdateMode
    ) -> WeightUpdateReport: ...


@dataclass(frozen=True)
class Failure:
    """A checkpoint that was complete and refused all the same."""

    path: Path
    error: Exception


class CheckpointWatch:
    """Pushes each new complete checkpoint of a folder into an engine. `RolloutEngine.watch` makes one.

    A checkpoint is a folder of safetensors or of Orbax, either `path` itself or folders in it, the newest being the
    one with the highest number at the end of its name (without numbers, the one changed last). It is complete
    when every file that its index names is there and as long as its header says, or when Orbax has committed it; and
    when nothing in it has changed for `settle_s`. If it changes while it is read, the update is refused and it is
    tried again later. Of several that appeared since the last look only the newest is taken.

    The version is the number in the name if it is above the engine's version; else versions count on. A complete
    checkpoint that the engine refuses is logged, listed in `failures`, and not tried again until it changes; the old
    weights keep serving.
    """

    def __init__(
        self, path: str | os.PathLike[str], engine: TakesWeights, *, mode: UpdateMode, settle_s: float
    ) -> None:
        self.path = Path(path).expanduser()
        self.mode = mode
        self.settle_s = settle_s
        self.reports: list[WeightUpdateReport] = []
        self.failures: list[Failure] = []
        self.stopped = False
        self._engine = engine
        self._done: tuple[Path, Signature] | None = None
        self._next_look = 0.0
        self._looking = False
        self._idle = True

    def stop(self) -> None:
        """No checkpoint is taken any more."""
        self.stopped = True

    def look(self) -> WeightUpdateReport | None:
        """As `poll`, but does nothing if it looked a moment ago, and notes errors instead of raising them."""
        if self.stopped or self._looking or time.monotonic() < self._next_look:
            return None
        started = time.monotonic()
        try:
            return self.poll()
        except WeightUpdateError as error:
            _log.error("a new checkpoint was refused, and the old weights keep serving: %s", error)
            return None
        finally:
            ended = time.monotonic()
            self._next_look = ended + (ended - started) / _SHARE_OF_TIME if self._idle else ended

    def poll(self) -> WeightUpdateReport | None:
        """Looks now; the report if a checkpoint was taken. WeightUpdateError if one was refused."""
        self._idle = True
        if self.stopped:
            return None
        found = self._newest()
        if found is None:
            return None
        self._idle = False
        path, before = found
        time.sleep(self.settle_s)
        if signature(path) != before:
            return None
        number = _LAST_NUMBER.search(path.name) if path != self.path else None
        version = int(number[1]) if number else None
        if version is not None and not self._engine.weight_version < version < 2**31:
            version = None
        self._looking = True
        try:
            report = self._engine.update_weights(path, version=version, mode=self.mode)
        except WeightUpdateError as error:
            if signature(path) == before:  # else it was written to meanwhile, and is looked at again
                self._done = found
                self.failures.append(Failure(path, error))
                raise
            return None
        finally:
            self._looking = False
        self._done = found
        self.reports.append(report)
        return report

    def _newest(self) -> tuple[Path, Signature] | None:
        """The newest complete checkpoint with its signature, unless it was dealt with already."""
        for path in self._candidates():
            if self._done is not None and path == self._done[0]:
                found = signature(path)
                return (path, found) if found != self._done[1] and is_complete(path) else None
            if is_complete(path):
                return path, signature(path)
        return None

    def _candidates(self) -> Iterator[Path]:
        """Folders that may be checkpoints, the newest first."""
        if is_complete(self.path):
            yield self.path
            return
        folders = []
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    if entry.is_dir() and not entry.name.startswith("."):
                        number = _LAST_NUMBER.search(entry.name)
                        order = (1, int(number[1])) if number else (0, entry.stat().st_mtime_ns)
                        folders.append((order, Path(entry.path)))
        except FileNotFoundError:
            return
        for _, path in sorted(folders, reverse=True):
            yield path


def is_complete(path: Path) -> bool:
    """Whether a folder holds a whole checkpoint, as far as names and sizes tell."""
    if orbax.is_checkpoint(path):
        return True
    try:
        huggingface.tensors(path)
    except (ModelLoadError, OSError, KeyError, json.JSONDecodeError):
        return False
    return True

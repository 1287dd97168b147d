"""Progress bars; `rich` is imported only when one is shown."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any


class Progress:
    """A bar over `total` items, with tokens per second and acceptance length; nothing when not shown.

    total: None while unknown.
    """

    def __init__(self, shown: bool, what: str, total: int | None) -> None:
        self._bar: Any = None
        if not shown:
            return
        from rich import progress

        self._bar = progress.Progress(
            progress.TextColumn(what),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[note]}"),
        )
        self._task = self._bar.add_task(what, total=total, note="")
        self._started = time.perf_counter()

    def advance(self, items: int) -> None:
        """`items` more are done."""
        if self._bar is not None:
            self._bar.advance(self._task, items)

    def report(self, tokens: int, decode_steps: int) -> None:
        """Tokens generated and sequence steps taken since the bar began."""
        if self._bar is not None:
            rate = tokens / max(time.perf_counter() - self._started, 1e-9)
            length = tokens / decode_steps if decode_steps else 0.0
            self._bar.update(self._task, note=f"{rate:,.0f} tokens/s, acceptance length {length:.2f}")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

"""Pages of the prefix cache in host memory: what the device had no room for, until its content is asked for again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .pages import Digest

PageContent = tuple[NDArray[Any], ...]
"""What one page holds: of all caches [caches, planes, heads, page_size, D], and of drafting heads' states, if any."""


@dataclass(frozen=True)
class PageOut:
    """A page that is about to be overwritten is to be read first."""

    page: int
    digest: Digest


@dataclass(frozen=True)
class PageIn:
    """A page is to be written."""

    page: int
    content: PageContent


class PageDevice(Protocol):
    """Reads and writes pages on the device."""

    def read_pages(self, pages: list[int]) -> list[PageContent]:
        """Copies on the host."""

    def write_pages(self, pages: list[int], contents: list[PageContent]) -> None:
        """Sets what pages hold."""


class HostCache:
    """Contents by digest, the least recently used given up first, within a limit in bytes.

    The scheduler notes which pages go out and come in while it plans a step; `carry_out` moves them, in that order,
    before the step runs. Nothing of an old weight version is ever found: digests hold the version, and `clear` is
    called when it changes.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self._contents: OrderedDict[Digest, PageContent] = OrderedDict()
        self._moves: list[PageOut | PageIn] = []

    def page_out(self, digest: Digest, page: int) -> None:
        """Notes that a page is given up by the device; its content will be kept."""
        if digest in self._contents:
            self._contents.move_to_end(digest)
        else:
            self._moves.append(PageOut(page, digest))

    def find(self, digest: Digest) -> PageContent | None:
        """The content of a digest, which counts as a use."""
        if digest in self._contents:
            self._contents.move_to_end(digest)
        return self._contents.get(digest)

    def page_in(self, page: int, content: PageContent) -> None:
        """Notes that a page that was just allocated is to hold this."""
        self._moves.append(PageIn(page, content))

    def carry_out(self, device: PageDevice) -> None:
        """Moves what was noted. Neighbours of one direction go together."""
        moves = list(self._moves)
        while moves:
            kind = type(moves[0])
            count = next((at for at, move in enumerate(moves) if type(move) is not kind), len(moves))
            together, moves = moves[:count], moves[count:]
            pages = [move.page for move in together]
            if kind is PageIn:
                device.write_pages(pages, [move.content for move in together if isinstance(move, PageIn)])
                continue
            digests = [move.digest for move in together if isinstance(move, PageOut)]
            for digest, content in zip(digests, device.read_pages(pages), strict=True):
                self._keep(digest, content)
        self._moves.clear()  # not before all of them succeeded

    def _keep(self, digest: Digest, content: PageContent) -> None:
        if digest in self._contents:
            return
        self._contents[digest] = content
        self.bytes += size_of(content)
        while self.bytes > self.limit_bytes:
            _, oldest = self._contents.popitem(last=False)
            self.bytes -= size_of(oldest)

    def drop_moves(self) -> bool:
        """Forgets what was noted and not carried out; whether there was any."""
        moves, self._moves = self._moves, []
        return bool(moves)

    def clear(self) -> None:
        """Forgets all contents."""
        self._contents.clear()
        self.bytes = 0


def size_of(content: PageContent) -> int:
    """In bytes."""
    return int(np.sum([part.nbytes for part in content]))

"""The pages of the key/value cache: who holds which, and the prefix cache over them.

A page is held by the sequences that list it, free, or kept: held by nobody but still indexed by the content it
was computed from, until its space is needed (least recently used first). Content is a digest that chains all
tokens from the start of the sequence, and the weight version, so equal digests mean equal keys and values.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Digest = bytes


def first_digest(weight_version: int) -> Digest:
    """What the digest of a sequence's first page chains to."""
    return hashlib.blake2b(f"weights {weight_version}".encode(), digest_size=16).digest()


def next_digest(previous: Digest, page_tokens: NDArray[np.int32]) -> Digest:
    """The digest of a full page, int32[page_size], behind the page of digest `previous`."""
    return hashlib.blake2b(previous + page_tokens.tobytes(), digest_size=16).digest()


class PagePool:
    """Hands out page numbers, counts their holders, and finds pages by content."""

    def __init__(
        self, num_pages: int, given_up: Callable[[Digest, int], None] = lambda digest, page: None
    ) -> None:
        """given_up: called with what was cached in a page that `allocate` is about to hand out."""
        self.num_pages = num_pages
        self._given_up = given_up
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = np.zeros(num_pages, np.int32)
        self._page_of: dict[Digest, int] = {}
        self._digest_of: dict[int, Digest] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # indexed, held by nobody; oldest first

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out: free ones and kept ones."""
        return len(self._free) + len(self._kept)

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out without forgetting what is cached."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Pages that some sequence holds."""
        return self.num_pages - self.num_available

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages held once, or None if there are too few."""
        if count > self.num_available:
            return None
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._kept.popitem(last=False)
                digest = self._digest_of.pop(page)
                del self._page_of[digest]
                self._given_up(digest, page)
            self._holders[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Drops one hold of each page. Later pages of a sequence are forgotten before earlier ones."""
        for page in reversed(list(pages)):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._digest_of:
                    self._kept[page] = None
                else:
                    self._free.append(page)

    def publish(self, digest: Digest, page: int) -> None:
        """Makes a full page, held by the caller, findable. The first page of a content stays the one found."""
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def acquire(self, digests: Sequence[Digest]) -> list[int]:
        """The pages of the longest run of `digests` from its start that is cached, each held once more."""
        pages = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            self._kept.pop(page, None)
            self._holders[page] += 1
            pages.append(page)
        return pages

    def is_cached(self, digest: Digest) -> bool:
        """Whether a page of this content can be found."""
        return digest in self._page_of

    def forget_contents(self) -> None:
        """No page is found by content any more; held pages stay held."""
        self._free.extend(self._kept)
        self._kept.clear()
        self._page_of.clear()
        self._digest_of.clear()

"""The page pool against a model that does everything the slow way."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from rollout_spec.pages import Digest, PagePool, first_digest, next_digest

NUM_PAGES = 6
CONTENTS = [bytes([number]) * 16 for number in range(5)]


class PagePoolMachine(RuleBasedStateMachine):
    """Any order of calls that sequences may make. A hold is a list of pages, as a sequence has."""

    holds = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.holders = [0] * NUM_PAGES
        self.page_of: dict[Digest, int] = {}
        self.kept: list[int] = []  # in the order in which they will be given up

    @property
    def available(self) -> int:
        return sum(count == 0 for count in self.holders)

    @rule(target=holds, count=st.integers(0, NUM_PAGES))
    def allocate(self, count: int) -> object:
        pages = self.pool.allocate(count)
        if count > self.available:
            assert pages is None
            return multiple()
        assert pages is not None
        assert len(set(pages)) == len(pages) == count
        assert all(self.holders[page] == 0 for page in pages)
        reused = [page for page in pages if page in self.kept]
        free = self.available - len(self.kept)
        assert reused == self.kept[: max(0, count - free)], "free pages first, then the least recently used"
        self.kept = self.kept[len(reused) :]
        self.page_of = {digest: page for digest, page in self.page_of.items() if page not in reused}
        for page in pages:
            self.holders[page] = 1
        return pages

    @rule(pages=consumes(holds))
    def release(self, pages: list[int]) -> None:
        self.pool.release(pages)
        for page in reversed(pages):
            self.holders[page] -= 1
            if self.holders[page] == 0 and page in self.page_of.values():
                self.kept.append(page)

    @rule(pages=holds, index=st.integers(0, NUM_PAGES), content=st.sampled_from(CONTENTS))
    def publish(self, pages: list[int], index: int, content: Digest) -> None:
        if index >= len(pages):
            return
        self.pool.publish(content, pages[index])
        if content not in self.page_of and pages[index] not in self.page_of.values():
            self.page_of[content] = pages[index]

    @rule(target=holds, contents=st.lists(st.sampled_from(CONTENTS), unique=True))
    def acquire(self, contents: list[Digest]) -> list[int]:
        pages = self.pool.acquire(contents)
        expected = []
        for content in contents:
            if content not in self.page_of:
                break
            expected.append(self.page_of[content])
        assert pages == expected
        for page in pages:
            self.holders[page] += 1
            self.kept = [other for other in self.kept if other != page]
        return pages

    @rule()
    def forget(self) -> None:
        self.pool.forget_contents()
        self.page_of, self.kept = {}, []

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.num_available == self.available
        assert self.pool.num_held == NUM_PAGES - self.available
        for content in CONTENTS:
            assert self.pool.is_cached(content) == (content in self.page_of)


TestPagePool = PagePoolMachine.TestCase
TestPagePool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_released_sequence_gives_up_its_end_before_its_start() -> None:
    """The start of a text is what other texts share."""
    pool = PagePool(3)
    pages = pool.allocate(3)
    assert pages is not None
    for content, page in zip(CONTENTS, pages, strict=False):
        pool.publish(content, page)
    pool.release(pages)
    assert pool.allocate(1) == [pages[2]]
    assert pool.acquire(CONTENTS[:3]) == pages[:2]


def test_pages_used_again_are_given_up_last() -> None:
    pool = PagePool(2)
    first, second = pool.allocate(1), pool.allocate(1)
    assert first is not None
    assert second is not None
    pool.publish(CONTENTS[0], first[0])
    pool.publish(CONTENTS[1], second[0])
    pool.release(first)
    pool.release(second)
    pool.release(pool.acquire(CONTENTS[:1]))
    assert pool.allocate(1) == second


def test_digests_chain_all_tokens_before_and_the_weight_version() -> None:
    def digests(version: int, *pages: list[int]) -> list[Digest]:
        found = [first_digest(version)]
        for page in pages:
            found.append(next_digest(found[-1], np.array(page, np.int32)))
        return found[1:]

    assert digests(0, [1, 2], [3, 4]) == digests(0, [1, 2], [3, 4])
    different = [
        digests(0, [1, 2], [3, 4])[1],
        digests(1, [1, 2], [3, 4])[1],
        digests(0, [1, 2], [4, 3])[1],
        digests(0, [2, 1], [3, 4])[1],
        digests(0, [3, 4])[0],
        digests(0, [1, 2, 3, 4])[0],
    ]
    assert len(set(different)) == len(different)

"""Which sequences run, and which of their tokens a step computes.

First come, first served. A running sequence holds a slot and pages; when pages run out, the one admitted last
gives its up and is computed again later. A waiting sequence whose next prompt page is being computed by a
running one waits for it, so that a group's prompt is computed once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from .batch import StepEntry
from .config import EngineConfig
from .host_cache import HostCache
from .pages import Digest, PagePool, first_digest, next_digest
from .requests import Sequence
from .step import StepShape

_LOOKED_AT = 64  # waiting sequences considered for admission in one step


class Scheduler:
    """Slots, pages, and the queues of waiting and running sequences."""

    def __init__(
        self,
        config: EngineConfig,
        num_pages: int,
        largest: StepShape,
        *,
        tokens_behind: int = 0,
        window: int | None = None,
    ) -> None:
        """tokens_behind: on how many tokens behind a page its content depends too, see `look_ahead`.

        window: how many positions a token sees at most, itself included; None is all.
        """
        self.config = config
        self._window = None if window is None else window + tokens_behind
        self._tokens_behind = tokens_behind
        self.largest = largest
        self.host_cache = HostCache(config.host_cache_bytes) if config.host_cache_bytes else None
        self.pool = (
            PagePool(num_pages) if self.host_cache is None else PagePool(num_pages, self.host_cache.page_out)
        )
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of admission
        self.weight_version = 0
        self.cached_prompt_tokens = 0
        self.host_cached_tokens = 0
        """Those of them that came back from host memory."""
        self.preemptions = 0
        self._free_slots = list(range(config.max_seqs - 1, -1, -1))
        self._being_computed: dict[Digest, Sequence] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def most_held(self) -> int | None:
        """Pages that a sequence holds at most, however long it is; None if it holds all."""
        if self._window is None:
            return None
        return self.pages_needed(self._window + self.largest.tokens + self._tokens_behind) + 1

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sequence that the pages have room for; None if there is no limit."""
        if self.most_held is not None and self.most_held <= self.pool.num_pages:
            return None
        return self.pool.num_pages * self.config.page_size

    def pages_needed(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size)

    def admit(self, *, only_begun: bool = False) -> None:
        """Moves waiting sequences into free slots while their next pages can be had.

        only_begun: those of requests that have run already.
        """
        passed_over = []
        promised = sum(self._missing_pages(sequence) for sequence in self.running)
        for _ in range(min(_LOOKED_AT, len(self.waiting))):
            if not self._free_slots:
                break
            sequence = self.waiting.popleft()
            if only_begun and not sequence.request.begun:
                passed_over.append(sequence)
                continue
            prompt_pages = self._reusable_pages(sequence)
            if self._waits_for_another(prompt_pages):
                passed_over.append(sequence)
                continue
            pages = self.pool.acquire(prompt_pages)
            sequence.pages = pages
            missing = self._missing_pages(sequence)
            promised += missing
            if self.running and promised > self.pool.num_available:
                self.pool.release(pages)
                sequence.pages = []
                passed_over.append(sequence)
                break
            self._bring_back(prompt_pages, pages)
            promised += self._missing_pages(sequence) - missing
            sequence.cached = len(pages) * self.config.page_size
            sequence.published = len(pages)
            self.cached_prompt_tokens += sequence.cached
            self.give_back_passed(sequence)
            sequence.slot = self._free_slots.pop()
            sequence.request.status = "running"
            sequence.request.begun = True
            for digest in prompt_pages[len(pages) :]:
                self._being_computed.setdefault(digest, sequence)
            self.running.append(sequence)
        self.waiting.extendleft(reversed(passed_over))

    def _bring_back(self, digests: SequenceOf[Digest], pages: list[int]) -> None:
        """Extends `pages`, the first of `digests`, by what host memory holds of the next, as far as pages go."""
        if self.host_cache is None:
            return
        for digest in digests[len(pages) :]:
            page = self.pool.acquire([digest])  # one behind a gap
            if not page:
                content = self.host_cache.find(digest)
                page = [] if content is None else self.pool.allocate(1) or []
                if not page or content is None:
                    return
                self.host_cache.page_in(page[0], content)
                self.pool.publish(digest, page[0])
                self.host_cached_tokens += self.config.page_size
            pages += page

    def _missing_pages(self, sequence: Sequence) -> int:
        """Pages that its known tokens will still take."""
        missing = self.pages_needed(sequence.length) - len(sequence.pages)
        if self.most_held is not None:
            missing = min(missing, self.most_held - len(sequence.pages) + sequence.passed)
        return max(0, missing)

    def _reusable_pages(self, sequence: Sequence) -> list[Digest]:
        """Digests of the full pages that the prefix cache may provide: one token stays to be computed."""
        if not self.config.prefix_cache or sequence.keeps_old_cache:
            return []
        end = sequence.length if sequence.score_from is None else sequence.score_from
        end = min(end - 1, sequence.length - self._tokens_behind)
        return self._digests(sequence, end // self.config.page_size)

    def _digests(self, sequence: Sequence, count: int) -> list[Digest]:
        size = self.config.page_size
        while len(sequence.digests) < count:
            start = len(sequence.digests) * size
            previous = sequence.digests[-1] if sequence.digests else first_digest(self.weight_version)
            tokens = sequence.tokens[start : start + size + self._tokens_behind]
            sequence.digests.append(next_digest(previous, tokens))
        return sequence.digests[:count]

    def _waits_for_another(self, digests: Iterable[Digest]) -> bool:
        for digest in digests:
            if not self.pool.is_cached(digest):
                return digest in self._being_computed
        return False

    def plan(self) -> list[StepEntry]:
        """The next tokens of all running sequences that fit one step, pages allocated; without drafts."""
        entries = []
        tokens, rows = self.largest.tokens, self.largest.rows
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            behind = len(self.running) - index - 1  # each of them keeps a token and a row to advance by
            count = min(sequence.uncached, tokens - behind)
            entry = StepEntry(sequence, count)
            excess = entry.num_rows - (rows - behind)
            if excess > 0:  # only a sequence that scores has many rows
                entry.count -= excess
            if not self._make_room(sequence, entry.count):
                continue  # it was preempted itself, and is no longer at `index`
            entries.append(entry)
            tokens -= entry.num_tokens
            rows -= entry.num_rows
            index += 1
        return entries

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Allocates the pages for `count` more tokens, preempting from the end; False if it hit itself."""
        missing = self.pages_needed(sequence.cached + count) - len(sequence.pages)
        while missing > 0:
            pages = self.pool.allocate(missing)
            if pages is not None:
                sequence.pages.extend(pages)
                return True
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def pages_for_draft(self, sequence: Sequence, nodes: int, *, count: int = 1) -> int:
        """Allocates pages for `nodes` draft tokens behind the next `count`, without preempting; how many fit."""
        size = self.config.page_size
        missing = self.pages_needed(sequence.cached + count + nodes) - len(sequence.pages)
        if missing > 0:
            sequence.pages.extend(self.pool.allocate(min(missing, self.pool.num_available)) or [])
        return max(0, min(nodes, len(sequence.pages) * size - sequence.cached - count))

    def publish(self, sequence: Sequence) -> None:
        """Lets the prefix cache know the full pages whose keys and values are final."""
        full = min(sequence.cached, sequence.length - self._tokens_behind) // self.config.page_size
        if full <= sequence.published or not self.config.prefix_cache or sequence.keeps_old_cache:
            return
        digests = self._digests(sequence, full)
        for number in range(max(sequence.published, sequence.passed), full):
            self.pool.publish(digests[number], sequence.pages[number])
            if self._being_computed.get(digests[number]) is sequence:
                del self._being_computed[digests[number]]
        sequence.published = full

    def give_back_passed(self, sequence: Sequence) -> None:
        """Gives back the pages that lie behind the window of all tokens to come; `publish` goes before.

        Their entries in the page table name the first page that is still held: a kernel may read there what it
        masks, and the sequence's own numbers can't spoil it.
        """
        if self._window is None:
            return
        passed = (sequence.cached - self._window + 1) // self.config.page_size
        passed = min(passed, len(sequence.pages) - 1)
        if passed > sequence.passed:
            self.pool.release(sequence.pages[sequence.passed : passed])
            sequence.pages[:passed] = [sequence.pages[passed]] * passed
            sequence.passed = passed

    def preempt(self, sequence: Sequence) -> None:
        """Takes its slot and pages and puts it at the front of the queue, to be computed again."""
        self.preemptions += 1
        self.release(sequence)
        sequence.request.status = "waiting"
        self.waiting.appendleft(sequence)

    def release(self, sequence: Sequence) -> None:
        """A running sequence ended or is preempted: gives up its slot and pages."""
        self.running.remove(sequence)
        self.pool.release(sequence.pages[sequence.passed :])
        for digest in sequence.digests[sequence.published :]:
            if self._being_computed.get(digest) is sequence:
                del self._being_computed[digest]
        self._free_slots.append(sequence.slot)
        sequence.pages, sequence.cached, sequence.published, sequence.slot = [], 0, 0, -1
        sequence.passed = 0
        sequence.tables_written = sequence.slot_written = False
        sequence.keeps_old_cache = False

    def new_version(self, version: int) -> None:
        """Weights changed: nothing cached is found again. Running sequences must be preempted or marked."""
        self.weight_version = version
        self.pool.forget_contents()
        if self.host_cache is not None:
            self.host_cache.clear()
        self._being_computed.clear()
        for sequence in (*self.waiting, *self.running):
            sequence.digests, sequence.published = [], 0

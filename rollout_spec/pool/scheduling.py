"""Which engine runs which sample. Knows neither Ray nor clocks, so that a simulation drives the same code.

A *work* is one sample of a request. Works of a group share their prompt and history, so that a group has a home
engine; works leave it only where that pays. Engines with the fewest works are served first:

1. one work of each group of which no length is known: what becomes of it tells what the others will take;
2. from the groups at home with them, the one with the most expected work first;
3. from the groups without a home, in the same order;
4. from the groups at home elsewhere, where sharing them is worth computing the prompt again.

When nothing waits any more, `moves` names running works that should end on another engine.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

PREFILL_COST = 0.25
"""What computing a token of a prompt costs, in sampled tokens: they go through the model many at a time."""

_MOST_MOVES = 3
_OUTLIVED = 1.25  # a sibling's length so far, against what is expected of the others
_SLOW = 2.0  # so many times slower than the receiving engine


@dataclass(eq=False)
class Work:
    """One sample to generate.

    key: unique. group: whose prompt and history it shares. prompt_tokens, done_tokens: of its context, done_tokens
    generated already. max_tokens, expected_tokens: of the whole completion. alone: to run with nothing beside it.
    """

    key: Hashable
    group: Hashable
    prompt_tokens: int
    max_tokens: int
    expected_tokens: float
    done_tokens: int = 0
    alone: bool = False
    known: bool = True
    """Lengths of its group were seen before."""
    engine: int | None = None
    """Where it runs, or is on its way to."""
    moves: int = 0
    leaving: bool = False
    """It was asked back, to end on another engine."""
    target: int | None = None
    """Where it shall end, while it is leaving."""

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.done_tokens

    @property
    def remaining_tokens(self) -> float:
        """Expected. One that outlived its expectation is taken to go on for half as long as it has run."""
        rest = self.expected_tokens - self.done_tokens
        if rest < 0.5 * self.done_tokens:
            rest = max(rest, 0.5 * self.done_tokens)
        return max(1.0, min(rest, float(self.max_tokens - self.done_tokens)))


@dataclass(eq=False)
class EngineLoad:
    """An engine as the scheduler sees it. slots: works that run at the same time; window: works it is given."""

    slots: int
    window: int
    running: dict[Hashable, Work] = field(default_factory=dict)
    """Given to it and not ended; at most `slots` of them advance."""
    homes: list[tuple[float, int, Hashable]] = field(default_factory=list)
    """Heap of (-expected tokens, order, group) of waiting groups at home here."""
    tokens_per_s: float = 0.0
    """Of one work; 0 while unknown."""
    exclusive: bool = False
    """Reserved for works that run alone."""
    open: bool = True
    """It takes works."""
    held: bool = False
    """It takes none for now, so that its longest work gets faster; see `Scheduler.hold`."""

    @property
    def free(self) -> int:
        return self.window - len(self.running)


@dataclass(eq=False)
class _Group:
    """Waiting works of a group, the longest expected first."""

    home: int | None = None
    unknown: bool = False
    """No length is known, and no work of it runs yet."""
    works: dict[Hashable, Work] = field(default_factory=dict)
    expected_tokens: float = 0.0
    _heap: list[tuple[float, int, Hashable]] = field(default_factory=list)

    def add(self, work: Work, order: int) -> None:
        self.works[work.key] = work
        self.expected_tokens += work.remaining_tokens
        heapq.heappush(self._heap, (-work.remaining_tokens, order, work.key))

    def remove(self, key: Hashable) -> None:
        self.expected_tokens -= self.works.pop(key).remaining_tokens

    def expect(self, tokens: float) -> None:
        """Its works are now expected to take so many tokens."""
        for work in self.works.values():
            work.expected_tokens = min(tokens, float(work.max_tokens))
        self.expected_tokens = sum(work.remaining_tokens for work in self.works.values())

    def longest(self) -> Work:
        while self._heap[0][2] not in self.works:
            heapq.heappop(self._heap)
        return self.works[self._heap[0][2]]


@dataclass(frozen=True)
class Move:
    """A running work that should end on another engine."""

    key: Hashable
    source: int
    target: int


class Scheduler:
    """Waiting and running works of a pool.

    moving: running works may move to other engines near the end.
    """

    def __init__(self, *, moving: bool = True) -> None:
        self.moving = moving
        self.engines: dict[int, EngineLoad] = {}
        self.works: dict[Hashable, Work] = {}
        self._groups: dict[Hashable, _Group] = {}
        self._homeless: list[tuple[float, int, Hashable]] = []
        self._unknown: deque[Hashable] = deque()
        self._alone: deque[Work] = deque()
        self._order = itertools.count()
        self._waiting = 0

    # Engines

    def add_engine(self, engine: int, slots: int, lookahead: int | None = None) -> None:
        """An engine takes works from now on. lookahead: works it is given beyond its slots."""
        extra = max(2, slots // 4) if lookahead is None else lookahead
        self.engines[engine] = EngineLoad(slots, slots + extra)

    def remove_engine(self, engine: int) -> list[Work]:
        """The engine is gone; returns the works it had. They are out of the scheduler; `add` takes them again."""
        self.close_engine(engine)
        lost = list(self.engines.pop(engine).running.values())
        for work in lost:
            del self.works[work.key]
            work.engine, work.leaving = None, False
        return lost

    def close_engine(self, engine: int) -> None:
        """The engine takes no more works; those it has go on."""
        load = self.engines[engine]
        load.open = False
        self._let_go(load)

    def open_engine(self, engine: int) -> None:
        """Undoes `close_engine`."""
        self.engines[engine].open = True

    def _let_go(self, load: EngineLoad) -> None:
        """Groups at home there may go anywhere."""
        for _, _, group_id in load.homes:
            group = self._groups.get(group_id)
            if group is not None and group.home is not None and self.engines[group.home] is load:
                group.home = None
                self._queue(group_id, group)
        load.homes.clear()

    # Works

    @property
    def waiting(self) -> int:
        """Works that no engine has."""
        return self._waiting

    @property
    def running(self) -> int:
        """Works that an engine has."""
        return len(self.works) - self._waiting

    def add(self, work: Work) -> None:
        """A work waits for an engine."""
        self.works[work.key] = work
        self._waiting += 1
        work.engine, work.leaving = None, False
        if work.alone:
            self._alone.append(work)
            return
        group = self._groups.get(work.group)
        if group is None:
            group = self._groups[work.group] = _Group(unknown=not work.known)
            if group.unknown:
                self._unknown.append(work.group)
        group.add(work, next(self._order))
        self._queue(work.group, group)

    def discard(self, key: Hashable) -> Work | None:
        """The work ended, or isn't wanted any more; returns it, None if unknown."""
        work = self.works.pop(key, None)
        if work is None:
            return None
        if work.engine is not None:
            load = self.engines[work.engine]
            del load.running[key]
        else:
            self._waiting -= 1
            if work.alone:
                self._alone.remove(work)
            else:
                self._drop(work)
        if not self._alone:
            for load in self.engines.values():
                load.exclusive = load.exclusive and any(one.alone for one in load.running.values())
        return work

    def place(self, work: Work, engine: int) -> bool:
        """Gives a work that isn't in the scheduler to one engine; False if it takes no works."""
        load = self.engines.get(engine)
        if load is None or not load.open or load.exclusive or work.alone:
            return False
        self.works[work.key] = work
        work.leaving = False
        self._give(work, engine, load)
        return True

    def progress(self, key: Hashable, done_tokens: int) -> None:
        """A running work has so many tokens."""
        work = self.works.get(key)
        if work is None:
            return
        work.done_tokens = max(work.done_tokens, done_tokens)
        group = self._groups.get(work.group)
        if group is not None and not work.known and group.works:
            waiting = next(iter(group.works.values()))
            if _OUTLIVED * work.done_tokens > waiting.expected_tokens:
                self.expect(work.group, 2 * work.done_tokens)

    def expect(self, group_id: Hashable, tokens: float) -> None:
        """Waiting works of a group are now expected to take so many tokens, prompt not counted."""
        group = self._groups.get(group_id)
        if group is not None:
            group.expect(tokens)
            self._queue(group_id, group)

    # Decisions

    def assign(self) -> list[tuple[int, Work]]:
        """Works for engines that have room, longest expected first; they count as running there."""
        given: list[tuple[int, Work]] = []
        if self._alone:
            self._assign_alone(given)
        if not self._waiting:
            return given
        ready = [
            (len(load.running), number)
            for number, load in self.engines.items()
            if load.open and not load.exclusive and not load.held and load.free > 0
        ]
        heapq.heapify(ready)
        while ready and self._waiting:
            _, number = heapq.heappop(ready)
            load = self.engines[number]
            work = self._take(number, load)
            if work is None:
                continue
            self._waiting -= 1
            self._give(work, number, load)
            given.append((number, work))
            if load.free > 0:
                heapq.heappush(ready, (len(load.running), number))
        return given

    def hold(self) -> None:
        """Decides which engines take no more works, as their longest work would end after all else.

        A work runs faster with fewer beside it. The engines whose longest work ends soonest take what waits, as many
        of them as are needed to be done with it before the longest work of the next one ends. Only works whose lengths
        were seen before count: of others too little is known.
        """
        loads = [load for load in self.engines.values() if load.open and not load.exclusive]
        for load in loads:
            load.held = False
        if not self._waiting or not all(load.tokens_per_s or not load.running for load in loads):
            return
        waiting = sum(group.expected_tokens for group in self._groups.values())
        ends = sorted(
            (
                max((work.remaining_tokens for work in load.running.values() if work.known), default=0.0)
                / (load.tokens_per_s or 1.0),
                place,
            )
            for place, load in enumerate(loads)
        )
        rate = 0.0
        for end, place in ends:
            load = loads[place]
            load.held = rate > 0.0 and end > waiting / rate
            if not load.held:
                rate += load.tokens_per_s * load.slots

    def moves(self) -> list[Move]:
        """Running works that would end sooner elsewhere; they count as `leaving`. Only once nothing waits."""
        if not self.moving or self._waiting or len(self.engines) < 2:
            return []
        counts = {
            number: sum(not work.leaving for work in load.running.values())
            for number, load in self.engines.items()
            if not load.exclusive
        }
        arriving = dict.fromkeys(counts, 0)
        for load in self.engines.values():
            for work in load.running.values():
                if work.leaving and work.target in arriving:
                    arriving[work.target] += 1
        found: list[Move] = []
        receivers = [number for number in counts if self.engines[number].open]
        if not receivers or len(counts) < 2:
            return []
        while True:
            target = min(receivers, key=lambda number: (counts[number] + arriving[number], number))
            best: tuple[float, int, Work] | None = None
            for source in counts:
                if source != target:
                    best = self._better_move(source, target, counts, arriving, best)
            if best is None:
                return found
            _, source, work = best
            work.leaving, work.target = True, target
            work.moves += 1
            counts[source] -= 1
            arriving[target] += 1
            found.append(Move(work.key, source, target))

    def _better_move(
        self,
        source: int,
        target: int,
        counts: dict[int, int],
        arriving: dict[int, int],
        best: tuple[float, int, Work] | None,
    ) -> tuple[float, int, Work] | None:
        there, here = counts[source], counts[target] + arriving[target]
        slow, fast = self.engines[source].tokens_per_s, self.engines[target].tokens_per_s
        is_slow = 0.0 < slow * _SLOW < fast and here < self.engines[target].slots
        if not is_slow and (there - here < 2 or 2 * here > there):
            return best
        if there == 0 or (best is not None and there <= best[0] and not is_slow):
            return best
        movable = [
            work
            for work in self.engines[source].running.values()
            if not work.leaving and work.moves < _MOST_MOVES
        ]
        if not movable:
            return best
        work = max(movable, key=lambda work: work.remaining_tokens)
        fewer = there if is_slow else there - here - 1
        if not _pays(work, fewer):
            return best
        score = there * (slow and fast / slow) if is_slow else float(there)
        return (score, source, work) if best is None or score > best[0] else best

    # Inside

    def _queue(self, group_id: Hashable, group: _Group) -> None:
        """Puts a group with waiting works into the heap where it belongs."""
        if group.works:
            entry = (-group.expected_tokens, next(self._order), group_id)
            home = self.engines.get(group.home) if group.home is not None else None
            heapq.heappush(self._homeless if home is None else home.homes, entry)

    def _take(self, number: int, load: EngineLoad) -> Work | None:
        group_id = self._first_unknown()
        if group_id is None:
            group_id = self._first(load.homes, number)
        if group_id is None:
            group_id = self._first(self._homeless, None)
        if group_id is not None:
            group = self._groups[group_id]
            group.home, group.unknown = number, False
            work = group.longest()
            self._drop(work)
            self._queue(group_id, group)
            return work
        return self._take_from_others(number, load)

    def _first_unknown(self) -> Hashable | None:
        while self._unknown:
            group_id = self._unknown.popleft()
            group = self._groups.get(group_id)
            if group is not None and group.works and group.unknown:
                return group_id
        return None

    def _first(self, heap: list[tuple[float, int, Hashable]], home: int | None) -> Hashable | None:
        """Takes the first group off a heap whose entry still holds: it waits, and is at home there."""
        while heap:
            _, _, group_id = heapq.heappop(heap)
            group = self._groups.get(group_id)
            if group is not None and group.works and group.home == home:
                return group_id
        return None

    def _take_from_others(self, number: int, load: EngineLoad) -> Work | None:
        best: tuple[float, int, Hashable] | None = None
        for other, donor in self.engines.items():
            if other == number:
                continue
            while donor.homes:  # what is left of entries that no longer hold
                group = self._groups.get(donor.homes[0][2])
                if group is not None and group.works and group.home == other:
                    break
                heapq.heappop(donor.homes)
            if donor.homes and (best is None or donor.homes[0][0] < best[0]):
                best = (donor.homes[0][0], other, donor.homes[0][2])
        if best is None:
            return None
        _, other, group_id = best
        group = self._groups[group_id]
        work = group.longest()
        donor = self.engines[other]
        running = len(donor.running)
        # With its slots full, the other engine would run it later, not beside the others.
        if running < donor.slots and not _pays(work, running - len(load.running)):
            return None
        self._drop(work)
        return work

    def _give(self, work: Work, number: int, load: EngineLoad) -> None:
        work.engine = number
        load.running[work.key] = work

    def _assign_alone(self, given: list[tuple[int, Work]]) -> None:
        """Works that run alone get one engine after it ran empty."""
        exclusive = [number for number, load in self.engines.items() if load.exclusive and load.open]
        if not exclusive:
            usable = [number for number, load in self.engines.items() if load.open]
            if not usable:
                return
            number = min(usable, key=lambda number: len(self.engines[number].running))
            self.engines[number].exclusive = True
            self._let_go(self.engines[number])
            exclusive = [number]
        for number in exclusive:
            load = self.engines[number]
            if self._alone and not load.running:
                work = self._alone.popleft()
                self._waiting -= 1
                self._give(work, number, load)
                given.append((number, work))

    def _drop(self, work: Work) -> None:
        """Takes a waiting work out of its group; a group none of whose works wait finds a home anew."""
        group = self._groups[work.group]
        group.remove(work.key)
        if not group.works:
            del self._groups[work.group]


def _pays(work: Work, fewer: int) -> bool:
    """Whether `fewer` neighbours for the rest of a work are worth computing its context a second time."""
    return work.remaining_tokens * fewer > PREFILL_COST * work.context_tokens

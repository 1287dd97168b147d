"""The scheduler, run without a device: what a model would have computed is remembered slot by slot."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import pytest

from rollout_spec import DraftConfig, EngineConfig
from rollout_spec.batch import StepEntry
from rollout_spec.host_cache import PageContent
from rollout_spec.requests import Sequence
from rollout_spec.scheduler import Scheduler
from rollout_spec.shapes import step_shapes
from tests.rollout_spec.sequences import append, new_sequence, new_sequences, random_tokens, scoring_sequence


@dataclass(frozen=True, eq=False)
class Planned:
    """What an entry was before its results changed its sequence."""

    sequence: Sequence
    count: int
    samples: bool
    scored: range


class Simulation:
    """Steps a scheduler as the engine does, with a device that only remembers which token lies where.

    Every step checks that what a sequence takes for cached is there, computed from its own tokens by the
    weights that serve, and that the step is within its limits.
    """

    def __init__(
        self,
        num_pages: int,
        *,
        rng_seed: int = 0,
        draft_nodes: int = 0,
        window: int | None = None,
        **config: int | bool,
    ) -> None:
        self.config = EngineConfig(**{"page_size": 4, **config}, draft=DraftConfig(max_nodes=8))  # type: ignore[arg-type]
        self.largest = step_shapes(self.config)[-1]
        self.window = window
        self.scheduler = Scheduler(self.config, num_pages, self.largest, window=window)
        self.rng = np.random.default_rng(rng_seed)
        self.draft_nodes = draft_nodes
        size = self.config.page_size
        self.slots = np.full((num_pages * size, 2), -1)  # token and weight version of each slot of the cache
        self.computed = 0
        """Tokens run through the model, drafts not counted."""
        self.ended: list[Sequence] = []

    def submit(self, *sequences: Sequence) -> None:
        self.scheduler.waiting.extend(sequences)

    def step(self) -> list[Planned]:
        self.scheduler.admit()
        entries = self.scheduler.plan()
        self._check_limits(entries)
        self._move_pages()
        planned = [Planned(entry.sequence, entry.count, entry.samples, entry.scored) for entry in entries]
        accepted = [self._compute(entry) for entry in entries]
        for entry, nodes in zip(entries, accepted, strict=True):
            self._take_in(entry, nodes)
        return planned

    def run(self, most_steps: int) -> None:
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, f"unfinished after {most_steps} steps"
        assert self.scheduler.pool.num_held == 0
        assert sorted(self.scheduler._free_slots) == list(range(self.config.max_seqs))
        assert not self.scheduler._being_computed

    def _check_limits(self, entries: SequenceOf[StepEntry]) -> None:
        running = self.scheduler.running
        assert [entry.sequence for entry in entries] == running, "every running sequence takes part"
        assert all(entry.count >= 1 for entry in entries), "and advances"
        assert sum(entry.num_tokens for entry in entries) <= self.largest.tokens
        assert sum(entry.num_rows for entry in entries) <= self.largest.rows
        assert len({sequence.slot for sequence in running}) == len(running)
        assert all(0 <= sequence.slot < self.config.max_seqs for sequence in running)
        assert all(sequence.slot == -1 and not sequence.pages for sequence in self.scheduler.waiting)

    def _move_pages(self) -> None:
        if self.scheduler.host_cache is not None:
            self.scheduler.host_cache.carry_out(self)
            assert self.scheduler.host_cache.bytes <= self.config.host_cache_bytes

    def read_pages(self, pages: list[int]) -> list[PageContent]:
        size = self.config.page_size
        return [(self.slots[page * size : (page + 1) * size].copy(),) for page in pages]

    def write_pages(self, pages: list[int], contents: list[PageContent]) -> None:
        size = self.config.page_size
        for page, (content,) in zip(pages, contents, strict=True):
            self.slots[page * size : (page + 1) * size] = content

    def _places(self, sequence: Sequence, start: int, end: int) -> list[int]:
        size = self.config.page_size
        return [sequence.pages[at // size] * size + at % size for at in range(start, end)]

    def _compute(self, entry: StepEntry) -> int:
        """How many draft nodes are accepted."""
        sequence, version = entry.sequence, self.scheduler.weight_version
        first = 0 if self.window is None else max(0, sequence.cached - self.window + 1)
        cached = self.slots[self._places(sequence, first, sequence.cached)]
        assert cached[:, 0].tolist() == sequence.tokens[first : sequence.cached].tolist()
        if not sequence.keeps_old_cache:
            assert (cached[:, 1] == version).all()
        end = sequence.cached + entry.count
        places = self._places(sequence, sequence.cached, end)
        self._check_nobody_else_holds(sequence, places)
        self.slots[places, 0] = sequence.tokens[sequence.cached : end]
        self.slots[places, 1] = version
        self.computed += entry.count
        nodes = self.draft_nodes if entry.samples and entry.count == 1 else 0
        running = list(self.scheduler.running)
        fitting = self.scheduler.pages_for_draft(sequence, nodes)
        self._move_pages()
        assert self.scheduler.running == running, "drafts push nobody out"
        assert 0 <= fitting <= nodes
        drafts = self._places(sequence, end, end + fitting)
        self._check_nobody_else_holds(sequence, drafts)
        self.slots[drafts] = -2  # rejected drafts lie there until they are overwritten
        return min(int(self.rng.integers(0, fitting + 1)), max(0, sequence.room - 1))

    def _check_nobody_else_holds(self, sequence: Sequence, places: SequenceOf[int]) -> None:
        pages = {place // self.config.page_size for place in places}
        for other in self.scheduler.running:
            assert other is sequence or not pages & set(other.pages), "a shared page is written"

    def _take_in(self, entry: StepEntry, accepted: int) -> None:
        sequence = entry.sequence
        if not entry.samples:
            sequence.cached += entry.count
        else:
            before = sequence.length
            append(sequence, random_tokens(self.rng, 1 + accepted))
            sequence.cached = sequence.length - 1
            places = self._places(sequence, before - 1, sequence.length - 1)
            self.slots[places, 0] = sequence.tokens[before - 1 : sequence.length - 1]
            self.slots[places, 1] = self.scheduler.weight_version
        self.scheduler.publish(sequence)
        self.scheduler.give_back_passed(sequence)
        held = len(sequence.pages) - sequence.passed
        assert self.scheduler.most_held is None or held <= self.scheduler.most_held
        done = sequence.uncached == 0 if sequence.score_from is not None else sequence.room == 0
        if done:
            self.scheduler.release(sequence)
            self.ended.append(sequence)


def numbers(sequences: SequenceOf[Sequence], of: SequenceOf[Sequence]) -> list[int]:
    """Place of each of `sequences` in `of`."""
    return [of.index(sequence) for sequence in sequences]


# Random traffic


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("prefix_cache", [True, False, "host"])
@pytest.mark.parametrize("draft_nodes", [0, 5])
@pytest.mark.parametrize("seed", range(10))
def test_random_traffic_is_finished_within_limits_and_only_on_its_own_cache(
    seed: int, draft_nodes: int, prefix_cache: bool | str, window: int | None
) -> None:
    rng = np.random.default_rng(seed)
    longest = 40
    num_pages = int(rng.choice([longest // 4, 14, 60]))  # the least that one sequence needs; too few; enough
    simulation = Simulation(
        num_pages,
        rng_seed=seed,
        draft_nodes=draft_nodes,
        window=window,
        max_seqs=int(rng.integers(1, 6)),
        max_batch_tokens=int(rng.integers(6, 30)),
        prefix_cache=bool(prefix_cache),
        host_cache_bytes=int(rng.choice([64, 500, 10_000])) if prefix_cache == "host" else 0,
    )
    prompts: list[list[int]] = []
    for _ in range(30):
        prompt = random_tokens(rng, int(rng.integers(1, 25)))
        if prompts and rng.random() < 0.6:
            shared = prompts[int(rng.integers(len(prompts)))]
            prompt = (shared[: int(rng.integers(1, len(shared) + 1))] + prompt)[: longest - 15]
        prompts.append(prompt)
    submitted = 0
    for step in range(3000):
        if submitted < len(prompts) and rng.random() < 0.4:
            prompt = prompts[submitted]
            if rng.random() < 0.2:
                simulation.submit(scoring_sequence(prompt, random_tokens(rng, int(rng.integers(1, 15)))))
            else:
                simulation.submit(
                    *new_sequences(prompt, max_tokens=int(rng.integers(1, 15)), n=int(rng.integers(1, 4)))
                )
            submitted += 1
        if step % 40 == 39 and rng.random() < 0.5:
            scheduler = simulation.scheduler
            if rng.random() < 0.5:
                for sequence in list(reversed(scheduler.running)):
                    scheduler.preempt(sequence)
            for sequence in scheduler.running:
                sequence.keeps_old_cache = True
            scheduler.new_version(scheduler.weight_version + 1)
        if submitted == len(prompts) and not simulation.scheduler.has_work:
            break
        if simulation.scheduler.has_work:
            simulation.step()
    simulation.run(1)
    assert len(simulation.ended) >= len(prompts)


@pytest.mark.parametrize("num_pages", [6, 9, 40])
def test_first_come_first_served_and_the_latest_is_preempted(num_pages: int) -> None:
    """With prompts that share nothing, running ones and then waiting ones are always in the order of arrival."""
    rng = np.random.default_rng(num_pages)
    simulation = Simulation(num_pages, max_seqs=4, max_batch_tokens=12)
    sequences = [
        new_sequence([4 + number, *random_tokens(rng, 7)], max_tokens=int(rng.integers(1, 16)))
        for number in range(12)
    ]
    simulation.submit(*sequences)
    while simulation.scheduler.has_work:
        simulation.step()
        scheduler = simulation.scheduler
        order = numbers([*scheduler.running, *scheduler.waiting], sequences)
        assert order == sorted(order)
    assert (simulation.scheduler.preemptions > 0) == (num_pages < 40)
    assert len(simulation.ended) == 12


def test_the_first_sequence_always_advances_however_few_pages_there_are() -> None:
    simulation = Simulation(6, max_seqs=4, max_batch_tokens=8)
    sequences = [new_sequence([4 + number] * 8, max_tokens=16) for number in range(4)]
    simulation.submit(*sequences)
    while simulation.scheduler.has_work:
        first = next(sequence for sequence in sequences if sequence.room)
        before = first.length + first.cached
        simulation.step()
        assert first in simulation.ended or first.length + first.cached > before
    assert numbers(simulation.ended, sequences) == [0, 1, 2, 3]


# Groups and the prefix cache


def test_a_groups_prompt_is_computed_once_and_others_need_not_wait_for_it() -> None:
    prompt = random_tokens(np.random.default_rng(0), 17)
    simulation = Simulation(60, max_seqs=8, max_batch_tokens=64)
    group = new_sequences(prompt, n=3, max_tokens=3)
    other = new_sequence([9, 9, 9, 9, 9], max_tokens=3)
    simulation.submit(*group, other)
    first = simulation.step()
    assert [entry.sequence for entry in first] == [group[0], other]
    second = simulation.step()
    assert [entry.sequence for entry in second] == [group[0], other, group[1], group[2]]
    assert [entry.count for entry in second[2:]] == [1, 1], "16 tokens are cached, the last must be computed"
    simulation.run(5)
    assert simulation.computed == 17 + 5 + 1 + 1 + 4 * 2  # prompts, then two more tokens each
    assert simulation.scheduler.cached_prompt_tokens == 32


def test_a_prompt_wholly_in_the_cache_still_computes_its_last_token() -> None:
    prompt = random_tokens(np.random.default_rng(1), 16)
    simulation = Simulation(60, max_seqs=2, max_batch_tokens=64)
    simulation.submit(new_sequence(prompt, max_tokens=1))
    simulation.step()
    simulation.submit(new_sequence(prompt, max_tokens=1))
    (entry,) = simulation.step()
    assert entry.count == 4, "the last token's page is not reused"
    assert entry.samples


def test_a_finished_text_is_found_by_the_prompt_that_extends_it() -> None:
    rng = np.random.default_rng(2)
    simulation = Simulation(60, max_seqs=2, max_batch_tokens=64)
    first = new_sequence(random_tokens(rng, 9), max_tokens=9)
    simulation.submit(first)
    simulation.run(20)
    text = first.tokens[: first.length].tolist()
    simulation.submit(new_sequence([*text, 5, 6], max_tokens=1))
    (entry,) = simulation.step()
    assert entry.count == 20 - 16


def test_without_prefix_cache_nothing_is_shared_or_waited_for() -> None:
    simulation = Simulation(60, max_seqs=4, max_batch_tokens=64, prefix_cache=False)
    simulation.submit(*new_sequences([5] * 12, n=3, max_tokens=2))
    assert [entry.count for entry in simulation.step()] == [12, 12, 12]
    simulation.run(3)
    assert simulation.scheduler.cached_prompt_tokens == 0


@pytest.mark.parametrize("how", ["preempted", "ended"])
def test_who_waits_for_a_prompt_is_not_left_behind_when_its_computer_goes(how: str) -> None:
    simulation = Simulation(60, max_seqs=4, max_batch_tokens=5)
    first, second = new_sequences([5] * 16, n=2, max_tokens=2)
    simulation.submit(first, second)
    simulation.step()
    assert simulation.scheduler.running == [first]
    if how == "preempted":
        simulation.scheduler.preempt(first)
    else:
        simulation.scheduler.release(first)
    simulation.step()
    assert simulation.scheduler.running == [first if how == "preempted" else second]
    simulation.run(20)


def test_new_weights_find_nothing_of_the_old_ones() -> None:
    simulation = Simulation(60, max_seqs=2, max_batch_tokens=64)
    simulation.submit(new_sequence([5] * 12, max_tokens=1))
    simulation.run(5)
    waiting = new_sequence([5] * 12, max_tokens=1)
    simulation.submit(waiting)
    simulation.scheduler._digests(waiting, 2)
    simulation.scheduler.new_version(1)
    (entry,) = simulation.step()
    assert entry.count == 12


def test_a_sequence_on_mixed_weights_shares_nothing() -> None:
    """Its pages hold keys of the old weights, so no other may find them, until it begins anew."""
    simulation = Simulation(60, max_seqs=2, max_batch_tokens=64)
    old = new_sequence([5] * 12, max_tokens=12)
    simulation.submit(old)
    simulation.step()
    old.keeps_old_cache = True
    simulation.scheduler.new_version(1)
    for _ in range(5):
        simulation.step()
    simulation.submit(new_sequence([5] * 12, max_tokens=1))
    assert [entry.count for entry in simulation.step()] == [1, 12]
    simulation.scheduler.preempt(old)
    assert not old.keeps_old_cache
    simulation.run(20)


# Chunks and limits


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_ones() -> None:
    simulation = Simulation(60, max_seqs=3, max_batch_tokens=10)
    short = new_sequence([7], max_tokens=9)
    long = new_sequence(random_tokens(np.random.default_rng(3), 30), max_tokens=2)
    late = new_sequence([8, 9], max_tokens=2)
    simulation.submit(short)
    simulation.step()
    simulation.submit(long, late)
    counts = [[entry.count for entry in simulation.step()] for _ in range(5)]
    # Each running one keeps a token of the ten: the prompt behind the long one advances by it.
    assert counts == [[1, 8, 1], [1, 8, 1], [1, 8, 1], [1, 6], [1, 1]]


def test_scoring_never_takes_more_rows_than_a_step_has() -> None:
    simulation = Simulation(60, max_seqs=2, max_batch_tokens=100)
    assert simulation.largest.rows < simulation.largest.tokens
    text = random_tokens(np.random.default_rng(4), 90)
    sequence = scoring_sequence(text[:2], text[2:])
    simulation.submit(sequence)
    scored: list[int] = []
    while simulation.scheduler.has_work:
        (entry,) = simulation.step()
        assert len(entry.scored) <= simulation.largest.rows
        scored.extend(entry.scored)
    assert scored == list(range(2, 90))
    assert not simulation.scheduler.has_work


def test_a_sequence_that_cannot_be_admitted_for_want_of_pages_waits() -> None:
    simulation = Simulation(5, max_seqs=4, max_batch_tokens=64)
    first, second = new_sequence([5] * 13, max_tokens=1), new_sequence([6] * 9, max_tokens=1)
    simulation.submit(first, second)
    assert [entry.sequence for entry in simulation.step()] == [first]
    assert [entry.sequence for entry in simulation.step()] == [second]


@pytest.mark.parametrize("window", [1, 6, 11])
def test_a_sequence_much_longer_than_the_cache_runs_within_its_window(window: int) -> None:
    rng = np.random.default_rng(0)
    simulation = Simulation(
        60, draft_nodes=3, window=window, max_seqs=2, max_batch_tokens=6, prefix_cache=True
    )
    least = simulation.scheduler.most_held
    assert least is not None
    simulation = Simulation(
        least, draft_nodes=3, window=window, max_seqs=2, max_batch_tokens=6, prefix_cache=True
    )
    assert simulation.scheduler.longest is None
    simulation.submit(*new_sequences(random_tokens(rng, 90), max_tokens=200, n=2))
    simulation.run(4000)
    assert [sequence.length for sequence in simulation.ended] == [290, 290]


def test_a_prefix_that_was_pushed_out_comes_back_from_host_memory_until_weights_change() -> None:
    rng = np.random.default_rng(0)
    simulation = Simulation(8, max_seqs=1, max_batch_tokens=8, host_cache_bytes=100_000)
    prompts = [random_tokens(rng, 21) for _ in range(4)]
    for prompt in prompts:
        simulation.submit(*new_sequences(prompt, max_tokens=2, n=1))
        simulation.run(50)
    assert simulation.scheduler.host_cached_tokens == 0
    before = simulation.computed
    simulation.submit(*new_sequences(prompts[0], max_tokens=2, n=1))
    simulation.run(50)
    assert simulation.scheduler.host_cached_tokens == 20
    assert simulation.computed - before == 2, "a token of the prompt and one of the output"
    simulation.scheduler.new_version(1)
    simulation.submit(*new_sequences(prompts[0], max_tokens=2, n=1))
    simulation.run(50)
    assert simulation.scheduler.host_cached_tokens == 20

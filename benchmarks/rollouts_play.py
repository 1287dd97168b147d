"""What the parts of the rollouts benchmark share: a policy, engines of it, and timed plays of a list of requests."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rival_process import Run
from examples.smollm2 import fetch
from rollout_spec import DraftConfig, EngineConfig, RolloutEngine, SamplingParams
from rollout_spec.loading import load_model
from rollout_spec.models import ModelConfig, Params, init_params
from rollout_spec.stats import EngineStats

PROMPTS = Path(__file__).parent / "data" / "prompts.jsonl"
PLAIN = DraftConfig(kind="none")
SPECULATIVE = DraftConfig()
MOST_FIXED_NODES = 32
"""Of any engine measured. All leave room for as many in the cache, so that they share compiled steps."""
_LEAST_CACHED = 4  # requests of full length that fit the cache; few are as long, so prompts stay in it too

LONGEST_RANDOM_PROMPT = 48
"""Tokens."""


@dataclass(frozen=True, eq=False)
class Policy:
    """A model and what it is asked. prompts: token ids by kind. max_seq_len: of every engine's requests, in tokens."""

    name: str
    config: ModelConfig
    params: Params
    prompts: dict[str, list[list[int]]]
    max_seq_len: int


def smollm2(max_seq_len: int = 416) -> Policy:
    """SmolLM2-135M-Instruct in float32; each prompt is a chat's only message.

    "grounded, again" are the grounded prompts in other words, so that there are enough for 16 slots.
    """
    model = load_model(fetch())
    assert model.tokenizer is not None
    entries = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    prompts: dict[str, list[list[int]]] = {}
    for kind, source, before in (
        ("math", "math", ""),
        ("grounded", "grounded", ""),
        ("grounded, again", "grounded", "Please do exactly what I ask. "),
    ):
        texts = [before + entry["prompt"] for entry in entries if entry["kind"] == source]
        prompts[kind] = [
            model.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts
        ]
    return Policy("SmolLM2-135M", model.config, model.params, prompts, max_seq_len)


UNTRAINED = ModelConfig(
    architecture="llama",
    vocab_size=16_384,
    hidden_size=256,
    intermediate_size=704,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    eos_token_ids=(2,),
)
"""A small decoder: its steps take a few milliseconds, so that what the host does shows."""

TINY = ModelConfig(
    architecture="llama",
    vocab_size=300,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    eos_token_ids=(2,),
)
"""For tests, and where only bookkeeping is looked at."""


def untrained(config: ModelConfig, *, seed: int = 0, num_prompts: int = 56, max_seq_len: int = 224) -> Policy:
    """Random weights, and prompts of 16 to 48 random token ids."""
    rng = np.random.default_rng(seed)

    def prompt() -> list[int]:
        length = int(rng.integers(LONGEST_RANDOM_PROMPT // 3, LONGEST_RANDOM_PROMPT + 1))
        return rng.integers(3, config.vocab_size, length).tolist()

    kinds = ("math", "grounded", "grounded, again")
    prompts = {kind: [prompt() for _ in range(num_prompts)] for kind in kinds}
    return Policy(
        f"untrained, width {config.hidden_size}", config, init_params(config, seed), prompts, max_seq_len
    )


@dataclass(frozen=True)
class Work:
    """A request. group: whom it shares draft history with."""

    prompt: list[int]
    sampling: SamplingParams
    group: Hashable = None


@dataclass(frozen=True)
class Step:
    """A step of a play: when it ended, in seconds since the play began, and what it came to.

    sequences: those that emitted a token. running, waiting: sequences, after it.
    """

    end_s: float
    tokens: int
    drafted: int
    sequences: int
    running: int
    waiting: int


@dataclass(frozen=True)
class Play(Run):
    """A timed run of requests; tokens: by request and sample. steps: empty unless traced."""

    stats: EngineStats = field(default_factory=EngineStats)
    steps: tuple[Step, ...] = ()

    def tail(self, slots: int) -> tuple[int, float]:
        """Tokens and seconds of the last steps, those with fewer sequences than slots and nobody waiting."""
        for number, step in enumerate(self.steps):
            if step.waiting == 0 and step.running < slots:
                tail = self.steps[number + 1 :]
                return sum(one.tokens for one in tail), self.steps[-1].end_s - step.end_s
        return 0, 0.0


class Subject:
    """An engine under measurement."""

    def __init__(self, name: str, engine: RolloutEngine, scratch: Path) -> None:
        self.name = name
        self.engine = engine
        self._empty: Path | None = None
        if engine.config.draft.kind != "none":
            self._empty = scratch / "empty_history"
            if not self._empty.exists():
                engine.save_history(self._empty)

    def prime(self, works: Sequence[Work]) -> None:
        """Lets the prefix cache know the prompts, so that plays of them are all decoding."""
        self.play([Work(prompt, SamplingParams(max_tokens=1)) for prompt in _different(works)])

    def forget(self) -> None:
        """Empties the drafter's history."""
        self.load_history(self._empty)

    def load_history(self, path: Path | None) -> None:
        if self._empty is not None and path is not None:
            self.engine.load_history(path)

    def new_weights(self) -> None:
        """An update by the weights that serve: the prefix cache is emptied and history aged, as in training."""
        self.engine.update_weights(self.engine.params)

    def play(self, works: Sequence[Work], *, trace: bool = False) -> Play:
        """Runs the requests to their ends. trace: keep what every step did, which takes a little time itself."""
        engine = self.engine
        engine.reset_stats()
        started = time.perf_counter()
        requests = [engine.submit(work.prompt, work.sampling, group_id=work.group) for work in works]
        pending, steps, before = len(requests), [], EngineStats()
        while pending:
            pending -= len(engine.step())
            if trace:
                now = engine.stats()
                steps.append(_difference(now, before, time.perf_counter() - started))
                before = now
        seconds = time.perf_counter() - started
        for request in requests:
            if request.error is not None:
                raise request.error
        tokens = [one.token_ids.tolist() for request in requests for one in request.completions]
        return Play(seconds, tokens, engine.stats(), tuple(steps))

    def play_compiled(self, works: Sequence[Work], history: Path | None) -> Play:
        """A play from a stored history (None: an empty one) in which nothing had to be compiled."""
        while True:
            compiled = self.engine.stats().step_shapes
            self.load_history(history if history is not None else self._empty)
            play = self.play(works)
            if self.engine.stats().step_shapes == compiled:
                return play


def _different(works: Sequence[Work]) -> list[list[int]]:
    return list({tuple(work.prompt): work.prompt for work in works}.values())


def _difference(now: EngineStats, before: EngineStats, end_s: float) -> Step:
    return Step(
        end_s,
        now.generated_tokens - before.generated_tokens,
        now.drafted - before.drafted,
        now.decode_steps - before.decode_steps,
        now.running,
        now.waiting,
    )


class Bench:
    """What all parts are given: the policy, its engines (each made and warmed up once), a folder, and a voice."""

    def __init__(self, policy: Policy, scratch: Path, say: Callable[[str], None]) -> None:
        self.policy = policy
        self.scratch = scratch
        self.say = say
        self._subjects: dict[tuple[Any, ...], Subject] = {}

    def subject(
        self,
        slots: int,
        draft: DraftConfig,
        *,
        policy: Policy | None = None,
        prefix_cache: bool = True,
        warm_up: bool = True,
    ) -> Subject:
        """The engine of these sizes; policy: another than the benchmark's own."""
        policy = policy or self.policy
        key = (policy.name, slots, draft, prefix_cache)
        if key not in self._subjects:
            name = "plain" if draft.kind == "none" else "speculative" if draft.gate else f"{draft.max_nodes}"
            subject = Subject(name, self._engine(policy, slots, draft, prefix_cache), self.scratch)
            if warm_up:
                self.say(f"Warming up {policy.name}, {slots} slots, {name} ...")
                subject.engine.warm_up()
            self._subjects[key] = subject
        return self._subjects[key]

    def pair(self, slots: int, **options: Any) -> dict[str, Subject]:
        """The engine with drafting off and the one with drafting as it is by default."""
        subjects = (self.subject(slots, draft, **options) for draft in (PLAIN, SPECULATIVE))
        return {subject.name: subject for subject in subjects}

    def close(self) -> None:
        """Closes all engines, so that their caches' memory is free."""
        for subject in self._subjects.values():
            subject.engine.close()
        self._subjects.clear()

    @staticmethod
    def _engine(policy: Policy, slots: int, draft: DraftConfig, prefix_cache: bool) -> RolloutEngine:
        spare = MOST_FIXED_NODES - draft.max_nodes  # so that page tables are equally wide, and steps the same
        page_size = EngineConfig.page_size
        pages = -(-(policy.max_seq_len + MOST_FIXED_NODES) // page_size)
        config = EngineConfig(
            max_seqs=slots,
            max_seq_len=policy.max_seq_len + spare,
            max_batch_tokens=max(256, 2 * slots),
            page_size=page_size,
            kv_pages=max(slots, _LEAST_CACHED) * pages,
            prefix_cache=prefix_cache,
            draft=draft,
        )
        return RolloutEngine(policy.config, policy.params, config=config)


def in_order(names: Sequence[str], number: int) -> list[str]:
    """Who plays first in a round: each round in the opposite order of the one before."""
    return list(names)[:: 1 if number % 2 == 0 else -1]


def seeds(first: int) -> Iterator[int]:
    """Seeds of a series that no other series of the benchmark shares."""
    return itertools.count(first * 1_000_000)


def summary(plays: Sequence[Play]) -> dict[str, Any]:
    """Of one subject's rounds: median speed, and what drafting did, over all of them."""
    speeds = [play.tokens_per_s for play in plays]
    steps = sum(play.stats.decode_steps for play in plays)
    return {
        "tokens_per_s": statistics.median(speeds),
        "tokens_per_s_of_rounds": speeds,
        "tokens": sum(play.num_tokens for play in plays),
        "acceptance_length": sum(play.stats.generated_tokens for play in plays) / steps,
        "nodes_per_step": sum(play.stats.drafted for play in plays) / steps,
        "host_share": statistics.median(play.stats.host_share for play in plays),
    }


def median_ratio(plays: Sequence[Play], others: Sequence[Play]) -> float:
    """Median over the rounds of one's speed by the other's in the same round."""
    return statistics.median(
        one.tokens_per_s / other.tokens_per_s for one, other in zip(plays, others, strict=True)
    )


def identical(played: dict[str, list[Play]]) -> dict[str, int]:
    """How many completions there are, and how many of them are the same, token for token, with every subject."""
    count = same = 0
    for plays in zip(*played.values(), strict=True):
        for completions in zip(*(play.tokens for play in plays), strict=True):
            count += 1
            same += all(completion == completions[0] for completion in completions)
    return {"completions": count, "identical": same}

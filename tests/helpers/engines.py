"""Engines for tests: tiny models, awkward sizes, and any drafter. Shared, as compiling is what takes time."""

from __future__ import annotations

import functools
import os
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rollout_spec import Completion, DraftConfig, EngineConfig, RolloutEngine, SamplingParams
from rollout_spec.draft import Drafter
from rollout_spec.tokenizer import Tokenizer
from rollout_spec.tree import MAX_NODES, DraftTree
from tests.helpers.agreement import assert_agree
from tests.helpers.drafters import TokenSequence, WatchingDrafter
from tests.helpers.expectations import Expectation
from tests.helpers.random_cases import Case
from tests.helpers.tiny_models import TinyModel, tiny_model
from tests.helpers.tiny_tokenizer import tiny_tokenizer

# Every pair of a model and a shape compiles each of its step sizes anew, so tests keep to few pairs.
SHAPES: dict[str, dict[str, Any]] = {
    # One slot, so trees of all 63 nodes fit a step; pages of a size no length divides by.
    "alone": {"max_seqs": 1, "page_size": 7, "max_batch_tokens": 64},
    # Many at once, nothing short.
    "roomy": {"max_seqs": 8, "page_size": 16, "max_batch_tokens": 24},
    # Prompts in small chunks, and too few pages for four requests: they preempt each other.
    "cramped": {"max_seqs": 4, "page_size": 4, "max_batch_tokens": 12, "kv_pages": 28},
    # A page a token and no sharing.
    "unshared": {"max_seqs": 3, "page_size": 1, "max_batch_tokens": 20, "prefix_cache": False},
}


class SwitchedDrafter:
    """Hands every call on to the drafter of the moment, which a test may replace while no request runs."""

    def __init__(self) -> None:
        self.inner: Drafter = WatchingDrafter()

    def start(self, request_id: Hashable, prompt: TokenSequence, group_id: Hashable = None) -> None:
        self.inner.start(request_id, prompt, group_id)

    def extend(self, request_id: Hashable, tokens: TokenSequence) -> None:
        self.inner.extend(request_id, tokens)

    def propose(self, request_ids: Sequence[Hashable], budgets: Sequence[int]) -> list[DraftTree]:
        return self.inner.propose(request_ids, budgets)

    def finish(self, request_id: Hashable) -> None:
        self.inner.finish(request_id)

    def new_version(self, version: int) -> None:
        self.inner.new_version(version)

    def save(self, path: str | os.PathLike[str]) -> None:
        self.inner.save(path)

    def load(self, path: str | os.PathLike[str]) -> None:
        self.inner.load(path)

    @property
    def memory_bytes(self) -> int:
        return self.inner.memory_bytes


@dataclass(frozen=True, eq=False)
class SharedEngine:
    """An engine that always drafts as much as fits, with a drafter to choose."""

    model: TinyModel
    engine: RolloutEngine
    drafter: SwitchedDrafter
    tokenizer: Tokenizer

    @contextmanager
    def drafting(self, drafter: Drafter) -> Iterator[RolloutEngine]:
        self.drafter.inner = drafter
        try:
            yield self.engine
        finally:
            self.engine.abort()  # whatever a failed test left running
            self.drafter.inner = WatchingDrafter()


def tokenizer_of(model: TinyModel) -> Tokenizer:
    return tiny_tokenizer(model.config.vocab_size, model.config.eos_token_ids)


def new_engine(
    model: TinyModel, shape: str, *, drafter: Drafter | None = None, **sizes: Any
) -> RolloutEngine:
    """An engine of its own; `sizes` are EngineConfig values other than the shape's. Without a drafter it drafts
    nothing, with one as much as fits."""
    values = {**SHAPES[shape], **sizes}
    nodes = min(MAX_NODES, values["max_batch_tokens"] - 1)
    draft = DraftConfig(kind="none" if drafter is None else "trie", max_nodes=nodes, gate=False)
    return RolloutEngine(
        model.config,
        model.params,
        tokenizer=tokenizer_of(model),
        config=EngineConfig(**{"draft": draft, **values}),
        drafter=drafter,
    )


@functools.cache
def shared_engine(model_name: str, shape: str) -> SharedEngine:
    model = tiny_model(model_name)
    drafter = SwitchedDrafter()
    return SharedEngine(model, new_engine(model, shape, drafter=drafter), drafter, tokenizer_of(model))


@functools.cache
def undrafted_engine(model_name: str, shape: str) -> RolloutEngine:
    return new_engine(tiny_model(model_name), shape)


def complete(engine: RolloutEngine, cases: Sequence[Case], **keywords: Any) -> list[Completion]:
    """Completions of all cases run together, sample after sample, case after case."""
    outputs = engine.generate(
        [case.prompt for case in cases], [SamplingParams(**case.sampling) for case in cases], **keywords
    )
    assert len(outputs) == len(cases)
    return [completion for output in outputs for completion in output.completions]


def assert_idle_and_sound(engine: RolloutEngine, expected: Expectation) -> None:
    """Nothing is held or queued, and the engine generates what it should."""
    assert engine.step() == []
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pages_held) == (0, 0, 0)
    assert_agree(complete(engine, expected.cases), expected.completions, expected.owners)

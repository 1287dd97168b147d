"""Promise 5: with drafting on, throughput stays at or above 0.97 of drafting off. By a fake clock, so exactly.

The engine is the real one, with the real scheduler, draft budget and learnt step times. Only the device is not: it
knows the text beforehand and says what each step would have cost. The cost on a real machine is benchmarks/'.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from rollout_spec.kernels.sampling import TreeSample

from rollout_spec import DraftConfig, EngineConfig, RolloutEngine, SamplingParams
from rollout_spec.draft import Drafter, TrieDrafter
from rollout_spec.executor import StepOutcome
from rollout_spec.requests import Request
from rollout_spec.step_inputs import HostBatch, StepShape
from rollout_spec.tree import DraftTree
from tests.helpers.drafters import WatchingDrafter
from tests.helpers.tiny_models import tiny_model

MODEL = tiny_model("llama-tied")
CONFIG = dataclasses.replace(MODEL.config, max_position_embeddings=2048, vocab_size=50_000)
MOST_REQUESTS, LENGTH = 16, 500
LEAST_SHARE = 0.97

# Seconds of a step by its tokens. "cpu" are the ratios measured on two cores with a model of 135M parameters.
Curve = Callable[[float], float]
CURVES: dict[str, Curve] = {
    "cpu": lambda tokens: float(np.interp(tokens, [1, 4, 8, 17, 64, 256], [1.0, 1.2, 1.35, 1.8, 3.0, 9.0])),
    "memory bound": lambda tokens: 1.0 if tokens <= 64 else tokens / 64,
    "compute bound": lambda tokens: 1.0 + tokens / 4,
}
Disturbance = Callable[[StepShape, int], float]
"""Factor on the n-th time measured of a size: what else went on on the machine."""

# Token p of request r: no part of it comes again.
TEXTS = np.random.default_rng(0).integers(CONFIG.vocab_size, size=(MOST_REQUESTS, LENGTH + 64)).tolist()


def undisturbed(shape: StepShape, times: int) -> float:
    return 1.0


class FakeDevice:
    """Samples the text at every row, accepts, and adds up what the steps cost (without disturbances)."""

    def __init__(self, curve: Curve, disturbed: Disturbance) -> None:
        self.curve = curve
        self.disturbed = disturbed
        self.clock_s = 0.0
        self.times: dict[StepShape, int] = {}

    def run(self, shape: StepShape, packed: HostBatch) -> StepOutcome:
        batch = packed.arrays
        rows, seeds = batch.rows, np.asarray(batch.sequences.seeds)
        count = len(rows.token_ids)
        tokens = np.zeros(count, np.int32)
        accepted = np.ones(count, np.bool_)
        for row in np.flatnonzero(batch.row_in_use):
            text = TEXTS[seeds[rows.sequences[row], 0]]
            tokens[row] = text[rows.positions[row]]
            parent = rows.parents[row]
            if parent >= 0:
                accepted[row] = accepted[parent] and tokens[parent] == rows.token_ids[row]
        numbers = np.zeros(count, np.float32)
        seconds = self.curve(shape.tokens)
        self.clock_s += seconds
        times = self.times.get(shape, 0)
        self.times[shape] = times + 1
        sample = TreeSample(tokens, numbers, numbers, numbers, numbers, accepted)
        return StepOutcome(sample, seconds * self.disturbed(shape, times), times == 0)


class CalibratedDrafter(WatchingDrafter):
    """Hits each next token with a known probability, and says so. Prompt and seed are the request's number."""

    def __init__(self, hit: float) -> None:
        super().__init__()
        self.hit = hit
        self.rng = np.random.default_rng(0)

    def tree(self, context: Sequence[int], budget: int) -> DraftTree:
        truth = np.array(TEXTS[context[0]][len(context) : len(context) + budget])
        wrong = self.rng.random(budget) >= self.hit
        drafts = np.where(wrong, (truth + 1) % CONFIG.vocab_size, truth)
        return DraftTree.path(drafts, self.hit ** np.arange(1, budget + 1))


def tokens_per_s(
    drafter: Drafter | None,
    curve: str,
    requests: int,
    *,
    disturbed: Disturbance = undisturbed,
    warmed_up: bool = False,
) -> float:
    """Of `requests` prompts of one token that run together, until the first of them ends."""
    draft = DraftConfig(kind="none") if drafter is None else DraftConfig(max_nodes=16)
    config = EngineConfig(max_seqs=MOST_REQUESTS, max_batch_tokens=128, draft=draft)
    engine = RolloutEngine(CONFIG, MODEL.params, config=config, drafter=drafter)
    device = FakeDevice(CURVES[curve], disturbed)
    engine._core.executor.run = device.run  # type: ignore[method-assign]
    if warmed_up:
        engine.warm_up()
        device.clock_s = 0.0
    for number in range(requests):
        engine.submit([number], SamplingParams(seed=number, max_tokens=LENGTH, ignore_eos=True))
    ended: list[Request] = []
    while not ended:
        ended = engine.step()
    for request in ended:
        text = TEXTS[request.sampling.seed or 0]
        assert request.completions[0].token_ids.tolist() == text[1 : LENGTH + 1]
    return engine.stats().generated_tokens / device.clock_s


@functools.cache
def plain_tokens_per_s(curve: str, requests: int) -> float:
    return tokens_per_s(None, curve, requests)


@pytest.mark.parametrize("warmed_up", [False, True])
@pytest.mark.parametrize("requests", [1, 16])
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("hit", [0.0, 0.25])
def test_drafts_that_hardly_ever_hit_cost_nothing(
    hit: float, curve: str, requests: int, warmed_up: bool
) -> None:
    plain = plain_tokens_per_s(curve, requests)
    drafting = tokens_per_s(CalibratedDrafter(hit), curve, requests, warmed_up=warmed_up)
    assert drafting >= LEAST_SHARE * plain


@pytest.mark.parametrize(
    ("curve", "requests", "hit", "least_gain"),
    [
        ("cpu", 1, 0.6, 1.5),
        ("cpu", 1, 0.9, 3.5),
        ("cpu", 16, 0.9, 1.7),
        ("memory bound", 1, 0.5, 1.8),
        ("memory bound", 16, 0.7, 2.4),
        ("compute bound", 16, 0.95, 1.0),
    ],
)
def test_drafts_that_hit_pay(curve: str, requests: int, hit: float, least_gain: float) -> None:
    plain = plain_tokens_per_s(curve, requests)
    assert tokens_per_s(CalibratedDrafter(hit), curve, requests, warmed_up=True) >= least_gain * plain


DISTURBANCES: dict[str, Disturbance] = {
    "now and then slow": lambda shape, times: 10.0 if times % 5 == 3 else 1.0,
    "slow when first measured": lambda shape, times: 10.0 if times == 1 else 1.0,
    "fast when first measured": lambda shape, times: 0.3 if times == 1 else 1.0,
    "the least size slow when first measured": lambda shape, times: (
        10.0 if shape.tokens == shape.sequences and times in (1, 2) else 1.0
    ),
}


@pytest.mark.parametrize("warmed_up", [False, True])
@pytest.mark.parametrize("requests", [1, 16])
@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_disturbed_measurements_do_not_mislead_for_long(
    disturbance: str, requests: int, warmed_up: bool
) -> None:
    plain = plain_tokens_per_s("cpu", requests)
    drafting = tokens_per_s(
        CalibratedDrafter(0.05), "cpu", requests, disturbed=DISTURBANCES[disturbance], warmed_up=warmed_up
    )
    assert drafting >= LEAST_SHARE * plain


@pytest.mark.parametrize("requests", [1, 16])
@pytest.mark.parametrize("curve", CURVES)
def test_the_trie_drafter_costs_nothing_on_text_that_never_repeats(curve: str, requests: int) -> None:
    plain = plain_tokens_per_s(curve, requests)
    drafter = TrieDrafter(DraftConfig(capacity_tokens=50_000))
    assert tokens_per_s(drafter, curve, requests) >= LEAST_SHARE * plain

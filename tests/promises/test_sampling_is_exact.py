"""Sampling against exact enumeration: the joint distribution of the first three tokens, drafted and not.

Every sequence of three tokens has a probability that the plain model gives exactly; thousands of seeds through
the engine must follow it (Pearson's chi-square). A drafter must not bend it, though it decides what is verified.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest

from rollout_spec import RolloutEngine, RolloutOutput, SamplingParams
from rollout_spec.draft import DraftConfig, Drafter, TrieDrafter
from rollout_spec.models import ModelConfig
from rollout_spec.weights.names import to_hf
from tests.helpers.chi_square import LEAST_P_VALUE, chi_square_p_value
from tests.helpers.drafters import AdversarialDrafter, OracleDrafter
from tests.helpers.engines import SwitchedDrafter, new_engine, shared_engine, undrafted_engine
from tests.helpers.plain_model import PlainModel
from tests.helpers.plain_sampler import PlainSampling, filtered_logits, log_softmax, penalise
from tests.helpers.tiny_models import TinyModel, random_params, tiny_model

DRAWS = 2000  # of a drafted run; an undrafted one takes twice as many
LENGTH = 3
PROMPT = [1, 4, 2]

Joint = dict[tuple[int, ...], float]
"""Probability of each sequence of the first tokens."""


@functools.cache
def dice() -> TinyModel:
    """Six tokens, none of which ends anything."""
    config = ModelConfig(
        architecture="llama",
        vocab_size=6,
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=32,
    )
    params = random_params(config, seed=5)
    return TinyModel(config, params, PlainModel(config, to_hf(config, params), config.max_length))


def exact_joint(model: TinyModel, sampling: dict[str, Any]) -> Joint:
    """Probability of every possible sequence of the first LENGTH tokens."""
    numbers = PlainSampling(**sampling)
    joint: Joint = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for output, probability in joint.items():
            logits = model.plain.last_logits([*PROMPT, *output])
            filtered, _, _ = filtered_logits(penalise(logits, numbers, PROMPT, output, ()), numbers)
            for token in np.flatnonzero(np.isfinite(filtered)).tolist():
                longer[*output, token] = probability * float(np.exp(log_softmax(filtered)[token]))
        joint = longer
    return joint


@functools.cache
def dice_engine() -> tuple[RolloutEngine, SwitchedDrafter]:
    drafter = SwitchedDrafter()
    return new_engine(dice(), "roomy", drafter=drafter, max_seqs=4, max_batch_tokens=64), drafter


@functools.cache
def undrafted_dice_engine() -> RolloutEngine:
    return new_engine(dice(), "roomy", max_seqs=64, max_batch_tokens=64)


def p_value(engine: RolloutEngine, sampling: dict[str, Any], joint: Joint, draws: int, seed: int) -> float:
    """Of `draws` samples of one request, whose seeds are derived from the request's."""
    params = SamplingParams(**sampling, max_tokens=LENGTH, n=draws, seed=seed, ignore_eos=True)
    return p_value_of(engine.generate([PROMPT], params), joint)


def p_value_of(outputs: list[RolloutOutput], joint: Joint) -> float:
    drawn = [tuple(completion.token_ids.tolist()) for output in outputs for completion in output.completions]
    impossible = [tokens for tokens in drawn if tokens not in joint]
    assert impossible == []
    cells = {tokens: number for number, tokens in enumerate(joint)}
    counts = np.bincount([cells[tokens] for tokens in drawn], minlength=len(cells))
    return chi_square_p_value(counts, list(joint.values()))


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.5},
    {"temperature": 1.0},
    {"temperature": 2.0},
    {"top_p": 0.8},
    {"top_k": 3},
    {"min_p": 0.1},
    {"temperature": 1.5, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "logit_bias": {3: 1.0}},
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_undrafted(sampling: dict[str, Any]) -> None:
    joint = exact_joint(dice(), sampling)
    assert p_value(undrafted_dice_engine(), sampling, joint, 2 * DRAWS, seed=20) > LEAST_P_VALUE


def test_requests_with_consecutive_seeds() -> None:
    samplings = [SamplingParams(max_tokens=LENGTH, seed=seed) for seed in range(2 * DRAWS)]
    outputs = undrafted_dice_engine().generate([PROMPT] * len(samplings), samplings)
    assert p_value_of(outputs, exact_joint(dice(), {})) > LEAST_P_VALUE


@pytest.mark.parametrize(
    ("drafted", "sampling"),
    [
        *(("everything", sampling) for sampling in SETTINGS),
        *((drafted, SETTINGS[number]) for drafted in ("nonsense", "history") for number in (1, 3, 6)),
    ],
    ids=str,
)
def test_drafted(drafted: str, sampling: dict[str, Any]) -> None:
    joint = exact_joint(dice(), sampling)
    drafters: dict[str, Drafter] = {
        "everything": OracleDrafter([[*PROMPT, *tokens] for tokens in joint], 6),
        "nonsense": AdversarialDrafter(6, seed=1),
        "history": TrieDrafter(DraftConfig(capacity_tokens=10_000)),
    }
    engine, drafter = dice_engine()
    drafter.inner = drafters[drafted]
    accepted_before = engine.stats().accepted
    assert p_value(engine, sampling, joint, DRAWS, seed=21) > LEAST_P_VALUE
    assert engine.stats().accepted - accepted_before > DRAWS / 5, "the test must exercise acceptance"


@pytest.mark.parametrize("drafted", [False, True])
def test_over_several_blocks_of_a_vocabulary(drafted: bool) -> None:
    """Six of 600 tokens are left by top-k at each place, in all three blocks of the two-level draw."""
    model = tiny_model("llama-tied")
    sampling = {"temperature": 2.5, "top_k": 6}
    joint = exact_joint(model, sampling)
    assert {token // 256 for tokens in joint for token in tokens} == {0, 1, 2}
    if drafted:
        drafter = OracleDrafter([[*PROMPT, *tokens] for tokens in joint], 600)
        with shared_engine("llama-tied", "cramped").drafting(drafter) as engine:
            assert p_value(engine, sampling, joint, DRAWS, seed=22) > LEAST_P_VALUE
    else:
        engine = undrafted_engine("llama-tied", "cramped")
        assert p_value(engine, sampling, joint, DRAWS, seed=23) > LEAST_P_VALUE


def test_the_test_would_notice_a_slightly_wrong_distribution() -> None:
    right, wrong = {"temperature": 1.0}, {"temperature": 1.15}
    joint = exact_joint(dice(), right)
    assert p_value(undrafted_dice_engine(), wrong, joint, DRAWS, seed=24) < LEAST_P_VALUE


def test_every_sequence_is_enumerated() -> None:
    joint = exact_joint(dice(), {"temperature": 1.0})
    assert set(joint) == set(itertools.product(range(6), repeat=LENGTH))
    assert sum(joint.values()) == pytest.approx(1.0)

"""Promises 1 and 2 with the TPU kernels, which the CPU interprets: slowly, so one small engine has to do."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_spec import DraftConfig
from rollout_spec.errors import RolloutError
from rollout_spec.models import ModelConfig
from rollout_spec.weights.names import to_hf
from tests.helpers.agreement import assert_agree
from tests.helpers.drafters import OracleDrafter
from tests.helpers.engines import complete, new_engine, tokenizer_of
from tests.helpers.expectations import expect, unending
from tests.helpers.plain_model import PlainModel
from tests.helpers.random_cases import random_cases
from tests.helpers.tiny_models import TinyModel, random_params, tiny_model

CONFIG = ModelConfig(
    architecture="qwen2",
    vocab_size=257,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    max_position_embeddings=96,
    attention_bias=True,
    eos_token_ids=(256, 0),
)


def wide_model() -> TinyModel:
    """With heads as wide as the kernels need them."""
    params = random_params(CONFIG, 0)
    return TinyModel(CONFIG, params, PlainModel(CONFIG, to_hf(CONFIG, params), CONFIG.max_length))


@pytest.mark.parametrize("drafted", [True, False])
def test_tokens_are_those_of_the_plain_loop(drafted: bool) -> None:
    model = wide_model()
    cases = random_cases(np.random.default_rng(5), CONFIG, 8, longest_prompt=40, longest=24)
    expected = expect(model, cases, tokenizer_of(model))
    sequences = expected.sequences() + unending(expected, model)
    drafter = OracleDrafter(sequences, CONFIG.vocab_size, seed=0, mixed=True) if drafted else None
    sizes = {"max_seqs": 2, "page_size": 16, "kv_pages": 10, "max_batch_tokens": 12, "kernel": "pallas"}
    engine = new_engine(model, "roomy", drafter=drafter, **sizes)
    assert_agree(complete(engine, expected.cases), expected.completions, expected.owners)
    assert engine.stats().pages_held == 0


def test_a_model_or_page_that_the_kernels_do_not_support_is_refused_by_the_engine() -> None:
    draft = DraftConfig(kind="none")
    with pytest.raises(
        RolloutError, match=r"head dimension .* got 8; the page size .* got 7.*backend='reference'"
    ):
        new_engine(tiny_model("llama"), "alone", kernel="pallas", draft=draft)

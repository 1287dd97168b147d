"""Promises 1 and 2 with the policy's own heads drafting, and that what they name depends on text and weights alone."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rollout_spec import DraftConfig, EngineConfig, RolloutEngine, SamplingParams
from rollout_spec.errors import ConfigError
from rollout_spec.models import build
from rollout_spec.models.config import MTPForm
from rollout_spec.weights.names import to_hf
from tests.helpers.agreement import assert_agree
from tests.helpers.engines import complete, new_engine
from tests.helpers.expectations import expected_cases
from tests.helpers.heads import Named, OracleHeads, WatchedHeads, model_with_heads
from tests.helpers.tiny_models import TinyModel, tiny_model
from tests.promises.test_no_recompilation import counting_compilations

# Between them: every form, one and more heads, a shape with preemption, one of many, latents and experts, windows.
CASES: list[tuple[str, MTPForm, int, str, str]] = [
    ("llama-tied", "deepseek", 2, "cramped", "mtp"),
    ("qwen2", "mimo", 1, "cramped", "hybrid"),
    ("deepseek_v3", "deepseek", 1, "unshared", "mtp"),
    ("gemma2", "qwen3_next", 1, "cramped", "hybrid"),
]


@pytest.mark.parametrize(("name", "form", "heads", "shape", "kind"), CASES)
def test_tokens_are_those_of_the_plain_loop(
    name: str, form: MTPForm, heads: int, shape: str, kind: Any
) -> None:
    model = model_with_heads(name, form, heads)
    expected = expected_cases(name, 70, 24)
    draft = DraftConfig(kind=kind, gate=False, max_nodes=7, head_depth=3)
    engine = new_engine(model, shape, draft=draft)
    for _ in range(2):
        assert_agree(complete(engine, expected.cases), expected.completions, expected.owners)
    stats = engine.stats()
    assert stats.drafted > 0
    assert stats.pages_held == 0
    assert len(stats.drafted_by_depth) >= 2
    engine.close()


def truth(model: TinyModel, prompts: list[list[int]], sampling: SamplingParams) -> list[list[int]]:
    """The texts of prompts and completions, without drafting."""
    engine = new_engine(model, "roomy")
    outputs = engine.generate(prompts, sampling)
    engine.close()
    return [
        [*prompt, *completion.token_ids.tolist()]
        for prompt, output in zip(prompts, outputs, strict=True)
        for completion in output.completions
    ]


PROMPTS = [[1, 2, 4, 5, 6, 8, 9], [9, 8, 5, 1, 2], [1, 2, 4, 5, 6, 8, 9, 10, 11, 12, 13], [5]]
SAMPLING = SamplingParams(max_tokens=22, seed=11, temperature=0.8, ignore_eos=True)


def watched(model: TinyModel, shape: str, drafter: WatchedHeads, **values: Any) -> RolloutEngine:
    return new_engine(model, shape, drafter=drafter, draft=drafter.config, **values)


def assert_same_names(found: dict[tuple[int, ...], Named], wanted: dict[tuple[int, ...], Named]) -> int:
    both = set(found) & set(wanted)
    for text in both:
        np.testing.assert_array_equal(found[text][0], wanted[text][0])
        np.testing.assert_allclose(found[text][1], wanted[text][1], atol=1e-5)
    return len(both)


@pytest.mark.parametrize(
    ("name", "form", "heads"),
    [("qwen2", "mimo", 1), ("llama-tied", "deepseek", 3)],
)
def test_what_heads_name_is_the_same_after_rejections_preemption_and_sharing_as_from_scratch(
    name: str, form: MTPForm, heads: int
) -> None:
    """So their caches, which it is computed from, are too."""
    model = model_with_heads(name, form, heads)
    draft = DraftConfig(kind="mtp", gate=False, max_nodes=7, head_depth=4)
    texts = truth(model, PROMPTS, SAMPLING)
    oracle = OracleHeads(draft, texts, model.config.vocab_size)
    engine = watched(model, "cramped", oracle, kv_pages=18)
    for _ in range(2):  # the second time over pages that the first left in the prefix cache
        outputs = engine.generate(PROMPTS, SAMPLING)
    stats = engine.stats()
    assert stats.accepted > 30
    assert stats.drafted > stats.accepted
    assert stats.preemptions > 0
    assert stats.prompt_tokens_cached > 0
    assert [
        [*p, *o.completions[0].token_ids.tolist()] for p, o in zip(PROMPTS, outputs, strict=True)
    ] == texts
    engine.close()
    afresh = WatchedHeads(draft)
    engine = watched(model, "cramped", afresh, kv_pages=18, prefix_cache=False)
    for text, prompt in zip(texts, PROMPTS, strict=True):
        for cut in range(len(prompt), len(text) - 1):  # computed as one prompt each
            engine.generate([text[:cut]], dataclasses.replace(SAMPLING, max_tokens=2))
    engine.close()
    assert assert_same_names(oracle.named, afresh.named) > 25


@pytest.mark.parametrize(
    ("name", "form"), [("llama-tied", "deepseek"), ("qwen2", "mimo"), ("deepseek_v2", "deepseek")]
)
def test_what_heads_name_is_what_the_model_says_of_whole_texts(name: str, form: MTPForm) -> None:
    model = model_with_heads(name, form, 1)
    drafter = WatchedHeads(DraftConfig(kind="mtp", gate=False, head_depth=1))
    engine = watched(model, "roomy", drafter)
    engine.generate(PROMPTS, SAMPLING)
    engine.close()
    assert len(drafter.named) > 40
    ahead = jax.jit(lambda params, row: nnx.merge(build(model.config), params).logits_ahead(row, 1))
    length = max(map(len, drafter.named))
    for text, (tokens, probs) in list(drafter.named.items())[::3]:
        row = jnp.asarray([*text, *[0] * (length - len(text))], jnp.int32)[None]
        logits = np.asarray(ahead(model.params, row), np.float64)[0, 0, len(text) - 2]
        expected = np.exp(logits - np.logaddexp.reduce(logits))
        order = np.argsort(-expected)[: tokens.shape[1]]
        assert tokens[0].tolist() == order.tolist()
        np.testing.assert_allclose(probs[0], expected[order], atol=1e-4)


def test_new_heads_draft_from_the_next_step_on_and_old_ones_stay_without_them() -> None:
    old, new = model_with_heads("qwen2", "deepseek", 1), model_with_heads("qwen2", "deepseek", 1, seed=5)
    draft = DraftConfig(kind="mtp", gate=False)
    named = []
    for model in (old, new):
        drafter = WatchedHeads(draft)
        engine = watched(model, "roomy", drafter)
        engine.generate(PROMPTS, SAMPLING)
        named.append(dict(drafter.named))
        if model is old:
            drafter.named.clear()
            engine.update_weights(list(to_hf(new.config, new.params)))
            engine.generate(PROMPTS, SAMPLING)
            swapped = dict(drafter.named)
            drafter.named.clear()
            engine.update_weights({"mtp": old.params["mtp"]}, strict=False)
            engine.sleep()
            engine.wake_up()
            engine.generate(PROMPTS, SAMPLING)
            back = dict(drafter.named)
        engine.close()
    assert assert_same_names(swapped, named[1]) > 40
    assert assert_same_names(back, named[0]) > 40
    assert any(
        not np.array_equal(swapped[text][0], named[0][text][0]) for text in set(swapped) & set(named[0])
    )


@pytest.mark.parametrize("gate", [False, True])
def test_nothing_compiles_after_warm_up(gate: bool) -> None:
    model = model_with_heads("qwen2", "mimo", 1)
    engine = new_engine(model, "cramped", draft=DraftConfig(kind="hybrid", gate=gate))
    engine.warm_up()
    engine.update_weights(model.params)
    with counting_compilations() as seen:
        engine.generate(PROMPTS * 3, SAMPLING)
        engine.update_weights(model.params)
        engine.generate(PROMPTS, SAMPLING)
    engine.close()
    assert seen == []


def test_a_model_without_heads_says_what_to_do() -> None:
    model = tiny_model("qwen2")
    for kind in ("mtp", "hybrid"):
        with pytest.raises(ConfigError, match=f'kind="{kind}".*init_mtp_heads'):
            RolloutEngine(
                model.config,
                model.params,
                config=EngineConfig(draft=DraftConfig(kind=kind)),  # type: ignore[arg-type]
            )


def test_random_heads_cost_little_once_the_budget_knows_them(caplog: pytest.LogCaptureFixture) -> None:
    """They are asked ever more seldom, and nothing is verified that isn't worth it."""
    model = model_with_heads("qwen2", "mimo", 1)
    engine = new_engine(model, "cramped", draft=DraftConfig(kind="mtp"))
    engine.warm_up()
    with caplog.at_level(logging.ERROR):
        engine.generate(PROMPTS * 4, dataclasses.replace(SAMPLING, max_tokens=60))
        engine.reset_stats()
        engine.generate(PROMPTS * 4, dataclasses.replace(SAMPLING, max_tokens=60))
    assert engine.stats().nodes_per_step < 0.2
    engine.close()

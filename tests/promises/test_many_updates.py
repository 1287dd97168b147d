"""Promise 4 over many updates: nothing piles up, nothing of another version stays, and history still helps."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout_spec import RolloutEngine, SamplingParams
from rollout_spec.draft import TrieDrafter
from rollout_spec.weights import checksum, to_hf, transfer
from rollout_spec.weights.report import UPDATE_MODES
from tests.helpers.engines import new_engine
from tests.helpers.plain_sampler import log_softmax
from tests.helpers.tiny_models import TinyModel, tiny_model

OLD, NEW = tiny_model("llama-tied", 0), tiny_model("llama-tied", 1)
PROMPTS = [[number, number + 1, 2 * number, 5] for number in range(8)]


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())


def forms(model: TinyModel) -> list[Any]:
    """The weights as a tree, as named arrays, as a stream, and as a tree of numpy."""
    return [
        model.params,
        {name: np.array(array) for name, array in to_hf(model.config, model.params)},
        to_hf(model.config, model.params),
        jax.tree.map(np.array, model.params),
    ]


def test_twenty_updates_leave_memory_flat_and_there_and_back_is_the_same() -> None:
    engine = new_engine(OLD, "roomy", drafter=TrieDrafter())
    sums = [checksum(OLD.config, model.params) for model in (OLD, NEW)]
    assert sums[0] != sums[1]
    sampling = SamplingParams(max_tokens=6, ignore_eos=True, seed=0)
    sizes, tokens, reports = [], [], []
    for number in range(20):
        model = (NEW, OLD)[number % 2]
        running = [engine.submit(prompt, sampling) for prompt in PROMPTS[:4]]
        engine.step()
        reports.append(
            engine.update_weights(forms(model)[number // 2 % 4], mode=UPDATE_MODES[number // 4 % 4])
        )
        while not all(request.ended for request in running):
            engine.step()
        outputs = engine.generate(PROMPTS[4:], sampling)
        tokens.append([output.completions[0].token_ids.tolist() for output in outputs])
        assert engine.checksum() == sums[1 - number % 2]
        sizes.append(live_bytes())
    assert len(set(sizes[1:])) == 1, sizes
    assert all(one == two for one, two in zip(tokens[:-2], tokens[2:], strict=True))
    assert tokens[0] != tokens[1]
    assert reports[-1].checksum == sums[0]
    assert engine.stats().pages_held == 0


def test_a_tied_head_changes_with_its_embedding() -> None:
    engine = new_engine(OLD, "roomy")
    assert OLD.config.tie_word_embeddings
    (name,) = [name for name, _ in to_hf(OLD.config, OLD.params) if "embed_tokens" in name]
    embedding = dict(to_hf(NEW.config, NEW.params))[name]
    report = engine.update_weights({name: embedding}, strict=False)
    assert report.tensors == 1
    mixed = dict(to_hf(OLD.config, OLD.params)) | {name: embedding}
    fresh = RolloutEngine(OLD.config, OLD.params, config=engine.config)
    fresh.update_weights(mixed)
    text = list(range(20))
    scores = engine.score([[1, 2]], [text])[0]
    np.testing.assert_array_equal(scores, fresh.score([[1, 2]], [text])[0])
    untied = new_engine(OLD, "roomy").score([[1, 2]], [text])[0]
    assert np.abs(scores - untied).min() > 0


@pytest.mark.parametrize("mode", ["drain", "inflight", "inflight_keep"])
@pytest.mark.parametrize("named", [False, True])
def test_requests_go_on_while_weights_are_staged(
    mode: Any, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step on the old weights runs between any two copies here; every token still is of the version it names."""
    monkeypatch.setattr(transfer, "GROUP_BYTES", 1)
    engine = new_engine(OLD, "roomy", drafter=TrieDrafter())
    sampling = SamplingParams(max_tokens=90, ignore_eos=True, seed=4)
    request = engine.submit([1, 2, 3], sampling)
    while not request.begun:
        engine.step()
    before = request.sequences[0].num_generated
    late = engine.submit([3, 4], SamplingParams(max_tokens=3, seed=1)) if mode == "drain" else None
    report = engine.update_weights(forms(NEW)[int(named)], mode=mode)
    copies = len(jax.tree.leaves(NEW.params))
    if mode == "drain":
        assert request.ended
        assert late is not None
        assert not late.begun
        old = 90
    else:
        (span,) = report.spans
        old = span.stop
        assert old - before >= copies - 1
        assert not request.ended
    while not request.ended:
        engine.step()
    (completion,) = request.completions
    assert completion.weight_versions.tolist() == [0] * old + [1] * (90 - old)
    text = [1, 2, 3, *completion.token_ids.tolist()]
    plain = [log_softmax(model.plain.logits(text))[np.arange(2, 92), text[3:]] for model in (OLD, NEW)]
    np.testing.assert_allclose(completion.logprobs[:old], plain[0][:old], atol=1e-4)
    if mode == "inflight":
        np.testing.assert_allclose(completion.logprobs[old:], plain[1][old:], atol=1e-4)


def test_nothing_runs_meanwhile_on_a_paused_engine_or_before_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "GROUP_BYTES", 1)
    engine = new_engine(OLD, "roomy")
    request = engine.submit([1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()
    before = request.sequences[0].num_generated
    engine.pause()
    engine.update_weights(NEW.params, mode="inflight_keep")
    assert request.sequences[0].num_generated == before
    engine.resume()
    engine.update_weights(OLD.params, mode="interrupt")
    assert len(request.completions[0].token_ids) == before


def acceptance(engine: RolloutEngine, temperature: float) -> float:
    """Tokens a step that requests which others have run before get."""
    sampling = [
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature, seed=place)
        for place in range(len(PROMPTS))
    ]
    outputs = engine.generate(PROMPTS, sampling)
    steps = sum(output.completions[0].draft.steps for output in outputs)
    return sum(len(output.completions[0].token_ids) for output in outputs) / steps


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_history_helps_as_much_right_after_a_small_update(temperature: float) -> None:
    engine = new_engine(OLD, "roomy", drafter=TrieDrafter())
    first = acceptance(engine, temperature)
    before = acceptance(engine, temperature)
    rng = np.random.default_rng(0)
    nudged = jax.tree.map(
        lambda leaf: leaf * (1 + 1e-4 * rng.standard_normal(leaf.shape).astype(np.float32)), OLD.params
    )
    engine.update_weights(jax.tree.map(jnp.asarray, nudged))
    after = acceptance(engine, temperature)
    assert before > 1.5 * first, "history is what helps"
    assert after >= 0.95 * before

"""Promise 3: each token carries its weight version and log-probability; a trainer finds the same numbers."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_spec import Completion, RolloutEngine, SamplingParams
from rollout_spec.models import apply
from tests.helpers.agreement import NUMBER_TOLERANCE
from tests.helpers.drafters import AdversarialDrafter, OracleDrafter, WatchingDrafter
from tests.helpers.engines import complete, new_engine, shared_engine
from tests.helpers.expectations import expected_cases
from tests.helpers.plain_sampler import log_softmax
from tests.helpers.tiny_models import TinyModel, tiny_model

MODEL = "qwen2"
VOCABULARY = 257


def plain_logprobs(model: TinyModel, prompt: list[int], completion: Completion) -> np.ndarray:
    """float64[T]: a teacher-forced forward pass over the finished text."""
    tokens = completion.token_ids.tolist()
    logprobs = log_softmax(model.plain.logits([*prompt, *tokens]))
    return logprobs[np.arange(len(tokens)) + len(prompt) - 1, tokens]


def test_logprobs_equal_teacher_forcing_in_plain_numpy_in_the_trainers_model_and_in_score() -> None:
    shared = shared_engine(MODEL, "roomy")
    cases = expected_cases(MODEL, 2000, 20)
    drafter = OracleDrafter(cases.sequences(), shared.model.config.vocab_size, mixed=True)
    with shared.drafting(drafter) as engine:
        completions = complete(engine, cases.cases)
        prompts = [case.prompt for case in cases.owners]
        scores = engine.score(prompts, completions)
        as_tokens = engine.score(prompts, [completion.token_ids.tolist() for completion in completions])
    for prompt, completion, score, again in zip(prompts, completions, scores, as_tokens, strict=True):
        whole = np.array([*prompt, *completion.token_ids])[None]
        logits = np.asarray(apply(shared.model.config, shared.model.params, whole)[0], np.float64)
        trainer = log_softmax(logits)[np.arange(len(prompt) - 1, whole.shape[1] - 1), completion.token_ids]
        for numbers in (plain_logprobs(shared.model, prompt, completion), trainer, score, again):
            np.testing.assert_allclose(completion.logprobs, numbers, atol=NUMBER_TOLERANCE)
        assert score.dtype == np.float32


def test_scoring_takes_any_text_long_ones_in_chunks_and_empty_ones() -> None:
    model = tiny_model(MODEL)
    rng = np.random.default_rng(0)
    lengths = [(1, 0), (1, 1), (1, 95), (95, 1), (40, 56), (64, 1), (16, 16), (3, 9)]
    prompts = [rng.integers(0, VOCABULARY, length).tolist() for length, _ in lengths]
    texts = [rng.integers(0, VOCABULARY, length).tolist() for _, length in lengths]
    scores = new_engine(model, "roomy").score(prompts, texts)
    for prompt, text, score in zip(prompts, texts, scores, strict=True):
        logprobs = log_softmax(model.plain.logits([*prompt, *text]))
        expected = logprobs[np.arange(len(text)) + len(prompt) - 1, text]
        np.testing.assert_allclose(score, expected, atol=NUMBER_TOLERANCE)


def test_sampled_logprobs_and_kept_mass_give_the_whole_vocabulary_at_the_temperature() -> None:
    model = tiny_model(MODEL)
    with shared_engine(MODEL, "roomy").drafting(AdversarialDrafter(VOCABULARY, seed=0)) as engine:
        for temperature in (0.5, 1.0, 1.7):
            sampling = SamplingParams(
                temperature=temperature,
                top_k=20,
                top_p=0.9,
                min_p=0.01,
                max_tokens=20,
                seed=1,
                ignore_eos=True,
            )
            (completion,) = engine.generate([[4, 5]], sampling)[0].completions
            logits = model.plain.logits([4, 5, *completion.token_ids.tolist()])[1:-1]
            whole = log_softmax(logits / temperature)[np.arange(20), completion.token_ids]
            recomputed = completion.sampled_logprobs + np.log(completion.kept_mass)
            np.testing.assert_allclose(recomputed, whole, atol=NUMBER_TOLERANCE)
            assert (completion.kept_mass < 1).any()


def by_version(models: list[TinyModel], prompt: list[int], completion: Completion) -> np.ndarray:
    """What each token's own version of the weights says of it, float64[T]."""
    all_versions = np.stack([plain_logprobs(model, prompt, completion) for model in models])
    return all_versions[completion.weight_versions, np.arange(len(completion.token_ids))]


@pytest.mark.parametrize("mode", ["drain", "interrupt", "inflight"])
def test_versions_and_logprobs_stay_true_when_weights_change_while_requests_run(mode: str) -> None:
    models = [tiny_model(MODEL, seed) for seed in range(4)]
    engine = new_engine(models[0], "roomy", drafter=AdversarialDrafter(VOCABULARY, seed=1))
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCABULARY, int(length)).tolist() for length in rng.integers(1, 20, 40)]
    requests = [
        engine.submit(prompt, SamplingParams(max_tokens=25 - seed % 10, seed=seed, ignore_eos=True))
        for seed, prompt in enumerate(prompts)
    ]
    for version in (1, 2, 3):
        for _ in range(9):
            engine.step()
        report = engine.update_weights(models[version].params, mode=mode)
        assert (report.version, engine.weight_version) == (version, version)
    while not all(request.ended for request in requests):
        engine.step()
    seen: set[int] = set()
    mixed = 0
    for prompt, request in zip(prompts, requests, strict=True):
        (completion,) = request.completions
        versions = completion.weight_versions
        seen |= set(versions.tolist())
        mixed += len(set(versions.tolist())) > 1
        assert (np.diff(versions) >= 0).all()
        np.testing.assert_allclose(
            completion.logprobs, by_version(models, prompt, completion), atol=NUMBER_TOLERANCE
        )
    assert seen == {0, 1, 2, 3}
    assert (mixed > 0) == (mode == "inflight"), "only inflight mixes weights within a completion"


def test_keeping_the_cache_marks_tokens_with_the_new_version() -> None:
    models = [tiny_model(MODEL, seed) for seed in range(2)]
    engine = new_engine(models[0], "roomy", drafter=WatchingDrafter())
    prompt = list(range(20))
    request = engine.submit(prompt, SamplingParams(max_tokens=30, seed=0, ignore_eos=True))
    for _ in range(10):
        engine.step()
    engine.update_weights(models[1].params, mode="inflight_keep")
    while not request.ended:
        engine.step()
    versions = request.completions[0].weight_versions
    assert set(versions.tolist()) == {0, 1}
    assert (np.diff(versions) >= 0).all()
    # The old keys and values must serve nobody else.
    fresh = new_engine(models[1], "roomy")
    sampling = SamplingParams(max_tokens=10, seed=5)
    extended = [*prompt, *request.completions[0].token_ids.tolist()]
    for text in (prompt, extended):
        ours, theirs = (
            engine.generate([text], sampling)[0].completions[0],
            fresh.generate([text], sampling)[0].completions[0],
        )
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=NUMBER_TOLERANCE)


def test_continuing_under_new_weights_keeps_the_old_tokens_numbers() -> None:
    models = [tiny_model(MODEL, seed) for seed in range(2)]
    engine: RolloutEngine = new_engine(models[0], "roomy")
    prompt = [1, 2, 3]
    sampling = SamplingParams(max_tokens=8, seed=4, ignore_eos=True)
    (begun,) = engine.generate([prompt], sampling)[0].completions
    engine.update_weights(models[1].params)
    longer = SamplingParams(max_tokens=20, seed=4, ignore_eos=True)
    (whole,) = engine.generate([prompt], longer, continue_from=[begun])[0].completions
    np.testing.assert_array_equal(whole.token_ids[:8], begun.token_ids)
    np.testing.assert_array_equal(whole.weight_versions, [0] * 8 + [1] * 12)
    np.testing.assert_array_equal(whole.logprobs[:8], begun.logprobs)
    np.testing.assert_allclose(whole.logprobs, by_version(models, prompt, whole), atol=NUMBER_TOLERANCE)

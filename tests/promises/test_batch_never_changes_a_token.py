"""Promise 2: a request's tokens do not depend on what runs beside it, on order, on slots or on preemption."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollout_spec import Completion, RolloutEngine, SamplingParams
from rollout_spec.draft import DraftConfig, TrieDrafter
from tests.helpers.agreement import NUMBER_TOLERANCE, assert_agree, same_tokens
from tests.helpers.drafters import AdversarialDrafter, OracleDrafter, WatchingDrafter
from tests.helpers.engines import complete, new_engine, shared_engine
from tests.helpers.expectations import expected_cases
from tests.helpers.plain_noise import derive_seed
from tests.helpers.random_cases import Case, random_prompts
from tests.helpers.tiny_models import tiny_model

MODEL = "qwen2"


def cases() -> list[Case]:
    return expected_cases(MODEL, 1000, 25).cases


@pytest.fixture(scope="module")
def in_a_batch() -> list[Completion]:
    with shared_engine(MODEL, "roomy").drafting(WatchingDrafter()) as engine:
        completions = complete(engine, cases())
    expected = expected_cases(MODEL, 1000, 25)
    assert_agree(completions, expected.completions, expected.owners)
    return completions


def test_alone(in_a_batch: list[Completion]) -> None:
    with shared_engine(MODEL, "roomy").drafting(WatchingDrafter()) as engine:
        alone = [completion for case in cases() for completion in complete(engine, [case])]
    assert same_tokens(alone, in_a_batch)


def test_in_another_order_and_among_others(in_a_batch: list[Completion]) -> None:
    rng = np.random.default_rng(4)
    others = expected_cases(MODEL, 1001, 25).cases
    mixed = [*cases(), *others]
    order = rng.permutation(len(mixed))
    with shared_engine(MODEL, "roomy").drafting(WatchingDrafter()) as engine:
        outputs = engine.generate(
            [mixed[i].prompt for i in order], [SamplingParams(**mixed[i].sampling) for i in order]
        )
    place = {int(i): outputs[position].completions for position, i in enumerate(order)}
    assert same_tokens([c for i in range(len(cases())) for c in place[i]], in_a_batch)


def test_with_other_slots_pages_and_chunks(in_a_batch: list[Completion]) -> None:
    shared = shared_engine(MODEL, "cramped")
    for drafter in (WatchingDrafter(), AdversarialDrafter(shared.model.config.vocab_size, seed=3)):
        with shared.drafting(drafter) as engine:
            assert same_tokens(complete(engine, cases()), in_a_batch)


def test_arriving_while_others_run(in_a_batch: list[Completion]) -> None:
    with shared_engine(MODEL, "roomy").drafting(WatchingDrafter()) as engine:
        requests, queue = [], list(cases())
        while queue or not all(request.ended for request in requests):
            if queue:
                case = queue.pop(0)
                requests.append(engine.submit(case.prompt, SamplingParams(**case.sampling)))
            engine.step()
    assert same_tokens([c for request in requests for c in request.completions], in_a_batch)


def long_cases(temperature: float) -> list[Case]:
    config = tiny_model(MODEL).config
    prompts = random_prompts(np.random.default_rng(6), config, 8, longest=30)
    shared: dict[str, Any] = {"temperature": temperature, "max_tokens": 40, "ignore_eos": True}
    return [
        Case(prompt, {**shared, "seed": seed, "frequency_penalty": 0.3 * (seed % 2)})
        for seed, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_after_preemption(temperature: float, prefix_cache: bool) -> None:
    model = tiny_model(MODEL)
    cases = long_cases(temperature)
    with shared_engine(MODEL, "roomy").drafting(WatchingDrafter()) as roomy:
        expected = complete(roomy, cases)
    sequences = [
        [*case.prompt, *completion.token_ids] for case, completion in zip(cases, expected, strict=True)
    ]
    # Pages for fewer requests than there are slots: they push each other out again and again.
    drafter = OracleDrafter(sequences, model.config.vocab_size, mixed=True)
    engine = new_engine(model, "cramped", drafter=drafter, prefix_cache=prefix_cache)
    assert same_tokens(complete(engine, cases), expected)
    stats = engine.stats()
    assert stats.preemptions > 3
    assert stats.pages_held == 0
    assert sorted(drafter.ended) == sorted([int(token) for token in whole] for whole in sequences)


@pytest.mark.parametrize("first_tokens", [1, 7, 39])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_after_continue_from(temperature: float, first_tokens: int) -> None:
    cases = long_cases(temperature)
    with shared_engine(MODEL, "roomy").drafting(TrieDrafter(DraftConfig(capacity_tokens=5000))) as engine:
        expected = complete(engine, cases)
        begun = complete(
            engine, [replace(case, sampling={**case.sampling, "max_tokens": first_tokens}) for case in cases]
        )
        assert all(len(completion.token_ids) == first_tokens for completion in begun)
        # The completion knows its seed; the parameters need not repeat it.
        seedless = [replace(case, sampling={**case.sampling, "seed": None}) for case in cases]
        continued = complete(engine, seedless, continue_from=begun)
    assert same_tokens(continued, expected)
    for old, new in zip(begun, continued, strict=True):
        for name in ("token_ids", "logprobs", "sampled_logprobs", "kept_mass", "weight_versions"):
            np.testing.assert_array_equal(getattr(new, name)[:first_tokens], getattr(old, name))
        assert new.seed == old.seed
        assert new.draft.steps > old.draft.steps


def test_after_abort_and_continue_from_at_any_moment() -> None:
    cases = long_cases(1.0)
    with shared_engine(MODEL, "cramped").drafting(WatchingDrafter()) as engine:
        expected = complete(engine, cases)
        for steps in (0, 1, 5, 23):
            requests = [engine.submit(case.prompt, SamplingParams(**case.sampling)) for case in cases]
            for _ in range(steps):
                engine.step()
            engine.abort([request.request_id for request in requests if not request.ended])
            partial = [request.completions[0] for request in requests]
            aborted = {request.completions[0].finish_reason for request in requests}
            assert "abort" in aborted
            for before, whole in zip(partial, expected, strict=True):
                np.testing.assert_array_equal(before.token_ids, whole.token_ids[: len(before.token_ids)])
            assert same_tokens(complete(engine, cases, continue_from=partial), expected)


def test_continuing_what_has_ended_changes_nothing() -> None:
    cases = expected_cases(MODEL, 1002, 40).cases
    single = [replace(case, sampling={**case.sampling, "n": 1}) for case in cases]
    with shared_engine(MODEL, "cramped").drafting(WatchingDrafter()) as engine:
        whole = complete(engine, single)
        again = complete(engine, single, continue_from=whole)
    assert same_tokens(again, whole)
    assert {completion.finish_reason for completion in whole} == {"stop", "length"}


def test_samples_differ_come_in_order_and_stand_alone() -> None:
    with shared_engine(MODEL, "roomy").drafting(WatchingDrafter()) as engine:
        (output,) = engine.generate([[5, 6, 7]], SamplingParams(n=4, seed=99, max_tokens=20, ignore_eos=True))
        assert [completion.seed for completion in output.completions] == [
            derive_seed(99, i) for i in range(4)
        ]
        assert len({completion.token_ids.tobytes() for completion in output.completions}) == 4
        for completion in output.completions:
            params = SamplingParams(seed=completion.seed, max_tokens=20, ignore_eos=True)
            (alone,) = engine.generate([[5, 6, 7]], params)
            assert same_tokens(alone.completions, [completion])


def test_seeds_not_given_are_drawn_reported_and_give_the_same_again() -> None:
    model = tiny_model(MODEL)
    sampling = SamplingParams(n=2, max_tokens=10, ignore_eos=True)

    def first_outputs(engine: RolloutEngine) -> list[Completion]:
        outputs = engine.generate([[1, 2], [1, 2], [1, 2]], sampling)
        return [completion for output in outputs for completion in output.completions]

    with shared_engine(MODEL, "roomy").drafting(WatchingDrafter()) as engine:
        drawn = first_outputs(engine)
        assert len({completion.seed for completion in drawn}) == 6
        assert len({completion.token_ids.tobytes() for completion in drawn}) == 6
        for number in (0, 2, 4):  # the first sample has the request's own seed
            (again,) = engine.generate([[1, 2]], replace(sampling, seed=drawn[number].seed))
            assert same_tokens(again.completions, drawn[number : number + 2])
    one, same, other = (first_outputs(new_engine(model, "roomy", seed=seed)) for seed in (7, 7, 8))
    assert same_tokens(one, same)
    assert not same_tokens(one, other)


@pytest.mark.parametrize("extend_by", [0, 1, 5])
def test_a_prompt_that_extends_a_finished_completion_finds_its_pages(extend_by: int) -> None:
    """The next turn of a conversation: generated pages are reused and the tokens are as from nothing."""
    rng = np.random.default_rng(1)
    sampling = SamplingParams(max_tokens=30, ignore_eos=True, seed=3)
    prompt = [int(token) for token in rng.integers(0, 257, 20)]
    warm = new_engine(tiny_model(MODEL), "cramped", prefix_cache=True)
    first = warm.generate([prompt], sampling)[0].completions[0]
    second_prompt = [*prompt, *first.token_ids.tolist(), *range(extend_by)]
    before = warm.stats().prompt_tokens_cached
    second = warm.generate([second_prompt], sampling)[0].completions
    cached = warm.stats().prompt_tokens_cached - before
    # All whole pages but the last token's, whose key and value the first turn had no need to compute.
    assert cached >= (len(prompt) + len(first.token_ids) - 1) // 4 * 4
    fresh = new_engine(tiny_model(MODEL), "cramped", prefix_cache=False)
    expected = fresh.generate([second_prompt], sampling)[0].completions
    assert same_tokens(second, expected)
    np.testing.assert_allclose(second[0].kept_mass, expected[0].kept_mass, atol=NUMBER_TOLERANCE)


def test_a_groups_prompt_is_computed_once() -> None:
    prompt = [int(token) for token in np.random.default_rng(2).integers(0, 257, 33)]
    engine = new_engine(tiny_model(MODEL), "cramped")
    engine.generate([prompt] * 3, SamplingParams(n=4, max_tokens=3, seed=1))
    # 32 tokens in whole pages, once; then for each of 12 samples the last prompt token.
    assert engine.stats().prompt_tokens_computed <= 33 + 11
    assert engine.stats().prompt_tokens_cached == 11 * 32

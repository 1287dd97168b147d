"""Where inputs reach their limits: lengths, vocabularies, queues, and everything ending at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout_spec import DraftConfig, EngineConfig, RolloutEngine, SamplingParams
from rollout_spec.errors import CapacityError, ConfigError, PromptError, RolloutError
from tests.helpers.agreement import assert_agree, same_tokens
from tests.helpers.drafters import OracleDrafter, WatchingDrafter
from tests.helpers.engines import complete, new_engine, shared_engine
from tests.helpers.expectations import expect
from tests.helpers.random_cases import Case, random_tokens
from tests.helpers.tiny_models import tiny_model

MODEL = "llama"
MAX = 96  # the models' maximum length
PAIRS = [("llama", "alone"), ("qwen2", "roomy"), ("qwen2", "cramped"), ("qwen2-tied", "unshared")]


@pytest.fixture
def engine() -> RolloutEngine:
    shared = shared_engine(MODEL, "alone")
    shared.drafter.inner = WatchingDrafter()
    return shared.engine


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty": ([], "empty"),
    "empty array": (np.zeros(0, np.int32), "empty"),
    "empty text": ("", "empty"),
    "too large an id": ([1, 41, 2], r"\[41\]"),
    "far too large an id": ([1, 2**40], "1099511627776"),
    "a negative id": ([1, -1], r"\[-1\]"),
    "floats": ([1.0, 2.5], "integer"),
    "nested": ([[1, 2], [3, 4]], "flat"),
    "ragged": ([[1, 2], [3]], "token ids"),
    "too long": ([1] * (MAX + 1), str(MAX + 1)),
    "as long as the model takes": ([1] * MAX, str(MAX)),
    "a number": (7, "token ids"),
    "nothing": (None, "token ids"),
    "chat without a template": ([{"role": "user", "content": "a"}], "template"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts_are_refused_and_nothing_is_queued(name: str, engine: RolloutEngine) -> None:
    prompt, words = BAD_PROMPTS[name]
    with pytest.raises(PromptError, match=words) as raised:
        engine.generate([[1, 2], prompt, [3]], SamplingParams(max_tokens=2))
    assert "prompts[1]" in str(raised.value) or "prompt 1" in str(raised.value)
    assert isinstance(raised.value, RolloutError)
    with pytest.raises(PromptError, match=words):
        engine.submit(prompt)
    assert engine.stats().waiting == engine.stats().running == 0
    assert engine.step() == []


def test_text_and_chat_need_a_tokenizer() -> None:
    model = tiny_model(MODEL)
    mute = RolloutEngine(model.config, model.params, config=EngineConfig(max_seqs=1))
    for prompt in ("ab", [{"role": "user", "content": "a"}]):
        with pytest.raises(PromptError, match="tokenizer"):
            mute.generate([prompt])
    with pytest.raises(ConfigError, match="tokenizer"):
        mute.generate([[1]], SamplingParams(stop="a"))
    (completion,) = mute.generate([[1]], SamplingParams(max_tokens=2, seed=0))[0].completions
    assert completion.text is None


def test_text_prompts_are_tokenised(engine: RolloutEngine) -> None:
    sampling = SamplingParams(max_tokens=5, seed=0)
    from_text, from_ids = engine.generate(["ab c", [0, 1, 4, 2]], sampling)
    np.testing.assert_array_equal(from_text.prompt_token_ids, [0, 1, 4, 2])
    assert same_tokens(from_text.completions, from_ids.completions)


@pytest.mark.parametrize("length", [MAX - 1, MAX - 2, MAX - 30])
@pytest.mark.parametrize(("model_name", "shape"), PAIRS)
def test_the_maximum_length_is_exact(length: int, model_name: str, shape: str) -> None:
    shared = shared_engine(model_name, shape)
    case = Case(random_tokens(np.random.default_rng(length), shared.model.config, length), {})
    case.sampling.update(seed=1, max_tokens=50, ignore_eos=True)
    expected = expect(shared.model, [case], shared.tokenizer)
    assert len(expected.completions[0].token_ids) == min(50, MAX - length)
    longer = [[*case.prompt, *expected.completions[0].token_ids, *range(9)]]
    with shared.drafting(OracleDrafter(longer, shared.model.config.vocab_size)) as engine:
        completions = complete(engine, [case])
    assert_agree(completions, expected.completions)
    assert completions[0].finish_reason == "length"


def test_a_shorter_maximum_of_the_engine_is_exact() -> None:
    model = tiny_model(MODEL, max_length=20)
    engine = new_engine(model, "alone", max_seq_len=20)
    sampling = {"seed": 3, "max_tokens": 50, "ignore_eos": True}
    cases = [Case(list(range(length)), sampling) for length in (1, 18, 19)]
    expected = expect(model, cases, None)
    completions = complete(engine, cases)
    for completion, plain in zip(completions, expected.completions, strict=True):
        assert completion.token_ids.tolist() == plain.token_ids
        assert completion.finish_reason == "length"
    with pytest.raises(PromptError, match="20"):
        engine.submit(list(range(20)))
    with pytest.raises(ConfigError, match="97"):
        new_engine(model, "alone", max_seq_len=97)


@pytest.mark.parametrize(("model_name", "shape"), PAIRS)
def test_one_token_and_max_tokens_are_exact(model_name: str, shape: str) -> None:
    shared = shared_engine(model_name, shape)
    prompts = [[5], [5, 6], [7] * 30]
    truth = [Case(prompt, {"seed": 1, "max_tokens": 30, "ignore_eos": True}) for prompt in prompts]
    sequences = expect(shared.model, truth, None).sequences()
    for max_tokens in (1, 2, 17):
        cases = [Case(p, {"seed": 1, "max_tokens": max_tokens, "ignore_eos": True}) for p in prompts]
        with shared.drafting(OracleDrafter(sequences, shared.model.config.vocab_size)) as engine:
            completions = complete(engine, cases)
        for completion, whole, prompt in zip(completions, sequences, prompts, strict=True):
            assert completion.token_ids.tolist() == whole[len(prompt) : len(prompt) + max_tokens]
            assert (completion.finish_reason, completion.stop_token) == ("length", None)


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_all_requests_end_in_one_step(reason: str) -> None:
    shared = shared_engine("qwen2", "roomy")
    sampling: dict[str, Any] = {"seed": 2, "max_tokens": 6, "ignore_eos": True}
    if reason == "stop":  # stop tokens are as good as certain, but not allowed before the fifth token
        ends = tuple(range(20))
        sampling |= {"stop_token_ids": ends, "min_tokens": 4, "logit_bias": dict.fromkeys(ends, 60.0)}
    cases = [Case([first, 1, 2], sampling) for first in range(8)]
    with shared.drafting(WatchingDrafter()) as engine:
        requests = [engine.submit(case.prompt, SamplingParams(**case.sampling)) for case in cases]
        ended: list[int] = []
        while sum(ended) < 8:
            ended.append(len(engine.step()))
        assert engine.stats().running == engine.stats().pages_held == 0
    assert ended[-1] == 8
    assert {request.completions[0].finish_reason for request in requests} == {reason}
    assert {len(request.completions[0].token_ids) for request in requests} == {5 if reason == "stop" else 6}


def test_more_samples_than_slots() -> None:
    shared = shared_engine("qwen2", "cramped")
    case = Case([3, 1, 4, 1, 5], {"n": 11, "seed": 8, "max_tokens": 9})
    with shared.drafting(WatchingDrafter()) as engine:
        completions = complete(engine, [case])
    assert_agree(completions, expect(shared.model, [case], shared.tokenizer).completions)


BAD_SAMPLING: dict[str, tuple[dict[str, Any], str]] = {
    "bias outside": ({"logit_bias": {41: 1.0}}, "41"),
    "bad token outside": ({"bad_token_ids": (41, 99)}, "99"),
    "stop token outside": ({"stop_token_ids": [50]}, "50"),
    "nothing left": ({"bad_token_ids": tuple(range(41))}, "no token"),
    "nothing left at first": (
        {"bad_token_ids": tuple(range(40)), "stop_token_ids": [40], "min_tokens": 1},
        "no token",
    ),
}


@pytest.mark.parametrize("name", BAD_SAMPLING)
def test_parameters_that_do_not_fit_the_vocabulary_are_refused(name: str, engine: RolloutEngine) -> None:
    sampling, words = BAD_SAMPLING[name]
    with pytest.raises(ConfigError, match=words):
        engine.generate([[1]], SamplingParams(max_tokens=3, **sampling))


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_k": -1},
        {"top_k": 2.5},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": float("inf")},
        {"logit_bias": {3: float("nan")}},
        {"logit_bias": {-1: 1.0}},
        {"bad_token_ids": [-2]},
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"min_tokens": 9, "max_tokens": 8},
        {"stop": [""]},
        {"stop": [3]},
        {"n": 0},
        {"seed": -1},
        {"seed": 2**63},
        {"seed": 1.5},
    ],
    ids=str,
)
def test_a_value_out_of_range_raises_at_once(sampling: dict[str, Any]) -> None:
    (name, *_) = sampling
    with pytest.raises(ValueError, match=name):
        SamplingParams(**sampling)


def test_all_values_out_of_range_are_listed() -> None:
    with pytest.raises(ConfigError) as raised:
        SamplingParams(temperature=-1, top_p=2, n=0, seed=-1)
    assert all(name in str(raised.value) for name in ("temperature", "top_p", "n must", "seed"))


def test_numpy_numbers_are_numbers() -> None:
    sampling = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        max_tokens=np.int32(4),
        seed=np.uint64(7),
        stop_token_ids=np.array([1, 2]),
    )
    same = SamplingParams(temperature=0.5, top_k=3, max_tokens=4, seed=7, stop_token_ids=(1, 2))
    model = tiny_model(MODEL)
    engine = new_engine(model, "alone")
    assert same_tokens(
        engine.generate([np.array([1, 2], np.int64)], sampling)[0].completions,
        engine.generate([(1, 2)], same)[0].completions,
    )


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 1e-6},
        {"temperature": 1e6},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"repetition_penalty": 1e6},
    ],
    ids=str,
)
def test_extreme_values_still_give_finite_numbers(values: dict[str, Any], engine: RolloutEngine) -> None:
    sampling = SamplingParams(max_tokens=8, seed=0, ignore_eos=True, **values)
    (completion,) = engine.generate([[1, 2]], sampling)[0].completions
    for name in ("logprobs", "sampled_logprobs", "kept_mass"):
        assert np.isfinite(getattr(completion, name)).all()
    if values != {"temperature": 1e6} and "repetition_penalty" not in values:
        greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        assert same_tokens_only(engine, completion.token_ids, greedy)


def same_tokens_only(engine: RolloutEngine, tokens: np.ndarray, sampling: SamplingParams) -> bool:
    return bool(np.array_equal(engine.generate([[1, 2]], sampling)[0].completions[0].token_ids, tokens))


def test_one_parameter_set_for_all_or_one_a_prompt(engine: RolloutEngine) -> None:
    sampling = SamplingParams(max_tokens=2, seed=0)
    for wrong in ([sampling], [sampling] * 3, []):
        with pytest.raises(ValueError, match="sampling"):
            engine.generate([[1], [2]], wrong)
    with pytest.raises(ValueError, match="group_ids"):
        engine.generate([[1], [2]], sampling, group_ids=["a"])
    with pytest.raises(ValueError, match="continue_from"):
        engine.generate([[1], [2]], sampling, continue_from=[None])
    assert engine.generate([], sampling) == []
    assert engine.stats().waiting == 0


def test_outputs_name_their_prompt_and_group(engine: RolloutEngine) -> None:
    sampling = SamplingParams(max_tokens=2, seed=0)
    given = engine.generate([[1], [2], [1]], sampling, group_ids=["x", "y", ("z", 1)])
    assert [output.group_id for output in given] == ["x", "y", ("z", 1)]
    own = engine.generate([[1], [2], [1]], sampling)
    assert own[0].group_id == own[2].group_id != own[1].group_id
    assert [output.prompt_token_ids.tolist() for output in own] == [[1], [2], [1]]
    assert own[0].prompt_token_ids.dtype == np.int32


def test_a_cache_too_small_for_a_request_is_refused_by_name() -> None:
    """28 pages of 4 tokens, where the model would take 128."""
    shared = shared_engine("llama-tied", "cramped")
    cases = [Case([1] * 10, {"max_tokens": 102, "seed": 0, "ignore_eos": True})] * 2
    with shared.drafting(WatchingDrafter()) as engine:
        with pytest.raises(CapacityError, match="kv_pages"):
            engine.submit([1] * 10, SamplingParams(max_tokens=103))
        assert_agree(complete(engine, cases), expect(shared.model, cases, shared.tokenizer).completions)


@pytest.mark.parametrize("max_nodes", [0, 1, 31, 32, 33, 62, 63])
def test_every_chain_up_to_63_nodes_is_accepted_whole(max_nodes: int) -> None:
    """32 nodes and the root cross into the second ancestor word; 63 fill it."""
    shared = shared_engine(MODEL, "alone")
    case = Case([1, 2, 3], {"seed": 4, "max_tokens": 80, "ignore_eos": True})
    expected = expect(shared.model, [case], shared.tokenizer)
    drafter = OracleDrafter(expected.sequences(), 41, deepest=max_nodes)
    with shared.drafting(drafter) as engine:
        completions = complete(engine, [case])
    assert_agree(completions, expected.completions)
    steps, rest = 1, 79
    while rest > 0:
        rest -= 1 + min(max_nodes, rest - 1)
        steps += 1
    assert completions[0].draft.steps == steps


def test_config_faults_are_all_listed() -> None:
    with pytest.raises(ConfigError) as raised:
        EngineConfig(max_seqs=0, page_size=-1, prefix_cache="yes")
    assert all(name in str(raised.value) for name in ("max_seqs", "page_size", "prefix_cache"))
    with pytest.raises(ValueError, match="max_nodes"):
        DraftConfig(max_nodes=64)

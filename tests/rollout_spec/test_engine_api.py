"""The engine's verbs: what they take, in which state, and what they hand out to whom.

tests/promises says that tokens are right and that nothing is lost; here is the rest of the API.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rollout_spec import Completion, DraftConfig, EngineConfig, RolloutEngine, RolloutError, SamplingParams
from rollout_spec.errors import (
    ConfigError,
    EngineStateError,
    ModelLoadError,
    PromptError,
    RequestFailedError,
    UnknownRequestError,
)
from rollout_spec.requests import Request
from tests.helpers.drafters import WatchingDrafter
from tests.helpers.engines import SHAPES, new_engine
from tests.helpers.tiny_models import tiny_model
from tests.helpers.tiny_tokenizer import tiny_tokenizer

MODEL, SHAPE = tiny_model("llama"), "cramped"
FOREVER = 30


def sampling(tokens: int = 5, **values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": tokens, "ignore_eos": True, "seed": 1, **values})


@pytest.fixture
def engine() -> Iterator[RolloutEngine]:
    """An engine that fails the test instead of stepping for ever with nothing to compute."""
    made = new_engine(MODEL, SHAPE)
    advance, idle = made._core.advance, 0

    def counted(**keywords: Any) -> None:
        nonlocal idle
        idle = 0 if made._core.scheduler.has_work else idle + 1
        assert idle < FOREVER, "the engine would step for ever"
        advance(**keywords)

    made._core.advance = counted  # type: ignore[method-assign]
    yield made
    made.close()


def run(engine: RolloutEngine, *requests: Request) -> list[Request]:
    """Steps until they have ended; returns whatever `step` handed out."""
    handed_out: list[Request] = []
    while not all(request.ended for request in requests):
        handed_out += engine.step()
    return [*handed_out, *engine.step()]


def tokens_of(completion: Completion) -> list[int]:
    return [int(token) for token in completion.token_ids]


# Making an engine


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path / "nothing.gguf", tmp_path, str(tmp_path)):
        with pytest.raises(ValueError) as raised:
            RolloutEngine.from_pretrained(path)
        assert isinstance(raised.value, ModelLoadError)
        assert str(tmp_path) in str(raised.value)


def test_a_mesh_is_refused() -> None:
    mesh = jax.make_mesh((1,), ("x",))
    with pytest.raises(ConfigError, match="mesh"):
        RolloutEngine(MODEL.config, MODEL.params, mesh=mesh)


def test_a_maximum_length_beyond_the_models_is_refused_with_both() -> None:
    with pytest.raises(ConfigError, match=r"max_seq_len is 97, .* 96"):
        RolloutEngine(MODEL.config, MODEL.params, config=EngineConfig(max_seq_len=97))


@pytest.mark.parametrize("kind", ["mtp", "hybrid"])
def test_drafters_of_other_versions_are_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match=kind):
        RolloutEngine(MODEL.config, MODEL.params, config=EngineConfig(draft=DraftConfig(kind=kind)))


def test_weights_handed_over_in_numpy_may_be_overwritten_afterwards() -> None:
    arrays = jax.tree.map(lambda leaf: np.array(leaf), MODEL.params)
    config = EngineConfig(draft=DraftConfig(kind="none"), **SHAPES[SHAPE])
    made = RolloutEngine(MODEL.config, arrays, config=config)
    expected = made.generate([[5, 6]], sampling())[0].completions[0]
    for leaf in jax.tree.leaves(arrays):
        leaf[...] = 0
    assert tokens_of(made.generate([[5, 6]], sampling())[0].completions[0]) == tokens_of(expected)
    assert expected.text is None, "there is no tokenizer"


# What comes in


@pytest.mark.parametrize("prompts", ["a text", 5, None, [1, 2, 3], [None], [[1], "a", []]], ids=repr)
def test_prompts_must_be_a_list_of_prompts(prompts: Any, engine: RolloutEngine) -> None:
    for call in (engine.generate, engine.stream):
        with pytest.raises(PromptError, match="prompts"):
            call(prompts, sampling())
    assert engine.stats().waiting == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sampling", [sampling()]),
        ("sampling", [sampling()] * 3),
        ("sampling", []),
        ("sampling", [sampling(), None]),
        ("sampling", None),
        ("sampling", 0.7),
        ("sampling", {"temperature": 0.7}),
        ("group_ids", ["a"]),
        ("group_ids", 5),
        ("group_ids", [["not"], ["hashable"]]),
        ("continue_from", [None]),
        ("continue_from", 5),
        ("continue_from", [None, "a text"]),
    ],
    ids=repr,
)
def test_options_must_be_one_for_all_or_one_a_prompt(name: str, value: Any, engine: RolloutEngine) -> None:
    options = {"sampling": sampling(), name: value}
    with pytest.raises(ConfigError, match=name):
        engine.generate([[1], [2]], **options)
    assert engine.stats().waiting == 0


def test_one_bad_prompt_among_good_ones_queues_none(engine: RolloutEngine) -> None:
    with pytest.raises(PromptError, match=r"prompts\[2\]"):
        engine.generate([[1], [2], [999], [3]], sampling())
    assert engine.stats().waiting == engine.stats().running == 0
    assert engine.step() == []


def test_nothing_asked_for_is_nothing(engine: RolloutEngine) -> None:
    assert engine.generate([]) == []
    assert list(engine.stream([])) == []
    assert engine.score([], []) == []
    assert engine.step() == []
    engine.abort([])
    engine.abort()


@pytest.mark.parametrize("name", ["request_id", "group_id"])
def test_ids_must_be_hashable(name: str, engine: RolloutEngine) -> None:
    with pytest.raises(ConfigError, match=name):
        engine.submit([1], sampling(), **{name: ["a", "list"]})  # type: ignore[arg-type]


def test_ids_are_the_callers_or_new_ones(engine: RolloutEngine) -> None:
    named = [engine.submit([1], sampling(), request_id=request_id) for request_id in ("a", 0, ("b", 1), 2)]
    new = [engine.submit([1], sampling()) for _ in range(3)]
    ids = [request.request_id for request in [*named, *new]]
    assert ids[:4] == ["a", 0, ("b", 1), 2]
    assert len(set(ids)) == len(ids)
    run(engine, *named, *new)
    again = engine.submit([1], sampling(), request_id="a")
    assert run(engine, again) == [again]


def test_a_request_is_waiting_running_and_finished(engine: RolloutEngine) -> None:
    request = engine.submit([1, 2], sampling(), request_id="r", group_id="g")
    assert (request.status, request.ended, request.completions) == ("waiting", False, [])
    engine.step()
    assert (request.status, request.ended, request.completions) == ("running", False, [])
    assert run(engine, request) == [request]
    assert (request.status, request.ended, request.error) == ("finished", True, None)
    assert request.output is not None
    assert (request.output.request_id, request.output.group_id) == ("r", "g")
    assert request.completions == request.output.completions


def test_completions_have_the_shapes_and_types_of_the_api(engine: RolloutEngine) -> None:
    (output,) = engine.generate([[1, 2, 3]], sampling(7, n=2))
    assert output.prompt_token_ids.dtype == np.int32
    assert output.prompt_token_ids.tolist() == [1, 2, 3]
    for completion in output.completions:
        assert completion.token_ids.dtype == completion.weight_versions.dtype == np.int32
        for numbers in (completion.logprobs, completion.sampled_logprobs, completion.kept_mass):
            assert numbers.dtype == np.float32
            assert numbers.shape == completion.token_ids.shape == (7,)
        assert isinstance(completion.text, str)
        assert (completion.finish_reason, completion.stop_token) == ("length", None)
        assert (completion.draft.steps, completion.draft.drafted, completion.draft.accepted) == (7, 0, 0)


# Aborting


def test_aborting_the_same_request_twice_in_one_call(engine: RolloutEngine) -> None:
    request = engine.submit([1], sampling(20))
    engine.step()
    engine.abort([request.request_id, request.request_id])
    assert run(engine, request) == [request]
    assert request.completions[0].finish_reason == "abort"


def test_aborting_what_has_ended_is_an_error_that_names_it(engine: RolloutEngine) -> None:
    request = engine.submit([1], sampling(1), request_id="done")
    run(engine, request)
    with pytest.raises(KeyError, match="done") as raised:
        engine.abort(["done"])
    assert isinstance(raised.value, UnknownRequestError)
    assert isinstance(raised.value, RolloutError)


def test_aborting_before_the_first_step_gives_an_empty_completion(engine: RolloutEngine) -> None:
    request = engine.submit([1], sampling(n=2))
    engine.abort()
    assert engine.step() == [request]
    for completion in request.completions:
        assert (completion.finish_reason, len(completion.token_ids), completion.text) == ("abort", 0, "")
        assert completion.draft.acceptance_length == 0.0


def test_samples_that_had_ended_keep_their_reason_when_the_rest_is_aborted(engine: RolloutEngine) -> None:
    request = engine.submit([1, 2], sampling(30, n=3, stop_token_ids=range(0, 41, 4)))
    while not any(sequence.finish_reason for sequence in request.sequences):
        engine.step()
    engine.abort([request.request_id])
    assert {completion.finish_reason for completion in request.completions} == {"stop", "abort"}


# Streams


def test_a_stream_is_in_the_order_in_which_prompts_end(engine: RolloutEngine) -> None:
    lengths = [9, 3, 6, 1]
    outputs = list(engine.stream([[first] for first in range(4)], [sampling(length) for length in lengths]))
    assert [output.index for output in outputs] == [3, 1, 2, 0]
    assert [len(output.completions[0].token_ids) for output in outputs] == [1, 3, 6, 9]


def test_a_stream_checks_its_prompts_when_called(engine: RolloutEngine) -> None:
    with pytest.raises(PromptError):
        engine.stream([[1], []])
    engine.pause()
    with pytest.raises(EngineStateError):
        engine.stream([[1]])


@pytest.mark.parametrize("yielded", [0, 1, 2])
def test_closing_a_stream_early_aborts_its_own_and_no_others(yielded: int, engine: RolloutEngine) -> None:
    other = engine.submit([9], sampling(12), request_id="other")
    stream = engine.stream([[first] for first in range(3)], [sampling(length) for length in (2, 4, 30)])
    for _ in range(yielded):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    stats = engine.stats()
    assert stats.running + stats.waiting == (0 if other.ended else 1)
    assert [request.request_id for request in run(engine, other)] == ["other"]
    assert len(other.completions[0].token_ids) == 12
    assert engine.stats().pages_held == 0


def test_a_stream_that_is_dropped_without_a_step_leaves_nothing(engine: RolloutEngine) -> None:
    stream = engine.stream([[1], [2]], sampling())
    del stream
    assert engine.stats().waiting == engine.stats().running == 0


def test_requests_of_others_that_end_during_a_stream_are_handed_out_once(engine: RolloutEngine) -> None:
    others = [engine.submit([first], sampling(2 + first)) for first in range(2)]
    outputs = list(engine.stream([[7], [8]], sampling(6)))
    assert len(outputs) == 2
    assert all(other.ended for other in others)
    assert {request.request_id for request in engine.step()} == {other.request_id for other in others}
    assert engine.step() == []


def test_stepping_by_hand_inside_a_stream(engine: RolloutEngine) -> None:
    """`step` may hand the stream's requests out, and the stream must not wait for them then."""
    other = engine.submit([9], sampling(3))
    handed_out, indices = [], []
    for output in engine.stream([[first] for first in range(3)], [sampling(n) for n in (1, 3, 5)]):
        indices.append(output.index)
        for _ in range(10):
            handed_out += engine.step()
    assert sorted(indices) == [0, 1, 2]
    assert other in [*handed_out, *engine.step()]


def test_generating_and_scoring_inside_a_stream(engine: RolloutEngine) -> None:
    indices = []
    for output in engine.stream([[first] for first in range(3)], [sampling(n) for n in (1, 3, 5)]):
        indices.append(output.index)
        (inner,) = engine.generate([[20, 21]], sampling(9))
        assert len(inner.completions[0].token_ids) == 9
        (scores,) = engine.score([[20, 21]], inner.completions)
        np.testing.assert_allclose(scores, inner.completions[0].logprobs, atol=2e-4)
    assert sorted(indices) == [0, 1, 2]


def test_two_streams_side_by_side(engine: RolloutEngine) -> None:
    """What ends while the other is stepped is not lost: each yields all of its own."""
    first = engine.stream([[1], [2]], [sampling(n) for n in (4, 9)])
    second = engine.stream([[4], [5]], [sampling(n) for n in (1, 2)])
    pairs = list(zip(first, second, strict=True))
    assert [output.index for output, _ in pairs] == [0, 1]
    assert [output.index for _, output in pairs] == [0, 1]


def test_a_stream_hands_on_what_failed(engine: RolloutEngine) -> None:
    stream = engine.stream([[1], [2]], [sampling(2), sampling(20)])
    next(stream)

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("broken")

    engine._core.executor.run = broken  # type: ignore[assignment, method-assign]
    with pytest.raises(RequestFailedError, match="broken"):
        next(stream)
    assert engine.stats().running == 0


# States


def history(engine: RolloutEngine) -> None:
    engine.save_history("nowhere")


VERBS: dict[str, Callable[[RolloutEngine], Any]] = {
    "generate": lambda engine: engine.generate([[1]], sampling(1)),
    "stream": lambda engine: list(engine.stream([[1]], sampling(1))),
    "score": lambda engine: engine.score([[1]], [[2]]),
    "warm_up": lambda engine: engine.warm_up(),
    "step": lambda engine: engine.step(),
    "update_weights": lambda engine: engine.update_weights(MODEL.params),
    "submit": lambda engine: engine.submit([1], sampling(1)),
    "abort": lambda engine: engine.abort(),
    "pause": lambda engine: engine.pause(),
    "resume": lambda engine: engine.resume(),
    "sleep": lambda engine: engine.sleep(),
    "wake_up": lambda engine: engine.wake_up(),
}
REFUSED = {
    "paused": ("resume", ["generate", "stream", "score", "warm_up"]),
    "asleep": ("wake_up", ["generate", "stream", "score", "warm_up", "step", "update_weights"]),
    "closed": ("closed", list(VERBS)),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("state", REFUSED)
def test_what_each_state_refuses_and_what_it_does_not(state: str, verb: str, engine: RolloutEngine) -> None:
    {"paused": engine.pause, "asleep": engine.sleep, "closed": engine.close}[state]()
    word, refused = REFUSED[state]
    if verb in refused:
        with pytest.raises(RuntimeError, match=word) as raised:
            VERBS[verb](engine)
        assert isinstance(raised.value, EngineStateError)
    else:
        VERBS[verb](engine)


def test_pausing_keeps_requests_where_they_are(engine: RolloutEngine) -> None:
    (expected,) = engine.generate([[1, 2]], sampling(12))
    request = engine.submit([1, 2], sampling(12))
    engine.step()
    engine.step()
    engine.pause()
    engine.pause()
    late = engine.submit([3], sampling(2))
    held = engine.stats().pages_held
    assert [engine.step() for _ in range(5)] == [[]] * 5
    assert engine.stats().pages_held == held > 0
    engine.resume()
    run(engine, request, late)
    assert tokens_of(request.completions[0]) == tokens_of(expected.completions[0])
    assert engine.stats().preemptions == 0


def test_aborts_while_paused_or_asleep_are_handed_out(engine: RolloutEngine) -> None:
    request, other = engine.submit([1, 2], sampling(12)), engine.submit([3], sampling(12))
    engine.step()
    engine.pause()
    engine.abort([request.request_id])
    assert engine.step() == [request]
    engine.sleep()
    engine.abort([other.request_id])
    engine.wake_up()
    assert engine.step() == [other]
    assert engine.stats().pages_held == 0


def test_requests_submitted_while_asleep_run_afterwards(engine: RolloutEngine) -> None:
    (expected,) = engine.generate([[1, 2]], sampling(6))
    engine.sleep()
    request = engine.submit([1, 2], sampling(6))
    engine.wake_up()
    run(engine, request)
    assert tokens_of(request.completions[0]) == tokens_of(expected.completions[0])


def test_sleeping_moves_weights_to_the_host_and_back(engine: RolloutEngine) -> None:
    engine.sleep()
    engine.sleep()
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(engine.params))
    engine.wake_up()
    engine.wake_up()
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(engine.params))
    jax.tree.map(np.testing.assert_array_equal, engine.params, MODEL.params)


def test_an_engine_sleeps_paused_and_wakes_up_paused(engine: RolloutEngine) -> None:
    engine.pause()
    engine.sleep()
    engine.wake_up()
    with pytest.raises(EngineStateError, match="resume"):
        engine.generate([[1]])
    engine.resume()
    engine.generate([[1]], sampling(1))


def test_with_closes_also_after_an_error() -> None:
    made = new_engine(MODEL, SHAPE)
    with contextlib.suppress(ZeroDivisionError), made:
        request = made.submit([1], sampling(20))
        raise ZeroDivisionError
    assert isinstance(request.error, EngineStateError)
    with pytest.raises(EngineStateError, match="closed"):
        made.step()


def test_history_needs_a_drafter(engine: RolloutEngine, tmp_path: Path) -> None:
    for call in (engine.save_history, engine.load_history):
        with pytest.raises(EngineStateError, match="drafting is off"):
            call(tmp_path / "history")


# Resuming


def test_partial_and_fresh_prompts_run_together(engine: RolloutEngine) -> None:
    (whole,) = engine.generate([[1, 2]], sampling(12))
    (begun,) = engine.generate([[1, 2]], sampling(5))
    resumed, fresh = engine.generate(
        [[1, 2], [1, 2]], sampling(12, seed=1), continue_from=[begun.completions[0], None]
    )
    assert tokens_of(resumed.completions[0]) == tokens_of(fresh.completions[0])
    assert tokens_of(fresh.completions[0]) == tokens_of(whole.completions[0])


def test_resuming_what_stopped_runs_nothing(engine: RolloutEngine) -> None:
    (output,) = engine.generate([[1, 2]], sampling(30, stop_token_ids=range(0, 41, 2)))
    (stopped,) = output.completions
    assert stopped.finish_reason == "stop"
    steps = engine.stats().steps
    (again,) = engine.generate([[1, 2]], sampling(30), continue_from=[stopped])
    request = engine.submit([1, 2], sampling(30), continue_from=stopped)
    assert request.ended
    assert engine.step() == [request]
    for completion in (again.completions[0], request.completions[0]):
        assert tokens_of(completion) == tokens_of(stopped)
        assert (completion.finish_reason, completion.stop_token) == ("stop", stopped.stop_token)
        assert completion.text == stopped.text
    assert engine.stats().steps == steps


def test_resuming_what_already_has_max_tokens_ends_at_once(engine: RolloutEngine) -> None:
    (output,) = engine.generate([[1, 2]], sampling(5))
    (again,) = engine.generate([[1, 2]], sampling(5), continue_from=output.completions)
    assert tokens_of(again.completions[0]) == tokens_of(output.completions[0])
    assert again.completions[0].finish_reason == "length"
    assert again.completions[0].text == output.completions[0].text


# Scoring


def test_scores_of_texts_of_any_length_that_fits(engine: RolloutEngine) -> None:
    """Also of such that fill the whole cache, in chunks smaller than a row for each token."""
    rng = np.random.default_rng(0)
    (output,) = engine.generate([[1, 2, 3]], sampling(9))
    filler = rng.integers(0, 41, 95).tolist()
    assert engine._core.executor.num_pages * 4 == 112
    prompts = [[1, 2, 3], [1, 2, 3], [5], filler[:1]]
    completions = [output.completions[0], [], [6], filler]
    scores = engine.score(prompts, completions)
    assert [len(score) for score in scores] == [9, 0, 1, 95]
    assert all(score.dtype == np.float32 for score in scores)
    np.testing.assert_allclose(scores[0], output.completions[0].logprobs, atol=2e-4)


def test_texts_that_can_not_be_scored_are_refused_by_place(engine: RolloutEngine) -> None:
    with pytest.raises(PromptError, match="2 prompts and 1 completions"):
        engine.score([[1], [2]], [[3]])
    with pytest.raises(PromptError, match=r"prompts\[1\].*97 tokens, at most 96"):
        engine.score([[1], [2]], [[3], [4] * 96])
    with pytest.raises(PromptError, match=r"completions\[0\]"):
        engine.score([[1]], [[41]])
    with pytest.raises(PromptError, match=r"prompts\[0\] is empty"):
        engine.score([[]], [[4]])
    assert engine.stats().waiting == 0


def test_a_text_longer_than_the_cache_can_not_be_scored() -> None:
    made = new_engine(MODEL, SHAPE, kv_pages=5)
    assert len(made.score([[1] * 10], [[2] * 10])[0]) == 10
    with pytest.raises(PromptError, match="21 tokens, at most 20"):
        made.score([[1] * 10], [[2] * 11])


def test_texts_are_scored_as_their_tokens() -> None:
    made = new_engine(MODEL, SHAPE)
    tokenizer = tiny_tokenizer(MODEL.config.vocab_size, MODEL.config.eos_token_ids)
    scores = made.score(["ab", tokenizer.encode("ab")], [tokenizer.encode("cx")] * 2)
    np.testing.assert_array_equal(scores[0], scores[1])


# Stats


def test_stats_count_and_start_anew(engine: RolloutEngine) -> None:
    engine.generate([[1, 2, 3], [4, 5]], [sampling(4), sampling(7)])
    stats = engine.stats()
    assert stats.requests_finished == 2
    assert stats.generated_tokens == stats.decode_steps == 11
    assert stats.prompt_tokens_computed == 5
    assert stats.acceptance_length == 1.0
    assert stats.tokens_per_s > 0
    assert 0 < stats.host_share < 1
    assert (stats.running, stats.waiting, stats.pages_held) == (0, 0, 0)
    engine.reset_stats()
    assert stats.generated_tokens == 11, "what was handed out is the caller's"
    fresh = engine.stats()
    assert (fresh.generated_tokens, fresh.steps, fresh.requests_finished) == (0, 0, 0)
    assert (fresh.acceptance_length, fresh.tokens_per_s, fresh.host_share) == (0.0, 0.0, 0.0)
    assert fresh.step_shapes == stats.step_shapes > 0


def test_the_drafter_hears_of_every_request_once() -> None:
    drafter = WatchingDrafter()
    made = new_engine(MODEL, SHAPE, drafter=drafter)
    made.generate([[1, 2], [3]], sampling(4))
    made.score([[1, 2]], [[3, 4]])
    assert [context[:-4] for context in sorted(drafter.ended)] == [[1, 2], [3]]
    assert drafter.contexts == {}

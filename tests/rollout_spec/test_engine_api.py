"""What the engine's verbs take and return. Streams and states have files of their own, and tests/promises
says that tokens are right and that nothing is lost.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rollout_spec import DraftConfig, EngineConfig, RolloutEngine, RolloutError
from rollout_spec.errors import (
    ConfigError,
    ModelLoadError,
    PromptError,
    UnknownRequestError,
)
from tests.helpers.drafters import WatchingDrafter
from tests.helpers.engines import SHAPES, new_engine
from tests.helpers.tiny_tokenizer import tiny_tokenizer
from tests.rollout_spec.watched_engine import MODEL, SHAPE, run, sampling, tokens_of

# Making an engine


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path / "nothing.gguf", tmp_path, str(tmp_path)):
        with pytest.raises(ValueError) as raised:
            RolloutEngine.from_pretrained(path)
        assert isinstance(raised.value, ModelLoadError)
        assert str(tmp_path) in str(raised.value)


def test_a_mesh_of_unknown_axes_is_refused() -> None:
    mesh = jax.make_mesh((1,), ("x",))
    with pytest.raises(ConfigError, match="mesh axes must be of data, model, expert; got x"):
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

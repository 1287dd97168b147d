"""Promise 4 in every state: each mode, whatever the engine does, with weights good or bad."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollout_spec import Completion, RolloutEngine, SamplingParams
from rollout_spec.errors import WeightUpdateError
from rollout_spec.requests import Request
from rollout_spec.weights.names import to_hf
from rollout_spec.weights.report import UPDATE_MODES
from tests.helpers.agreement import same_tokens
from tests.helpers.drafters import OracleDrafter
from tests.helpers.engines import new_engine
from tests.helpers.plain_sampler import log_softmax
from tests.helpers.tiny_models import TinyModel, tiny_model

MODEL, SHAPE = "qwen2", "cramped"
LOG_PROBABILITY_TOLERANCE = 1e-4
PROMPTS = [list(range(5, 35)), [7, 8, 9], [50, 3, 50, 3, 50], list(range(100, 112))]
LENGTH = 22
AFTERWARDS = [[1, 2, 3], list(range(5, 20))]
Q, UP, NORM = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.norm.weight",
)


def model(version: int) -> TinyModel:
    return tiny_model(MODEL, version)


def sampling(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH, seed=seed, ignore_eos=True)


@functools.cache
def fresh(version: int) -> tuple[list[Completion], list[Completion]]:
    """What a fresh engine generates for PROMPTS, and for what is asked afterwards."""
    engine = new_engine(model(version), SHAPE)
    return run_all(engine, PROMPTS), run_all(engine, AFTERWARDS)


def run_all(engine: RolloutEngine, prompts: list[list[int]]) -> list[Completion]:
    outputs = engine.generate(prompts, [sampling(seed) for seed in range(len(prompts))])
    return [output.completions[0] for output in outputs]


# States


def submitted(engine: RolloutEngine, prompts: list[list[int]]) -> list[Request]:
    return [engine.submit(prompt, sampling(seed)) for seed, prompt in enumerate(prompts)]


def idle(engine: RolloutEngine) -> list[Request]:
    run_all(engine, PROMPTS[:2])
    return []


def prefilling(engine: RolloutEngine) -> list[Request]:
    requests = submitted(engine, PROMPTS[:1])
    engine.step()
    assert 0 < requests[0].sequences[0].cached < len(PROMPTS[0])
    return requests


def mid_tree(engine: RolloutEngine) -> list[Request]:
    requests = submitted(engine, PROMPTS[:2])
    while engine.stats().accepted < 2:
        engine.step()
    assert not any(request.ended for request in requests)
    return requests


def preempted(engine: RolloutEngine) -> list[Request]:
    requests = submitted(engine, PROMPTS)
    while not any(request.begun and request.status == "waiting" for request in requests):
        engine.step()
    assert engine.stats().preemptions > 0
    return requests


def paused(engine: RolloutEngine) -> list[Request]:
    requests = mid_tree(engine)
    engine.pause()
    return requests


def asleep(engine: RolloutEngine) -> list[Request]:
    requests = mid_tree(engine)
    engine.sleep(level=1)
    return requests


def deeply_asleep(engine: RolloutEngine) -> list[Request]:
    requests = prefilling(engine)
    engine.sleep(level=2)
    return requests


STATES = [idle, prefilling, mid_tree, preempted, paused, asleep, deeply_asleep]


# Weights: those of version 1, whole or damaged.


def hf_arrays() -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in to_hf(model(1).config, model(1).params)}


def raising_half_way() -> Iterator[tuple[str, np.ndarray]]:
    pairs = list(hf_arrays().items())
    yield from pairs[: len(pairs) // 2]
    raise ConnectionError("the sender is gone")


def not_a_number() -> dict[str, np.ndarray]:
    arrays = hf_arrays()
    arrays[UP][2, 3] = np.nan
    return arrays


def in_two_files(path: Path) -> Path:
    arrays = {name: np.ascontiguousarray(array) for name, array in hf_arrays().items()}
    names = sorted(arrays)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, inside in files.items():
        save_file({name: arrays[name] for name in inside}, path / file)
    index = ", ".join(f'"{name}": "{file}"' for file, inside in files.items() for name in inside)
    (path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{index}}}}}')
    return path


def lost_a_file(path: Path) -> Path:
    (in_two_files(path) / "b.safetensors").unlink()
    return path


def truncated(path: Path) -> Path:
    file = in_two_files(path) / "b.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return path


GOOD: dict[str, Callable[[Path], Any]] = {
    "tree": lambda path: model(1).params,
    "folder": in_two_files,
}
BAD: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "missing name": (
        lambda path: {name: array for name, array in hf_arrays().items() if name != Q},
        WeightUpdateError,
        Q,
    ),
    "unknown name": (lambda path: {**hf_arrays(), "foo": np.zeros(3)}, WeightUpdateError, "foo"),
    "wrong shape": (lambda path: {**hf_arrays(), UP: hf_arrays()[UP].T}, WeightUpdateError, UP),
    "wrong dtype": (lambda path: {**hf_arrays(), NORM: np.ones(16, np.int8)}, WeightUpdateError, NORM),
    "not a number": (lambda path: not_a_number(), WeightUpdateError, UP),
    "raising half-way": (lambda path: raising_half_way(), ConnectionError, "gone"),
    "lost a file": (lost_a_file, WeightUpdateError, "b.safetensors"),
    "truncated": (truncated, WeightUpdateError, "b.safetensors"),
}


def engine_in(state: Callable[[RolloutEngine], list[Request]]) -> tuple[RolloutEngine, list[Request]]:
    texts = [
        [*prompt, *completion.token_ids.tolist()]
        for prompt, completion in zip(PROMPTS, fresh(0)[0], strict=True)
    ]
    drafter = OracleDrafter(texts, model(0).config.vocab_size, mixed=True, deepest=2)
    engine = new_engine(model(0), SHAPE, drafter=drafter)
    return engine, state(engine)


def finish(engine: RolloutEngine, requests: list[Request]) -> None:
    engine.wake_up()
    engine.resume()
    for _ in range(500):
        if all(request.ended for request in requests):
            break
        engine.step()
    assert [request.error for request in requests if request.error is not None] == []
    assert all(request.ended for request in requests), "something waits for ever"
    engine.step()
    assert engine.stats().pages_held == 0


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("mode", UPDATE_MODES)
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_a_bad_update_is_as_if_it_had_never_been(
    state: Callable[[RolloutEngine], list[Request]], mode: Any, bad: str, tmp_path: Path
) -> None:
    make, error, word = BAD[bad]
    engine, requests = engine_in(state)
    steps = engine.stats().steps
    with pytest.raises(error, match=word.replace(".", r"\.")):
        engine.update_weights(make(tmp_path), mode=mode, check_finite=True)
    assert (engine.weight_version, engine.stats().steps) == (0, steps), "it was refused before anything ran"
    finish(engine, requests)
    completions = [request.completions[0] for request in requests]
    assert same_tokens(completions, fresh(0)[0][: len(requests)])
    assert all((completion.weight_versions == 0).all() for completion in completions)
    assert same_tokens(run_all(engine, AFTERWARDS), fresh(0)[1])


@pytest.mark.parametrize("good", GOOD)
@pytest.mark.parametrize("mode", UPDATE_MODES)
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_a_good_update_leaves_an_engine_that_equals_a_fresh_one(
    state: Callable[[RolloutEngine], list[Request]], mode: Any, good: str, tmp_path: Path
) -> None:
    engine, requests = engine_in(state)
    begun = [request for request in requests if request.begun]
    counts = [request.sequences[0].num_generated for request in requests]
    report = engine.update_weights(GOOD[good](tmp_path), mode=mode, check_finite=True)
    assert report.deferred == (mode == "drain" and state in (asleep, deeply_asleep))
    assert engine.weight_version == (0 if report.deferred else 1)
    finish(engine, requests)
    assert engine.weight_version == report.version == 1
    assert engine.checksum() == report.checksum == new_engine(model(1), SHAPE).checksum()
    for index, (request, count) in enumerate(zip(requests, counts, strict=True)):
        (completion,) = request.completions
        old = {"drain": LENGTH, "interrupt": count}.get(mode, count) if request in begun else 0
        assert (completion.weight_versions[:old] == 0).all()
        assert (completion.weight_versions[old:] == 1).all()
        aborted = mode == "interrupt" and request in begun
        assert completion.finish_reason == ("abort" if aborted else "length")
        assert len(completion.token_ids) == (count if aborted else LENGTH)
        np.testing.assert_array_equal(completion.token_ids[:old], fresh(0)[0][index].token_ids[:old])
        if request not in begun or (old == 0 and mode == "inflight"):
            assert same_tokens([completion], [fresh(1)[0][index]])
        if mode != "inflight_keep" or state in (asleep, deeply_asleep):
            assert_logprobs_are_those_of_each_version(PROMPTS[index], completion)
    assert same_tokens(run_all(engine, AFTERWARDS), fresh(1)[1])


def assert_logprobs_are_those_of_each_version(prompt: list[int], completion: Completion) -> None:
    """What a trainer recomputes under each span's weights."""
    tokens = completion.token_ids.tolist()
    for version, start, stop in completion.version_spans:
        logprobs = log_softmax(model(version).plain.logits([*prompt, *tokens]))
        places = np.arange(start, stop)
        recomputed = logprobs[places + len(prompt) - 1, completion.token_ids[start:stop]]
        np.testing.assert_allclose(
            completion.logprobs[start:stop], recomputed, atol=LOG_PROBABILITY_TOLERANCE
        )


def test_the_report_says_which_tokens_came_from_which_weights() -> None:
    engine, requests = engine_in(mid_tree)
    counts = [request.sequences[0].num_generated for request in requests]
    first = engine.update_weights(model(1).params, version=7, mode="inflight")
    assert [(span.version, span.start, span.stop) for span in first.spans] == [(0, 0, n) for n in counts]
    assert [span.request_id for span in first.spans] == [request.request_id for request in requests]
    while not all(
        request.sequences[0].num_generated > n for request, n in zip(requests, counts, strict=True)
    ):
        engine.step()
    second = engine.update_weights(model(0).params, version=9, mode="inflight_keep")
    for request, count in zip(requests, counts, strict=True):
        now = request.sequences[0].num_generated
        spans = [span for span in second.spans if span.request_id == request.request_id]
        assert [(span.version, span.start, span.stop) for span in spans] == [(0, 0, count), (7, count, now)]
    finish(engine, requests)
    for request in requests:
        assert [version for version, _, _ in request.completions[0].version_spans] == [0, 7, 9]


def test_back_and_forth_gives_the_same_tokens_and_checksums() -> None:
    engine, _ = engine_in(idle)
    reports = [engine.update_weights(model(version).params) for version in (1, 0, 1, 0)]
    checksums = [report.checksum for report in reports]
    assert checksums[0] == checksums[2] != checksums[1] == checksums[3] == engine.checksum()
    for version in (1, 0, 1):
        engine.update_weights(model(version).params)
        assert same_tokens(run_all(engine, AFTERWARDS), fresh(version)[1])

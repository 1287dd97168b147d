"""Promise 4: an update replaces everything or nothing, and nothing of an old version serves a new one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from rollout_spec import Completion, RolloutEngine, SamplingParams
from rollout_spec.errors import RolloutError, WeightUpdateError
from rollout_spec.weights.names import to_hf
from tests.helpers.agreement import same_tokens
from tests.helpers.drafters import OracleDrafter, WatchingDrafter
from tests.helpers.engines import complete, new_engine
from tests.helpers.expectations import expected_cases
from tests.helpers.random_cases import Case
from tests.helpers.tiny_models import TinyModel, tiny_model

MODEL = "qwen2"


def model_a() -> TinyModel:
    return tiny_model(MODEL, 0)


def model_b() -> TinyModel:
    return tiny_model(MODEL, 1)


def cases() -> list[Case]:
    return expected_cases(MODEL, 3000, 12).cases


def hf_arrays(model: TinyModel) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in to_hf(model.config, model.params)}


@pytest.fixture(scope="module")
def fresh() -> dict[str, list[Completion]]:
    """What fresh engines with A's and with B's weights generate."""
    return {
        name: complete(new_engine(model, "cramped"), cases())
        for name, model in (("A", model_a()), ("B", model_b()))
    }


@pytest.fixture
def engine() -> RolloutEngine:
    """An engine with A's weights, a warm prefix cache and a drafter that remembers."""
    expected = expected_cases(MODEL, 3000, 12)
    drafter = OracleDrafter(expected.sequences(), model_a().config.vocab_size, mixed=True)
    warm = new_engine(model_a(), "cramped", drafter=drafter)
    complete(warm, cases())
    return warm


def test_the_two_weights_differ(fresh: dict[str, list[Completion]]) -> None:
    assert not same_tokens(fresh["A"], fresh["B"])


FORMS: dict[str, Callable[[TinyModel], Any]] = {
    "pytree": lambda model: model.params,
    "numpy pytree": lambda model: jax.tree.map(np.asarray, model.params),
    "named arrays": lambda model: list(to_hf(model.config, model.params)),
    "generator": lambda model: to_hf(model.config, model.params),
    "mapping": hf_arrays,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", ["drain", "interrupt", "inflight", "inflight_keep"])
def test_a_to_b_equals_a_fresh_engine_with_b_and_back_equals_a(
    form: str, mode: str, engine: RolloutEngine, fresh: dict[str, list[Completion]]
) -> None:
    for version, (name, model) in enumerate((("B", model_b()), ("A", model_a()), ("B", model_b())), start=1):
        report = engine.update_weights(FORMS[form](model), mode=mode)
        assert (report.previous_version, report.version, engine.weight_version) == (
            version - 1,
            version,
            version,
        )
        completions = complete(engine, cases())
        assert same_tokens(completions, fresh[name])
        assert all((completion.weight_versions == version).all() for completion in completions)


def test_a_folder_of_safetensors(
    engine: RolloutEngine, fresh: dict[str, list[Completion]], tmp_path: Path
) -> None:
    save_file(
        {name: np.ascontiguousarray(array) for name, array in hf_arrays(model_b()).items()},
        tmp_path / "model.safetensors",
    )
    engine.update_weights(tmp_path)
    assert same_tokens(complete(engine, cases()), fresh["B"])


def test_versions_are_counted_or_given(engine: RolloutEngine) -> None:
    assert engine.weight_version == 0
    assert engine.update_weights(model_b().params, version=70).version == 70
    assert engine.update_weights(model_a().params).version == 71
    (completion, *_) = complete(engine, cases()[:1])
    assert (completion.weight_versions == 71).all()
    assert engine.drafter.versions == [70, 71]


def without(arrays: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: array for name, array in arrays.items() if name not in names}


Q, UP, NORM = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.norm.weight",
)


def poisoned(value: float) -> dict[str, Any]:
    arrays = hf_arrays(model_b())
    arrays[UP][3, 2] = value
    arrays[NORM][0] = value
    return arrays


# What is sent, and the words that the error must hold: every fault by its name.
BAD_UPDATES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "missing": (
        lambda: without(hf_arrays(model_b()), Q, NORM),
        ["missing", "layers.0.self_attn.q_proj", "norm"],
    ),
    "unknown": (
        lambda: {
            **hf_arrays(model_b()),
            "model.layers.9.mlp.up_proj.weight": np.zeros((2, 2)),
            "foo": np.zeros(3),
        },
        ["unknown", "model.layers.9.mlp.up_proj.weight", "foo"],
    ),
    "wrong shape": (
        lambda: {**hf_arrays(model_b()), UP: hf_arrays(model_b())[UP].T, NORM: np.ones(17, np.float32)},
        ["shape", UP, "(16, 32)", "(32, 16)", NORM, "(17,)", "(16,)"],
    ),
    "wrong dtype": (
        lambda: {**hf_arrays(model_b()), UP: hf_arrays(model_b())[UP].astype(np.int32)},
        ["dtype", UP, "int32", "float32"],
    ),
    "everything at once": (
        lambda: {**without(hf_arrays(model_b()), Q), "foo": np.zeros(3), NORM: np.ones(17, np.float32)},
        ["missing", "layers.0.self_attn.q_proj", "foo", "(17,)"],
    ),
    "pytree without a layer": (
        lambda: {**model_b().params, "layers": {}},
        ["missing", "layers.0.self_attn.q_proj", "layers.0.mlp.up_proj"],
    ),
    "pytree with a wrong leaf": (
        lambda: {**model_b().params, "norm": {"scale": jnp.ones(5), "bias": jnp.ones(16)}},
        ["norm.scale", "(5,)", "norm.bias"],
    ),
    "same name twice": (lambda: [*hf_arrays(model_b()).items(), (Q, hf_arrays(model_b())[Q])], [Q, "twice"]),
    "not a number": (lambda: poisoned(np.nan), [UP, NORM]),
    "infinite": (lambda: poisoned(-np.inf), [UP, NORM]),
    "nothing at all": (lambda: {}, ["missing", "embed_tokens"]),
    "an iterator that fails": (lambda: (1 // 0 for _ in range(1)), []),
    "not weights": (lambda: 42, []),
}


@pytest.mark.parametrize("name", BAD_UPDATES)
@pytest.mark.parametrize("mode", ["drain", "interrupt", "inflight", "inflight_keep"])
def test_a_bad_update_changes_nothing_and_lists_every_fault(
    name: str, mode: str, engine: RolloutEngine, fresh: dict[str, list[Completion]]
) -> None:
    make, words = BAD_UPDATES[name]
    before = jax.tree.map(np.asarray, engine.params)
    sampling = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
    running = engine.submit([1, 2, 3], sampling)
    for _ in range(3):
        engine.step()
    error = ZeroDivisionError if name == "an iterator that fails" else WeightUpdateError
    with pytest.raises(error) as raised:
        engine.update_weights(make(), mode=mode, check_finite=True)
    assert [word for word in words if word not in str(raised.value)] == []
    assert engine.weight_version == 0
    jax.tree.map(np.testing.assert_array_equal, before, engine.params)
    assert not running.ended, "requests must go on as if nothing had been tried"
    while not running.ended:
        engine.step()
    alone = new_engine(model_a(), "cramped").generate([[1, 2, 3]], sampling)[0].completions
    assert same_tokens(running.completions, alone)
    assert same_tokens(complete(engine, cases()), fresh["A"])
    engine.update_weights(model_b().params)
    assert same_tokens(complete(engine, cases()), fresh["B"])


def test_errors_are_both_ours_and_the_built_in(engine: RolloutEngine) -> None:
    with pytest.raises(ValueError) as raised:
        engine.update_weights({})
    assert isinstance(raised.value, RolloutError)


def test_leaving_some_weights_out_on_purpose(engine: RolloutEngine) -> None:
    report = engine.update_weights(
        {NORM: hf_arrays(model_b())[NORM], Q: hf_arrays(model_b())[Q]}, strict=False
    )
    assert report.version == 1
    mixed = hf_arrays(model_a()) | {NORM: hf_arrays(model_b())[NORM], Q: hf_arrays(model_b())[Q]}
    for name, array in to_hf(model_a().config, engine.params):
        np.testing.assert_array_equal(array, mixed[name])
    with pytest.raises(WeightUpdateError, match="foo"):
        engine.update_weights({NORM: hf_arrays(model_b())[NORM], "foo": np.zeros(2)}, strict=False)
    assert engine.weight_version == 1


def test_what_the_sender_does_to_its_arrays_afterwards_is_not_seen(
    engine: RolloutEngine, fresh: dict[str, list[Completion]]
) -> None:
    arrays = hf_arrays(model_b())
    engine.update_weights(arrays)
    for array in arrays.values():
        array[...] = 0
    assert same_tokens(complete(engine, cases()), fresh["B"])
    tree = jax.tree.map(lambda leaf: np.array(leaf), model_a().params)
    engine.update_weights(tree)
    for leaf in jax.tree.leaves(tree):
        leaf[...] = 0
    assert same_tokens(complete(engine, cases()), fresh["A"])
    donated = jax.tree.map(jnp.copy, model_b().params)
    engine.update_weights(donated)
    for leaf in jax.tree.leaves(donated):
        leaf.delete()
    assert same_tokens(complete(engine, cases()), fresh["B"])


def test_weights_that_were_not_numbers_leave_no_trace(
    engine: RolloutEngine, fresh: dict[str, list[Completion]]
) -> None:
    """Unless asked, NaN is taken; keys and values computed with it must not reach what runs afterwards."""
    engine.update_weights(jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), model_a().params))
    complete(engine, cases())
    engine.update_weights(model_a().params)
    assert same_tokens(complete(engine, cases()), fresh["A"])


def test_drain_finishes_what_runs_on_the_old_weights_even_if_pages_run_out() -> None:
    engine = new_engine(model_a(), "cramped", drafter=WatchingDrafter())
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)
    requests = [engine.submit(list(range(first, first + 12)), sampling) for first in range(4)]
    while sum(request.status == "running" for request in requests) < 2:
        engine.step()
    running = [request for request in requests if request.status == "running"]
    engine.update_weights(model_b().params, mode="drain")
    assert engine.stats().preemptions > 0, "the test must run out of pages"
    for request in running:
        assert request.ended
        assert (request.completions[0].weight_versions == 0).all()
    while not all(request.ended for request in requests):
        engine.step()
    for request in requests:
        assert len(set(request.completions[0].weight_versions.tolist())) == 1


def test_interrupt_ends_what_runs_with_what_it_has_and_the_rest_runs_on_new_weights() -> None:
    engine = new_engine(model_a(), "cramped")
    sampling = SamplingParams(max_tokens=25, ignore_eos=True, seed=1)
    requests = [engine.submit([1, 2, first], sampling) for first in range(6)]
    for _ in range(5):
        engine.step()
    report = engine.update_weights(model_b().params, mode="interrupt")
    interrupted = [request for request in requests if request.ended]
    assert 0 < len(interrupted) < 6
    assert set(report.ended) == {request.request_id for request in interrupted}
    handed_out = list(engine.step())
    while not all(request.ended for request in requests):
        handed_out += engine.step()
    handed_out += engine.step()
    assert sorted(r.request_id for r in handed_out) == sorted(r.request_id for r in requests)
    uninterrupted = new_engine(model_a(), "cramped")
    for request in interrupted:
        (partial,) = request.completions
        assert partial.finish_reason == "abort"
        assert 0 < len(partial.token_ids) < 25
        (whole,) = uninterrupted.generate([request.prompt_token_ids], sampling)[0].completions
        np.testing.assert_array_equal(partial.token_ids, whole.token_ids[: len(partial.token_ids)])
    for request in requests:
        if request not in interrupted:
            assert (request.completions[0].weight_versions == 1).all()


def test_unknown_modes_and_versions_are_refused(engine: RolloutEngine) -> None:
    with pytest.raises(ValueError, match="mode"):
        engine.update_weights(model_b().params, mode="sometime")
    with pytest.raises(ValueError, match="version"):
        engine.update_weights(model_b().params, version="new")
    assert engine.weight_version == 0

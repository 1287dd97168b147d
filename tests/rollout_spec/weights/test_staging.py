"""Staging weights: every form they may come in, every fault at once, and copies of everything."""

from __future__ import annotations

import gc
import json
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from rollout_spec import RolloutError
from rollout_spec.errors import WeightUpdateError
from rollout_spec.models import build, init_params
from rollout_spec.weights import checksum
from rollout_spec.weights.names import to_hf
from rollout_spec.weights.staging import StagedWeights
from tests.helpers.tiny_models import tiny_model
from tests.rollout_spec.weights.staged import NEW, OLD, assert_equal, hf_arrays, stage_into

UNTIED = tiny_model("qwen2", 1)
Q, NORM, EMBEDDING = (
    "model.layers.1.self_attn.q_proj.weight",
    "model.norm.weight",
    "model.embed_tokens.weight",
)


def staged(weights: Any, **options: Any) -> StagedWeights:
    return stage_into(OLD.config, OLD.params, weights, **options)


def refused(weights: Any, **options: Any) -> str:
    """The message with which they are refused."""
    with pytest.raises(ValueError) as raised:
        staged(weights, **options)
    assert isinstance(raised.value, WeightUpdateError)
    assert isinstance(raised.value, RolloutError)
    return str(raised.value)


# Forms


def in_folder(path: Path, arrays: dict[str, np.ndarray], shards: int = 1) -> Path:
    """Writes arrays as Hugging Face does: one file, or several with an index."""
    path.mkdir()
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    if shards == 1:
        save_file(contiguous, path / "model.safetensors")
        return path
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        part = dict(list(contiguous.items())[shard::shards])
        save_file(part, path / f"part-{shard}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{shard}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def with_text_keys(params: Any) -> Any:
    return {**params, "layers": {str(number): layer for number, layer in params["layers"].items()}}


FORMS: dict[str, Callable[[Path], Any]] = {
    "pytree": lambda path: NEW.params,
    "numpy pytree": lambda path: jax.tree.map(np.asarray, NEW.params),
    "pytree with text keys of layers": lambda path: with_text_keys(NEW.params),
    "pytree with a list of layers": lambda path: {
        **NEW.params,
        "layers": list(NEW.params["layers"].values()),
    },
    "read-only mapping": lambda path: MappingProxyType(NEW.params),
    "nnx state": lambda path: nnx.state(nnx.merge(build(NEW.config), NEW.params)),
    "nnx module": lambda path: nnx.merge(build(NEW.config), NEW.params),
    "names": lambda path: hf_arrays(),
    "names and jax arrays": lambda path: dict(to_hf(NEW.config, NEW.params)),
    "list of pairs": lambda path: list(hf_arrays().items()),
    "pairs in another order": lambda path: reversed(list(hf_arrays().items())),
    "generator": lambda path: ((name, array) for name, array in to_hf(NEW.config, NEW.params)),
    "folder": lambda path: in_folder(path / "one", hf_arrays()),
    "name of a folder": lambda path: str(in_folder(path / "one", hf_arrays())),
    "folder of shards": lambda path: in_folder(path / "many", hf_arrays(), shards=3),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_weights(form: str, tmp_path: Path) -> None:
    found = staged(FORMS[form](tmp_path))
    assert_equal(found.params, NEW.params)
    leaves = jax.tree.leaves(NEW.params)
    assert found.tensors == len(leaves)
    assert found.bytes == sum(leaf.nbytes for leaf in leaves)
    assert found.skipped == ()


def test_a_model_with_a_head_of_its_own() -> None:
    old = init_params(UNTIED.config, seed=5)
    found = stage_into(UNTIED.config, old, hf_arrays(UNTIED))
    assert_equal(found.params, UNTIED.params)
    assert_equal(stage_into(UNTIED.config, old, UNTIED.params).params, UNTIED.params)


def test_copies_that_exporters_add_are_ignored() -> None:
    extra = {
        "lm_head.weight": hf_arrays()[EMBEDDING],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4),
    }
    assert_equal(staged({**hf_arrays(), **extra}).params, NEW.params)


# Types


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("library", ["numpy", "jax"])
def test_floats_of_every_kind_become_the_engines(dtype: Any, library: str) -> None:
    arrays: dict[str, Any] = {name: array.astype(dtype) for name, array in hf_arrays().items()}
    if library == "jax":
        arrays = {name: jnp.asarray(array) for name, array in arrays.items()}
    found = staged(arrays)
    expected = jax.tree.map(lambda leaf: np.asarray(leaf).astype(dtype).astype(np.float32), NEW.params)
    assert {leaf.dtype for leaf in jax.tree.leaves(found.params)} == {np.dtype(np.float32)}
    assert_equal(found.params, expected)


def test_an_engine_in_bfloat16_gets_bfloat16() -> None:
    old = init_params(OLD.config, dtype=jnp.bfloat16)
    found = stage_into(OLD.config, old, hf_arrays())
    assert {leaf.dtype for leaf in jax.tree.leaves(found.params)} == {jnp.dtype(jnp.bfloat16)}
    assert_equal(found.params, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), NEW.params))


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.bool_, np.complex64])
def test_other_types_are_refused_by_name(dtype: Any) -> None:
    message = refused({**hf_arrays(), Q: hf_arrays()[Q].astype(dtype)})
    for word in (Q, np.dtype(dtype).name, "float32", "1 fault"):
        assert word in message


# Faults


def test_all_faults_are_listed_at_once() -> None:
    arrays: dict[str, Any] = hf_arrays()
    del arrays["model.layers.0.mlp.up_proj.weight"]
    arrays[Q] = arrays[Q][:, :-1]
    arrays[NORM] = arrays[NORM].astype(np.int64)
    arrays["model.layers.7.mlp.up_proj.weight"] = np.zeros((4, 4))
    arrays["nonsense"] = np.zeros(3)
    message = refused([*arrays.items(), (EMBEDDING, arrays[EMBEDDING])])
    for line in (
        "missing: model.layers.0.mlp.up_proj.weight",
        f"shape: {Q}: expected (32, 32), got (32, 31)",
        f"dtype: {NORM}: expected a floating type (float32), got int64",
        "unknown: model.layers.7.mlp.up_proj.weight",
        "unknown: nonsense",
        f"sent twice: {EMBEDDING}",
        "6 fault",
    ):
        assert line in message


def test_both_shape_and_type_of_one_weight_are_listed() -> None:
    message = refused({**hf_arrays(), NORM: np.zeros((3, 3), np.int8)})
    assert "(3, 3)" in message
    assert "int8" in message


def test_faults_of_pytrees_are_named_by_their_paths() -> None:
    params = with_text_keys(NEW.params)
    params["layers"]["1"] = {**params["layers"]["1"], "extra": {"kernel": np.zeros(2)}}
    params["norm"] = {"scale": np.zeros(7)}
    del params["embed_tokens"]
    message = refused(params)
    for line in (
        "unknown: layers.1.extra.kernel",
        "shape: norm.scale: expected (32,), got (7,)",
        "missing: embed_tokens.embedding",
        "3 fault",
    ):
        assert line in message


def test_a_whole_pytree_in_hugging_faces_layout_is_not_taken_for_ours() -> None:
    """up_proj is [32, 48] here and [48, 32] there."""
    params = jax.tree.map(lambda leaf: leaf.T, NEW.params)
    message = refused(params)
    assert "layers.0.mlp.up_proj.kernel: expected (32, 48), got (48, 32)" in message


@pytest.mark.parametrize(
    "weights",
    [
        42,
        None,
        3.5,
        [1, 2, 3],
        ["model.norm.weight"],
        [("model.norm.weight",)],
        [(5, np.zeros(3))],
        {"model.norm.weight": "text"},
        {"model.norm.weight": None},
        {"model.norm.weight": object()},
        {NORM: [[1.0], [2.0, 3.0]]},
        {"layers": {0: {"x": "text"}}},
        {"layers": {0: NEW.params["layers"][0], "1": NEW.params["layers"][1]}},
    ],
    ids=lambda weights: str(weights)[:40],
)
def test_what_is_no_weights_is_refused_and_not_misread(weights: Any) -> None:
    assert len(refused(weights)) > 20


def test_an_error_of_the_senders_iterator_is_the_senders() -> None:
    def failing() -> Iterator[tuple[str, np.ndarray]]:
        yield NORM, hf_arrays()[NORM]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        staged(failing())


def test_folders_that_can_not_be_read_are_refused_by_name(tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in refused(tmp_path / "nowhere")
    assert "safetensors" in refused(tmp_path)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "model.safetensors").write_bytes(b"not a header")
    assert "broken" in refused(broken)
    shards = in_folder(tmp_path / "shards", hf_arrays(), shards=2)
    (shards / "part-1.safetensors").unlink()
    assert "part-1.safetensors" in refused(shards)


def test_a_folder_with_a_weight_in_integers_is_refused_by_its_name(tmp_path: Path) -> None:
    arrays = {**hf_arrays(), Q: np.zeros((32, 32), np.int8), NORM: np.zeros(9, np.float32)}
    message = refused(in_folder(tmp_path / "quantized", arrays))
    assert Q in message
    assert NORM in message, "all faults are listed"


# Leaving weights out


def test_weights_left_out_on_purpose_stay_and_are_listed() -> None:
    found = staged({NORM: hf_arrays()[NORM], Q: hf_arrays()[Q]}, strict=False)
    expected = hf_arrays(OLD) | {name: hf_arrays()[name] for name in (NORM, Q)}
    for name, array in to_hf(OLD.config, found.params):
        np.testing.assert_array_equal(array, expected[name])
    assert found.tensors == 2
    assert len(found.skipped) == len(expected) - 2
    assert EMBEDDING in found.skipped
    assert NORM not in found.skipped


def test_a_part_of_a_pytree_may_be_sent_too() -> None:
    found = staged({"layers": {1: NEW.params["layers"][1]}}, strict=False)
    assert_equal(found.params["layers"][1], NEW.params["layers"][1])
    assert_equal(found.params["layers"][0], OLD.params["layers"][0])


@pytest.mark.parametrize(
    "weights", [{}, [], iter(()), {"layers": {}}], ids=lambda weights: type(weights).__name__
)
def test_nothing_at_all_is_refused_also_then(weights: Any) -> None:
    assert "no weights at all" in refused(weights, strict=False)


def test_leaving_out_does_not_excuse_other_faults() -> None:
    message = refused({NORM: np.zeros(3), "nonsense": np.zeros(3)}, strict=False)
    assert "nonsense" in message
    assert "(3,)" in message
    assert "missing" not in message


# Not numbers


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused_if_asked(value: float) -> None:
    arrays = hf_arrays()
    arrays[Q][3, 4] = arrays[NORM][0] = value
    message = refused(arrays, check_finite=True)
    assert f"not finite: {Q}" in message
    assert f"not finite: {NORM}" in message
    assert "2 fault" in message
    assert staged(arrays).tensors == len(arrays)
    assert staged(hf_arrays(), check_finite=True).tensors == len(arrays)


def test_numbers_that_overflow_the_engines_type_are_not_finite() -> None:
    arrays = {name: array.astype(np.float64) for name, array in hf_arrays().items()}
    arrays[NORM][0] = 1e300
    with np.errstate(over="ignore"):
        assert f"not finite: {NORM}" in refused(arrays, check_finite=True)


# Copies


@pytest.mark.parametrize("form", ["pytree", "names"])
def test_what_is_staged_is_the_engines_own(form: str) -> None:
    for to_array in (np.array, jnp.array):
        tree = jax.tree.map(lambda leaf, to_array=to_array: to_array(leaf), NEW.params)
        weights = tree if form == "pytree" else dict(to_hf(NEW.config, tree))
        found = staged(weights)
        for leaf in jax.tree.leaves(tree):
            if isinstance(leaf, np.ndarray):
                leaf[...] = -1
            else:
                leaf.delete()
        assert_equal(found.params, NEW.params)


def test_views_and_strides_are_read_as_what_they_show() -> None:
    arrays = {name: np.repeat(array, 2, axis=0)[::2] for name, array in hf_arrays().items()}
    assert_equal(staged(arrays).params, NEW.params)


# Memory


class Tracked(np.ndarray):
    """An array that can be referred to weakly."""


def test_a_stream_is_taken_one_tensor_at_a_time() -> None:
    """When the next tensor is asked for, nobody but the sender holds the one before, jax's own waste aside."""
    sent: list[weakref.ref] = []

    def stream() -> Iterator[tuple[str, np.ndarray]]:
        for name in hf_arrays():
            deadline = time.monotonic() + 5
            while any(one() is not None for one in sent) and time.monotonic() < deadline:
                time.sleep(0.001)
                jax.device_put(0)  # what jax's threads have read is let go of by its next call
            assert [one for one in sent if one() is not None] == []
            tensor = hf_arrays()[name].view(Tracked)
            sent.append(weakref.ref(tensor))
            pair = (name, tensor)
            del tensor
            yield pair
            del pair

    assert_equal(staged(stream()).params, NEW.params)
    assert len(sent) == len(hf_arrays())


def test_after_a_fault_in_a_stream_nothing_more_is_copied_but_all_faults_are_listed() -> None:
    arrays = {**hf_arrays(), Q: np.zeros(3), NORM: np.zeros(4)}
    message = refused(iter(arrays.items()))
    assert Q in message
    assert NORM in message


@pytest.mark.parametrize("fault", ["iterator", "finite", "checksum"])
def test_what_was_staged_is_freed_even_while_the_error_is_held(fault: str) -> None:
    def failing() -> Iterator[tuple[str, np.ndarray]]:
        yield from list(hf_arrays().items())[:-1]
        raise ZeroDivisionError

    arrays = hf_arrays()
    arrays[Q][0, 0] = np.nan
    weights = failing() if fault == "iterator" else arrays
    options = {"finite": {"check_finite": True}, "checksum": {"checksum": "0" * 32}}.get(fault, {})
    with pytest.raises((ZeroDivisionError, WeightUpdateError)):
        staged(arrays, check_finite=True)  # compiles, which leaves constants behind
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    with pytest.raises((ZeroDivisionError, WeightUpdateError)) as raised:
        staged(weights, **options)
    assert sum(array.nbytes for array in jax.live_arrays()) - before < OLD.params["norm"]["scale"].nbytes
    assert raised.value.__traceback__ is not None


# Donation


def test_donated_arrays_serve_without_a_copy_and_their_sender_has_them_no_more() -> None:
    sent = jax.tree.map(jnp.copy, NEW.params)
    addresses = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(sent)]
    found = staged(sent, donate=True)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(sent)), (
        "not before nothing can fail any more"
    )
    found.take_over()
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(found.params)] == addresses
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(sent))
    assert_equal(found.params, NEW.params)


def test_donated_arrays_that_have_to_be_converted_are_freed_one_by_one() -> None:
    sent = dict(to_hf(NEW.config, jax.tree.map(jnp.copy, NEW.params)))
    found = staged(sent, donate=True)
    found.take_over()
    assert all(array.is_deleted() for array in sent.values())
    assert_equal(found.params, NEW.params)


def test_a_refused_donation_leaves_the_senders_arrays_alone() -> None:
    sent = jax.tree.map(jnp.copy, NEW.params)
    sent["norm"]["scale"] = sent["norm"]["scale"].at[0].set(jnp.nan)
    refused(sent, donate=True, check_finite=True)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(sent))


def test_one_array_donated_under_two_names_is_copied_once() -> None:
    sent = jax.tree.map(jnp.copy, NEW.params)
    shared = sent["layers"][0]["input_layernorm"]["scale"]
    sent["layers"][1]["input_layernorm"]["scale"] = shared
    found = staged(sent, donate=True)
    found.take_over()
    first, second = (found.params["layers"][layer]["input_layernorm"]["scale"] for layer in (0, 1))
    np.testing.assert_array_equal(first, second)
    assert first.unsafe_buffer_pointer() != second.unsafe_buffer_pointer()


def test_arrays_that_were_donated_elsewhere_are_refused_by_name() -> None:
    sent = jax.tree.map(jnp.copy, NEW.params)
    sent["norm"]["scale"].delete()
    assert "deleted: norm.scale" in refused(sent)


# Checksums


def test_what_is_not_what_its_sender_summed_up_is_refused() -> None:
    right = checksum(NEW.config, NEW.params)
    assert_equal(staged(hf_arrays(), checksum=right).params, NEW.params)
    arrays = hf_arrays()
    arrays[Q][0, 0] = np.nextafter(arrays[Q][0, 0], np.float32(9))
    message = refused(arrays, checksum=right)
    assert right in message
    assert checksum(NEW.config, arrays) in message

"""Adapters: merged into the base, and gone without a trace at the next update."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from rollout_spec import RolloutEngine
from rollout_spec.errors import WeightUpdateError
from rollout_spec.weights import Adapter
from tests.helpers.engines import new_engine
from tests.rollout_spec.weights.staged import NEW, OLD, assert_equal, hf_arrays

Q, DOWN = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"
OUT_IN = {Q: (32, 32), DOWN: (32, 48)}


@pytest.fixture
def engine() -> RolloutEngine:
    return new_engine(OLD, "cramped")


def adapter(name: str, seed: int, rank: int = 4, scale: float = 0.5) -> Adapter:
    rng = np.random.default_rng(seed)
    rows, columns = OUT_IN[name]
    a, b = rng.standard_normal((rank, columns)), rng.standard_normal((rows, rank))
    return Adapter(a.astype(np.float32), b.astype(np.float32), scale)


def with_adapters(arrays: dict[str, np.ndarray], found: dict[str, Adapter]) -> dict[str, np.ndarray]:
    """In plain float64."""
    for name, (a, b, scale) in found.items():
        arrays[name] = arrays[name] + scale * (b.astype(np.float64) @ a.astype(np.float64))
    return arrays


def assert_serves(engine: RolloutEngine, arrays: dict[str, np.ndarray]) -> None:
    from rollout_spec.weights import to_hf

    for name, array in to_hf(OLD.config, engine.params):
        np.testing.assert_allclose(array, arrays[name], rtol=1e-6, atol=1e-6)


def test_adapters_are_added_to_the_base_and_nothing_else_changes(engine: RolloutEngine) -> None:
    found = {Q: adapter(Q, 1), DOWN: adapter(DOWN, 2)}
    report = engine.update_weights(found)
    assert set(report.merged) == {Q, DOWN}
    assert (report.tensors, report.skipped) == (2, ())
    assert_serves(engine, with_adapters(hf_arrays(OLD), found))
    assert engine.params["norm"]["scale"] is OLD.params["norm"]["scale"] or np.array_equal(
        engine.params["norm"]["scale"], OLD.params["norm"]["scale"]
    )


def test_a_plain_tuple_and_a_stream_will_do(engine: RolloutEngine) -> None:
    a, b, scale = adapter(Q, 1)
    engine.update_weights(iter([(Q, (a, b, scale))]))
    assert_serves(engine, with_adapters(hf_arrays(OLD), {Q: adapter(Q, 1)}))


def test_a_tree_of_adapters_has_the_layout_of_kernels(engine: RolloutEngine) -> None:
    a, b, scale = adapter(DOWN, 3)
    engine.update_weights({"layers": {0: {"mlp": {"down_proj": {"kernel": (a.T, b.T, scale)}}}}})
    assert_serves(engine, with_adapters(hf_arrays(OLD), {DOWN: adapter(DOWN, 3)}))


def test_the_next_adapter_finds_the_base_exactly_as_it_was(engine: RolloutEngine) -> None:
    before = engine.checksum()
    for seed in range(20):
        engine.update_weights({Q: adapter(Q, seed, scale=100.0)}, mode="inflight")
        assert engine.checksum() != before
    engine.update_weights({DOWN: adapter(DOWN, 0, scale=0.0)})
    np.testing.assert_array_equal(
        engine.params["layers"][1]["self_attn"]["q_proj"]["kernel"],
        OLD.params["layers"][1]["self_attn"]["q_proj"]["kernel"],
    )
    assert engine.checksum() == before


def test_other_weights_without_adapters_unmerge_them(engine: RolloutEngine) -> None:
    engine.update_weights({Q: adapter(Q, 1)})
    engine.update_weights({"norm": NEW.params["norm"]}, strict=False)
    assert_serves(engine, hf_arrays(OLD) | {"model.norm.weight": hf_arrays()["model.norm.weight"]})
    engine.update_weights({Q: adapter(Q, 1)})
    engine.update_weights(NEW.params)
    assert_equal(engine.params, NEW.params)


@pytest.mark.parametrize("donate", [False, True])
def test_a_new_base_and_its_adapters_may_come_together(engine: RolloutEngine, donate: bool) -> None:
    found = {Q: adapter(Q, 1)}
    base = {name: jax.numpy.array(array) for name, array in hf_arrays().items()}
    engine.update_weights([*base.items(), *found.items()], donate=donate)
    assert_serves(engine, with_adapters(hf_arrays(), found))
    engine.update_weights({DOWN: adapter(DOWN, 1, scale=0.0)})
    assert_equal(engine.params, NEW.params)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_keeps_the_base_too(engine: RolloutEngine, level: Any) -> None:
    engine.update_weights({Q: adapter(Q, 1)})
    merged = engine.checksum()
    engine.sleep(level)
    assert engine.checksum() == merged
    engine.update_weights({DOWN: adapter(DOWN, 2)})
    engine.wake_up()
    assert_serves(engine, with_adapters(hf_arrays(OLD), {DOWN: adapter(DOWN, 2)}))


BAD: dict[str, tuple[Any, str]] = {
    "shapes": ((np.ones((4, 31), np.float32), np.ones((32, 4), np.float32), 1.0), "(4, 31)"),
    "ranks": ((np.ones((4, 32), np.float32), np.ones((32, 3), np.float32), 1.0), "(32, 3)"),
    "types": ((np.ones((4, 32), np.int8), np.ones((32, 4), np.float32), 1.0), "int8"),
    "scale": ((np.ones((4, 32), np.float32), np.ones((32, 4), np.float32), float("nan")), "nan"),
    "no arrays": (("A", "B", 1.0), "not an array|dtype"),
}


@pytest.mark.parametrize("bad", BAD)
def test_adapters_that_do_not_fit_are_refused(engine: RolloutEngine, bad: str) -> None:
    value, words = BAD[bad]
    with pytest.raises(WeightUpdateError, match=words.replace("(", r"\(").replace(")", r"\)")):
        engine.update_weights({Q: value})
    assert engine.weight_version == 0


def test_an_adapter_for_what_is_no_linear_layer_is_refused(engine: RolloutEngine) -> None:
    for name in ("model.norm.weight", "model.embed_tokens.weight"):
        with pytest.raises(WeightUpdateError, match="linear"):
            engine.update_weights({name: adapter(Q, 0)})


def test_values_that_are_not_finite_after_merging_are_refused(engine: RolloutEngine) -> None:
    with pytest.raises(WeightUpdateError, match="not finite"):
        engine.update_weights({Q: adapter(Q, 0, scale=1e38)}, check_finite=True)


def peft_folder(path: Path, **settings: Any) -> Path:
    arrays = {}
    for name in (Q, DOWN):
        a, b, _ = adapter(name, 5)
        prefix = "base_model.model." + name.removesuffix(".weight")
        arrays |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    save_file(arrays, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 2, **settings}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def test_a_folder_that_peft_wrote(engine: RolloutEngine, tmp_path: Path) -> None:
    report = engine.update_weights(peft_folder(tmp_path))
    assert set(report.merged) == {Q, DOWN}
    assert_serves(engine, with_adapters(hf_arrays(OLD), {name: adapter(name, 5) for name in (Q, DOWN)}))


def test_rank_stabilised_adapters_have_their_own_scale(engine: RolloutEngine, tmp_path: Path) -> None:
    engine.update_weights(peft_folder(tmp_path, use_rslora=True))
    found = {name: adapter(name, 5, scale=1.0) for name in (Q, DOWN)}
    assert_serves(engine, with_adapters(hf_arrays(OLD), found))


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"peft_type": "IA3"}, {"rank_pattern": {"q": 2}}])
def test_what_can_not_be_merged_is_refused(engine: RolloutEngine, settings: Any, tmp_path: Path) -> None:
    with pytest.raises(WeightUpdateError, match="merged"):
        engine.update_weights(peft_folder(tmp_path, **settings))
    assert engine.weight_version == 0

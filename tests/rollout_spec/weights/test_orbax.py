"""Orbax checkpoints: of any step and shape, restored where the engine wants them, refused when damaged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from rollout_spec.errors import WeightUpdateError
from rollout_spec.models import build, init_params
from rollout_spec.weights import OrbaxCheckpoint
from tests.helpers.engines import new_engine
from tests.rollout_spec.weights.staged import NEW, OLD, assert_equal, hf_arrays, stage_into


def saved(path: Path, tree: Any) -> Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()
    return path


def managed(path: Path, **trees: Any) -> Path:
    """Steps 3 and 12: OLD's weights and NEW's."""
    with ocp.CheckpointManager(path) as manager:
        for step, model in ((3, OLD), (12, NEW)):
            items = {"params": model.params, **trees}
            manager.save(
                step, args=ocp.args.Composite(**{k: ocp.args.StandardSave(v) for k, v in items.items()})
            )
        manager.wait_until_finished()
    return path


def staged(weights: Any, **options: Any) -> Any:
    return stage_into(OLD.config, OLD.params, weights, **options)


def test_trees_of_every_kind(tmp_path: Path) -> None:
    state = nnx.state(nnx.merge(build(NEW.config), NEW.params))
    for number, tree in enumerate(
        (
            NEW.params,
            state,
            {"params": NEW.params, "step": 7},
            {"model": {"params": NEW.params}, "opt_state": {"mu": jnp.zeros(3)}},
            hf_arrays(),
        )
    ):
        assert_equal(staged(saved(tmp_path / str(number), tree)).params, NEW.params)


def test_a_manager_gives_its_last_step_or_the_one_asked_for(tmp_path: Path) -> None:
    path = managed(tmp_path / "run", optimizer={"mu": jnp.zeros(3)})
    assert_equal(staged(path).params, NEW.params)
    assert_equal(staged(path / "12").params, NEW.params)
    assert_equal(staged(OrbaxCheckpoint(path, step=3)).params, OLD.params)
    with pytest.raises(WeightUpdateError, match="no step 4; there are: 3, 12"):
        staged(OrbaxCheckpoint(path, step=4))
    with pytest.raises(WeightUpdateError, match="optimizer, params"):
        staged(OrbaxCheckpoint(path, item="policy"))


def test_a_branch_can_be_named(tmp_path: Path) -> None:
    path = saved(tmp_path / "both", {"actor": NEW.params, "critic": OLD.params})
    assert_equal(staged(OrbaxCheckpoint(path, branch=("actor",))).params, NEW.params)
    with pytest.raises(WeightUpdateError, match="no branch reward"):
        staged(OrbaxCheckpoint(path, branch=("reward",)))


def test_an_engine_in_bfloat16_restores_bfloat16(tmp_path: Path) -> None:
    path = saved(tmp_path / "float32", NEW.params)
    found = stage_into(OLD.config, init_params(OLD.config, dtype=jnp.bfloat16), path)
    assert_equal(found.params, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), NEW.params))


def test_all_faults_are_listed(tmp_path: Path) -> None:
    tree = jax.tree.map(jnp.copy, NEW.params)
    tree["norm"] = {"scale": jnp.ones(5), "extra": jnp.ones(2)}
    tree["embed_tokens"]["embedding"] = jnp.ones((600, 32), jnp.int32)
    del tree["layers"][0]["mlp"]
    path = saved(tmp_path / "bad", tree)
    with pytest.raises(WeightUpdateError) as raised:
        staged(path)
    for words in (
        "shape: norm.scale: expected (32,), got (5,)",
        "unknown: norm.extra",
        "dtype: embed_tokens.embedding",
        "missing: layers.0.mlp.up_proj.kernel",
    ):
        assert words in str(raised.value)


def test_a_damaged_or_unfinished_checkpoint_is_refused_and_the_engine_serves_on(tmp_path: Path) -> None:
    engine = new_engine(OLD, "cramped")
    whole = saved(tmp_path / "whole", NEW.params)
    lost = shutil.copytree(whole, tmp_path / "lost")
    for file in lost.rglob("d/*"):
        file.unlink()
    for file in lost.rglob("ocdbt.process_0/d/*"):
        file.unlink()
    no_tree = shutil.copytree(whole, tmp_path / "no_tree")
    (no_tree / "_METADATA").write_text("{")
    unfinished = shutil.copytree(whole, tmp_path / "9.orbax-checkpoint-tmp-0")
    for path in (lost, no_tree, unfinished, tmp_path / "nowhere"):
        with pytest.raises(WeightUpdateError, match=path.name.replace(".", r"\.")):
            engine.update_weights(path)
    assert engine.weight_version == 0
    engine.update_weights(whole, mode="interrupt")
    assert_equal(engine.params, NEW.params)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(engine.params))


def test_parts_of_a_checkpoint_may_be_left_out(tmp_path: Path) -> None:
    found = staged(saved(tmp_path / "part", {"norm": NEW.params["norm"]}), strict=False)
    np.testing.assert_array_equal(found.params["norm"]["scale"], NEW.params["norm"]["scale"])
    np.testing.assert_array_equal(
        found.params["embed_tokens"]["embedding"], OLD.params["embed_tokens"]["embedding"]
    )
    assert "embed_tokens.embedding" in found.skipped

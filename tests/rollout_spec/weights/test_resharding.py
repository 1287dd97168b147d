"""Weights of one layout go to another: on simulated devices, and compiled for TPUs where libtpu is installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from rollout_spec.weights import transfer

ROOT = Path(__file__).parents[3]
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler: pip install '.[tpu]'"
)


def test_a_trainers_layouts_are_brought_to_the_engines_on_eight_simulated_devices() -> None:
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.mesh_updates"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count("equal") == 8, done.stdout
    assert "rematerialization" not in done.stderr, "XLA gathered a matrix whole on every device"


def target(*shape: int, devices: int = 1) -> Any:
    """Of float32, split along its first axis."""
    if devices == 1:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=SingleDeviceSharding(jax.devices()[0]))
    sharding = SimpleNamespace(
        device_set=set(range(devices)),
        shard_shape=lambda whole: (whole[0] // devices, *whole[1:]),
    )
    return SimpleNamespace(shape=shape, dtype=np.dtype(np.float32), sharding=sharding)


def test_groups_are_whole_on_one_device_and_of_a_size_on_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "GROUP_BYTES", 64)
    shapes = [(4, 4), (8, 1), (8, 1), (20, 4), (1, 1)]  # 64, 32, 32, 320, 4 bytes
    one = [target(*shape) for shape in shapes]
    assert transfer.groups(one, small=False) == [[0, 1, 2, 3, 4]]
    assert transfer.groups(one, small=True) == [[0], [1, 2], [3], [4]]
    four = [target(*shape, devices=4) for shape in shapes]  # 16, 8, 8, 80, 0
    assert transfer.groups(four, small=False) == [[0, 1, 2], [3], [4]]
    assert transfer.groups([], small=False) == transfer.groups([], small=True) == []


@needs_compiler
def test_an_update_from_fsdp_takes_little_beyond_the_staging_copy_on_a_tpu_slice() -> None:
    from benchmarks import weights_tpu
    from rollout_spec.chips import parse_slice
    from rollout_spec.cli.fit import read_model
    from rollout_spec.fitting import choose_mesh, slice_devices
    from rollout_spec.models import abstract_params

    model = dataclasses.replace(read_model(ROOT / "benchmarks" / "models" / "qwen3-8b.json"), num_layers=2)
    devices = slice_devices(parse_slice("v5e-8"))
    weights = abstract_params(model, jnp.bfloat16)
    kept = weights_tpu.in_layout(weights, choose_mesh(model, devices))
    same = weights_tpu.update_memory(kept, kept)
    assert (same.staged, same.temporary < 2**20) == (pytest.approx(same.weights, rel=0.01), True)
    moved = weights_tpu.update_memory(weights_tpu.fsdp(weights, devices), kept)
    assert moved.staged == pytest.approx(same.weights, rel=0.01)
    embedding = model.vocab_size * model.hidden_size * 2
    assert moved.temporary < 0.3 * embedding, "the largest weight is not whole on any chip"

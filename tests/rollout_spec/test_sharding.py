"""Where weights and caches lie on a mesh, and that a mesh never changes a token (in a process of its own)."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from rollout_spec.errors import ConfigError
from rollout_spec.sharding import MeshLayout
from tests.helpers.tiny_models import CONFIGS

ROOT = Path(__file__).parents[2]


def layout(name: str, **axes: int) -> MeshLayout:
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    return MeshLayout(mesh, CONFIGS[name])  # type: ignore[arg-type]


def test_matrices_are_split_by_head_width_and_vocabulary() -> None:
    params = layout("llama-tied", data=2, model=2).params()
    layer = params["layers"][0]
    assert params["embed_tokens"]["embedding"].spec == PartitionSpec("model", None)
    assert layer["self_attn"]["q_proj"]["kernel"].spec == PartitionSpec(None, "model")
    assert layer["self_attn"]["k_proj"]["bias"].spec == PartitionSpec("model")
    assert layer["self_attn"]["o_proj"]["kernel"].spec == PartitionSpec("model", None)
    assert layer["mlp"]["down_proj"]["kernel"].spec == PartitionSpec("model", None)
    assert layer["input_layernorm"]["scale"].spec == PartitionSpec()


def test_experts_are_split_over_their_axis_too() -> None:
    params = layout("deepseek_v3", model=2, expert=4).params()
    mlp = params["layers"][1]["mlp"]
    assert mlp["experts"]["up_proj"]["kernel"].spec == PartitionSpec("expert", None, "model")
    assert mlp["experts"]["down_proj"]["kernel"].spec == PartitionSpec("expert", "model", None)
    assert mlp["gate"]["kernel"].spec == PartitionSpec()


def test_pages_are_split_by_key_head_where_there_are_enough() -> None:
    assert layout("llama-tied", model=2).cache.spec == PartitionSpec(None, None, "model")
    assert layout("llama-tied", model=4).cache.spec == PartitionSpec()
    assert layout("deepseek_v2", model=2).cache.spec == PartitionSpec()
    assert layout("llama", data=2).tables(4).spec == PartitionSpec("data")
    assert layout("llama", data=2).tables(3).spec == PartitionSpec()


@pytest.mark.parametrize(
    ("name", "axes", "named"),
    [
        ("llama-tied", {"model": 3}, "4 query heads can't be divided over 3 devices .* 1, 2, 4 would do"),
        ("qwen3_moe", {"expert": 3}, "8 experts can't be divided over 3 devices"),
        ("llama", {"tensor": 2}, "mesh axes must be of data, model, expert; got tensor"),
    ],
)
def test_meshes_that_do_not_fit_are_refused_with_what_would(
    name: str, axes: dict[str, int], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        layout(name, **axes)


def test_an_mlp_that_can_not_be_divided_is_refused() -> None:
    config = dataclasses.replace(CONFIGS["llama"], intermediate_size=25)
    with pytest.raises(ConfigError, match="an MLP of 25"):
        MeshLayout(AbstractMesh((2,), ("model",)), config)  # type: ignore[arg-type]


def test_tokens_on_eight_simulated_devices_are_the_single_devices() -> None:
    """In a process of eight devices, whose number can't be changed once jax has begun. Without names the program
    goes through all tiny models; these four have everything that is laid out in a way of its own."""
    names = ["llama-tied", "gemma2", "qwen3_moe:int8", "deepseek_v3"]
    assert jax.device_count() >= 1
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.mesh_engines", *names],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count("equal") == len(names), done.stdout

"""Run as a program on eight simulated devices: a trainer's layouts brought to an engine's, on the devices alone."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rollout_spec import DraftConfig, EngineConfig, RolloutEngine
from rollout_spec.weights import checksum, transfer
from tests.helpers.mesh_engines import generate
from tests.helpers.tiny_models import CONFIGS, random_params

NAME = "llama-tied"
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7]]


def laid_out(params: Any, mesh: Mesh, axes: tuple[str, ...], last: bool) -> Any:
    """`params` with each weight split along the first (or the last) of its axes that divides over `axes`."""
    parts = int(np.prod([mesh.shape[axis] for axis in axes]))

    def put(leaf: jax.Array) -> jax.Array:
        able = [axis for axis, size in enumerate(leaf.shape) if size % parts == 0]
        spec = [None] * leaf.ndim
        if able:
            spec[able[-1 if last else 0]] = axes  # type: ignore[call-overload]
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(put, params)


def both_axes(params: Any, mesh: Mesh) -> Any:
    """Matrices split along both of their axes, vectors on every device."""

    def put(leaf: jax.Array) -> jax.Array:
        fits = leaf.ndim == 2 and all(size % 2 == 0 for size in leaf.shape)
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*("a", "b") if fits else ())))

    return jax.tree.map(put, params)


def check_no_matrix_is_whole(sent: Any, engine: RolloutEngine) -> None:
    """No buffer of a program is as large as a matrix that is split where it comes from and where it goes."""
    seen = set()
    for leaf, target in zip(
        jax.tree.leaves(sent), jax.tree.leaves(engine._core.executor.layout), strict=True
    ):
        what = (leaf.shape, leaf.sharding, target.sharding)
        if (
            leaf.ndim < 2
            or leaf.sharding.is_fully_replicated
            or target.sharding.is_fully_replicated
            or what in seen
        ):
            continue
        seen.add(what)
        copier: Any = transfer.tree_copier(*transfer.types_of([leaf], [target]))
        text = copier.lower([leaf]).compile().as_text()
        buffers = re.findall(r"f32\[([0-9,]+)\]", text)
        assert buffers
        largest = max(int(np.prod(list(map(int, dims.split(","))))) for dims in buffers)
        assert largest < leaf.size, what
    assert len(seen) >= 4, "some matrices are split on both sides"


def main() -> None:
    config = CONFIGS[NAME]
    params, other = random_params(config, 0), random_params(config, 1)
    options = EngineConfig(max_seqs=4, page_size=4, max_batch_tokens=16, draft=DraftConfig(gate=False))
    devices = np.array(jax.devices())
    fresh = RolloutEngine(config, other, config=options)
    expected = generate(fresh, PROMPTS)
    engine = RolloutEngine(
        config, params, config=options, mesh=Mesh(devices[:4].reshape(2, 2), ("data", "model"))
    )
    wide = RolloutEngine(config, params, config=options, mesh=Mesh(devices.reshape(4, 2), ("data", "model")))
    checked = checksum(config, other)
    trainers = {
        "first axis": laid_out(other, Mesh(devices[:4], ("fsdp",)), ("fsdp",), last=False),
        "last axis": laid_out(other, Mesh(devices[:4], ("fsdp",)), ("fsdp",), last=True),
        "both axes": both_axes(other, Mesh(devices[:4].reshape(2, 2), ("a", "b"))),
        "two axes": laid_out(other, Mesh(devices[:4].reshape(2, 2), ("a", "b")), ("a", "b"), last=True),
        "other order": laid_out(other, Mesh(devices[:4][::-1], ("fsdp",)), ("fsdp",), last=False),
        "other devices": laid_out(other, Mesh(devices[4:], ("fsdp",)), ("fsdp",), last=False),
        "some devices": laid_out(other, Mesh(devices[2:6], ("fsdp",)), ("fsdp",), last=False),
    }
    everything = {
        "eight": (wide, laid_out(other, Mesh(devices, ("fsdp",)), ("fsdp",), last=False)),
        **{name: (engine, sent) for name, sent in trainers.items()},
    }
    for name, (serving, sent) in everything.items():
        serving.update_weights(params)
        assert generate(serving, PROMPTS) != expected
        with jax.transfer_guard_device_to_host("disallow"):
            serving.update_weights(sent)
        if name not in ("other order", "other devices", "some devices"):
            check_no_matrix_is_whole(sent, serving)
        assert serving.checksum() == checked, name
        jax.tree.map(
            lambda leaf, target: assert_laid_out(leaf, target), serving.params, serving._core.executor.layout
        )
        assert generate(serving, PROMPTS) == expected, name
        assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(sent)), "the trainer keeps its own"
        print(name, "equal", flush=True)


def assert_laid_out(leaf: jax.Array, target: Any) -> None:
    assert leaf.sharding.is_equivalent_to(target.sharding, leaf.ndim)


if __name__ == "__main__":
    main()

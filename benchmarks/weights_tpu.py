"""What an update of an 8B model takes of a chip's memory on a TPU slice, as the TPU compiler says. No TPU is needed.

    python -m benchmarks.weights_tpu [--model CONFIG] [--chip SLICE]

The programs are those that `update_weights` runs, compiled for weights that are shapes only, in bfloat16; the trainer's
lie as the engine's do, or each split along its first axis that can be divided over all chips, as FSDP lays them out.
Needs libtpu (`make test-tpu` makes .venv-tpu, which has it). Writes benchmarks/results/weights_tpu.json and the
table in docs/weights.md.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from benchmarks import machine
from benchmarks.weights_tables import replace_tables, update_memory_markdown
from rollout_spec.chips import parse_slice
from rollout_spec.cli.fit import read_model
from rollout_spec.fitting import choose_mesh, slice_devices
from rollout_spec.models import ModelConfig, abstract_params
from rollout_spec.sharding import MeshLayout
from rollout_spec.weights import transfer

RESULTS = Path(__file__).parent / "results" / "weights_tpu.json"
MODELS = Path(__file__).parent / "models"


@dataclasses.dataclass(frozen=True)
class Settings:
    """model: name of a configuration in benchmarks/models. chip: a slice."""

    model: str = "qwen3-8b"
    chip: str = "v5e-8"


@dataclasses.dataclass(frozen=True)
class UpdateMemory:
    """Bytes of one chip. staged: the copy of all weights. temporary: of the program that needs most."""

    weights: int
    staged: int
    temporary: int
    programs: int

    @property
    def extra(self) -> int:
        return self.staged + self.temporary


def fsdp(weights: Any, devices: np.ndarray) -> Any:
    """`weights` (ShapeDtypeStructs), each split over all devices along the first axis that can be."""
    mesh = Mesh(devices.reshape(-1), ("fsdp",))

    def split(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        axis = next((axis for axis, size in enumerate(leaf.shape) if size % mesh.size == 0), None)
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "fsdp")
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(split, weights)


def in_layout(weights: Any, layout: MeshLayout) -> Any:
    """`weights` (ShapeDtypeStructs) as an engine of this layout keeps them."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        weights,
        layout.params(),
    )


def update_memory(sent: Any, kept: Any) -> UpdateMemory:
    """Of an update from arrays like `sent` to arrays like `kept`, trees of ShapeDtypeStructs with shardings."""
    arrays, targets = jax.tree.leaves(sent), jax.tree.leaves(kept)
    staged, temporary = 0, 0
    programs = transfer.groups(targets, small=False)
    for places in programs:
        copier = transfer.tree_copier(
            *transfer.types_of([arrays[place] for place in places], [targets[place] for place in places])
        )
        memory = copier.lower([arrays[place] for place in places]).compile().memory_analysis()  # type: ignore[attr-defined]
        staged += memory.output_size_in_bytes - memory.alias_size_in_bytes
        temporary = max(temporary, memory.temp_size_in_bytes + memory.generated_code_size_in_bytes)
    return UpdateMemory(_bytes_on_a_chip(targets), staged, temporary, len(programs))


def _bytes_on_a_chip(leaves: Any) -> int:
    return sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in leaves)


def measure(model: ModelConfig, chip: str) -> dict[str, Any]:
    devices = slice_devices(parse_slice(chip))
    weights = abstract_params(model, jnp.bfloat16)
    kept = in_layout(weights, choose_mesh(model, devices))
    sent = {"as the engine keeps them": kept, "FSDP": fsdp(weights, devices)}
    found = {name: update_memory(tree, kept) for name, tree in sent.items()}
    return {name: {**dataclasses.asdict(one), "extra": one.extra} for name, one in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=Settings.model, help="a name in benchmarks/models")
    parser.add_argument("--chip", default=Settings.chip, help="a slice, as in v5e-8")
    parsed = parser.parse_args()
    settings = Settings(parsed.model, parsed.chip)
    results = measure(read_model(MODELS / f"{settings.model}.json"), settings.chip)
    machine.write_results(RESULTS, machine.describe(), settings, results)
    replace_tables()
    Console().print(update_memory_markdown({"settings": dataclasses.asdict(settings), "results": results}))


if __name__ == "__main__":
    main()

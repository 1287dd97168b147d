"""Whether a model fits a TPU slice: the engine's step, compiled for it by the real TPU compiler, without a TPU.

Weights are shapes only. libtpu, which carries the compiler, comes with `pip install "rollout-spec[tpu]"`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import time
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .chips import Slice
from .config import EngineConfig
from .errors import CapacityError, ConfigError, MissingExtraError
from .models import ModelConfig, abstract_params
from .sharding import MeshLayout
from .step import cache_shape, compiled_step, new_state, state_sharding
from .step_inputs import StepShape, batch_layout

PAGE_SIZE = 16  # tokens
USABLE = 0.95
"""Of a chip's memory; the rest is the runtime's."""
_NARROWEST = 128  # columns of a matrix unit; experts aren't cut thinner
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """What the compiler says of one size of step. Bytes are of one chip."""

    name: str
    shape: StepShape
    argument_bytes: int
    temporary_bytes: int
    output_bytes: int
    """That aren't written over arguments."""
    code_bytes: int
    collectives: dict[str, int]
    collective_bytes: int
    """Of their results."""
    kernels: int
    """Calls of Pallas kernels."""
    compile_s: float
    roofline_s: float
    """The least that memory and arithmetic allow, with all sequences half grown."""

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.temporary_bytes + self.output_bytes + self.code_bytes


@dataclasses.dataclass(frozen=True)
class Fit:
    """A model on a slice. Bytes are of one chip."""

    slice: Slice
    mesh_shape: dict[str, int]
    weight_bytes: int
    page_bytes: int
    pages: int
    """Of the cache that was compiled: as `max_seqs` sequences of `max_len` need, or as many as fit."""
    pages_needed: int
    pages_available: int
    """That would fit beside weights and the largest step's temporaries."""
    page_size: int
    steps: tuple[CompiledStep, ...]

    @property
    def fits(self) -> bool:
        """Whether the largest step fits, with room for at least one sequence."""
        return max(step.peak_bytes for step in self.steps) <= USABLE * self.slice.chip.hbm_bytes


def fit(model: ModelConfig, where: Slice, *, max_seqs: int, max_len: int, draft_nodes: int) -> Fit:
    """Compiles the plain step and the tree step of `max_seqs` sequences in bfloat16.

    Raises CapacityError, saying what would fit, where weights and the cache of one sequence are more than a slice
    holds; ConfigError where the model can't be divided over it; MissingExtraError without libtpu.
    """
    layout = choose_mesh(model, slice_devices(where))
    page_size, pages_per_sequence = PAGE_SIZE, -(-(max_len + draft_nodes) // PAGE_SIZE)
    needed = max_seqs * pages_per_sequence
    weight_bytes, page_bytes, pages = memory(layout, where, needed, pages_per_sequence)
    config = EngineConfig(max_seqs=max_seqs, max_seq_len=max_len, page_size=page_size, kernel="pallas")
    sizes = {"plain": max_seqs}
    if draft_nodes:
        sizes["tree"] = -(-max_seqs * (draft_nodes + 1) // 8) * 8
    steps = tuple(
        _compile(layout, config, where, name, StepShape(tokens, max_seqs, tokens), pages, pages_per_sequence)
        for name, tokens in sizes.items()
    )
    beside = max(step.peak_bytes for step in steps) - pages * page_bytes
    available = max(0, (int(USABLE * where.chip.hbm_bytes) - beside) // page_bytes)
    return Fit(
        slice=where,
        mesh_shape=dict(layout.mesh.shape),
        weight_bytes=weight_bytes,
        page_bytes=page_bytes,
        pages=pages,
        pages_needed=needed,
        pages_available=available,
        page_size=page_size,
        steps=steps,
    )


def memory(layout: MeshLayout, where: Slice, needed: int, least: int) -> tuple[int, int, int]:
    """Bytes of weights on a chip, bytes of a page on it, and the pages to have: `needed`, or as many as fit.

    Raises CapacityError, saying what would fit, where there is no room for `least` pages.
    """
    weight_bytes = _bytes_on_a_chip(abstract_params(layout.config, jnp.bfloat16), layout.params())
    page_bytes = page_bytes_on_a_chip(layout, PAGE_SIZE)
    room = int(USABLE * where.chip.hbm_bytes) - weight_bytes
    if room < least * page_bytes:
        raise CapacityError(_too_small(where, weight_bytes, least * page_bytes, room, page_bytes))
    return weight_bytes, page_bytes, min(needed, int(0.8 * room) // page_bytes)


def choose_mesh(model: ModelConfig, devices: np.ndarray) -> MeshLayout:
    """The mesh of axes `expert` and `model` on which a chip holds least; among equals, the widest `model`."""
    faults: list[str] = []
    found: list[tuple[int, int, MeshLayout]] = []
    for split in range(1, devices.size + 1):
        if devices.size % split or (model.experts is None and split != devices.size):
            continue
        width = model.experts.intermediate_size if model.experts is not None else None
        if width is not None and (width % split or (split > 1 and width // split < _NARROWEST)):
            continue
        grid = devices.reshape(devices.size // split, split)
        try:
            layout = MeshLayout(Mesh(grid, ("expert", "model")), model)
        except ConfigError as error:
            faults.append(str(error))
            continue
        held = _bytes_on_a_chip(abstract_params(model, jnp.bfloat16), layout.params())
        found.append((held + 1024 * page_bytes_on_a_chip(layout, PAGE_SIZE), -split, layout))
    if not found:
        raise ConfigError("; ".join(faults) or f"the experts can't be divided over {devices.size} chips")
    return min(found, key=lambda entry: entry[:2])[2]


def slice_devices(where: Slice) -> np.ndarray:
    """Descriptions of the slice's chips."""
    os.environ.update(  # nothing here is a TPU, whatever libtpu would find out or be told
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_ACCELERATOR_TYPE="v6e-4",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    from jax.experimental import topologies

    try:
        description = topologies.get_topology_desc(platform="tpu", topology_name=where.topology)
    except Exception as error:  # jax raises several kinds
        raise MissingExtraError(
            f"the TPU compiler isn't available ({error}); install libtpu with pip install 'rollout-spec[tpu]'"
        ) from error
    return np.array(description.devices[: where.num_chips])


def _compile(
    layout: MeshLayout,
    config: EngineConfig,
    where: Slice,
    name: str,
    shape: StepShape,
    pages: int,
    pages_per_sequence: int,
) -> CompiledStep:
    model = layout.config
    step: Any = compiled_step(model, config.kernel, layout.everywhere, layout, config.max_seqs)
    state = jax.eval_shape(
        lambda: new_state(
            model, num_pages=pages, page_size=config.page_size, slots=config.max_seqs, dtype=jnp.bfloat16
        )
    )
    arguments = (
        _placed(abstract_params(model, jnp.bfloat16), layout.params()),
        _placed(state, state_sharding(layout, config.max_seqs)),
        _placed(
            jax.eval_shape(lambda: jnp.asarray(batch_layout(shape, pages_per_sequence).new().buffer)),
            layout.everywhere,
        ),
    )
    start = time.perf_counter()
    compiled = step.lower(*arguments, shape, pages_per_sequence).compile()
    seconds = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()
    collectives, collective_bytes = _collectives(text)
    return CompiledStep(
        name=name,
        shape=shape,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        collectives=collectives,
        collective_bytes=collective_bytes,
        kernels=text.count('custom_call_target="tpu_custom_call"'),
        compile_s=seconds,
        roofline_s=roofline(layout, where, shape).seconds(shape.sequences * (config.max_seq_len or 0) / 2),
    )


@dataclasses.dataclass(frozen=True)
class Roofline:
    """What a step of one size must at least do, on each chip of a slice. Collectives are not in it."""

    read_bytes: float
    """Weights that are used, once."""
    bytes_per_cached_token: float
    flops: float
    hbm_bytes_per_s: float
    flops_per_s: float

    def seconds(self, cached_tokens: float) -> float:
        """The least time, with so many cached tokens of all sequences read once."""
        read = self.read_bytes + cached_tokens * self.bytes_per_cached_token
        return max(read / self.hbm_bytes_per_s, self.flops / self.flops_per_s)


def roofline(layout: MeshLayout, where: Slice, shape: StepShape) -> Roofline:
    """The roofline of a step of this size, in bfloat16. Experts are read as often as even routing hits them."""
    model = layout.config
    weights = abstract_params(model, jnp.bfloat16)
    read, products = float(_bytes_on_a_chip(weights, layout.params())), 0.0
    for path, leaf in jax.tree_util.tree_flatten_with_path(weights)[0]:
        if path[-1].key != "kernel":
            continue
        size = math.prod(leaf.shape)
        if leaf.ndim == 3 and model.experts is not None:
            used = model.experts.num_chosen / model.experts.num_experts
            hit = 1.0 - (1.0 - used) ** shape.tokens  # of experts
            on_a_chip = 2.0 * math.prod(_sharding_of(layout.params(), path).shard_shape(leaf.shape))
            read -= (1.0 - hit) * on_a_chip
            size = int(size * used)
        products += 2.0 * size * shape.tokens
    if model.tie_word_embeddings:
        products += 2.0 * model.vocab_size * model.hidden_size * shape.tokens
    return Roofline(
        read_bytes=read,
        bytes_per_cached_token=page_bytes_on_a_chip(layout, PAGE_SIZE) / PAGE_SIZE,
        flops=products / where.num_chips,
        hbm_bytes_per_s=where.chip.hbm_bytes_per_s,
        flops_per_s=where.chip.bfloat16_flops,
    )


def _sharding_of(shardings: Any, path: Any) -> jax.sharding.NamedSharding:
    for key in path:
        shardings = shardings[key.key]
    return shardings


def _placed(tree: Any, shardings: Any) -> Any:
    if isinstance(shardings, jax.sharding.Sharding):
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings), tree
        )
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )


def _bytes_on_a_chip(tree: Any, shardings: Any) -> int:
    sizes = jax.tree.map(
        lambda leaf, sharding: math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize,
        tree,
        shardings,
    )
    return sum(jax.tree.leaves(sizes))


def page_bytes_on_a_chip(layout: MeshLayout, page_size: int) -> int:
    """Bytes of one page of the cache over all layers, on each chip."""
    shape = cache_shape(layout.config, num_pages=1, page_size=page_size, dtype=jnp.bfloat16)
    return math.prod(layout.cache.shard_shape(shape)) * 2 * layout.config.num_layers


def _collectives(text: str) -> tuple[dict[str, int], int]:
    """How many there are of each kind in a compiled program, and the bytes of their results.

    One that the compiler spread over other work stands in several places, all of one channel.
    """
    kinds = "|".join(_COLLECTIVES)
    found: dict[str, tuple[str, int]] = {}
    for number, line in enumerate(text.splitlines()):
        match = re.search(rf"= ([^=]*?) ({kinds})(?:-start)?\(", line)
        if match is None:
            continue
        channel = re.search(r"channel_id=(\d+)", line)
        sizes = [
            math.prod(int(size) for size in dims.split(",") if size) * _bytes_of(dtype)
            for dtype, dims in re.findall(r"([a-z]+[0-9]+\w*)\[([0-9,]*)\]", match[1])
        ]
        found[channel[1] if channel else f"line {number}"] = (match[2], max(sizes, default=0))
    return dict(Counter(kind for kind, _ in found.values())), sum(size for _, size in found.values())


def _bytes_of(dtype: str) -> int:
    """Of an element of a type as XLA writes it: bf16, f32, s8, f8e4m3fn, ..."""
    return max(1, int(re.findall(r"[0-9]+", dtype)[0]) // 8)


def _too_small(where: Slice, weights: int, cache: int, room: int, page_bytes: int) -> str:
    hbm = where.chip.hbm_bytes
    if room <= 0:
        return (
            f"{where.name}: weights need {weights / 2**30:.1f} GiB a chip, and it has {hbm / 2**30:.0f} GiB; "
            "a larger slice would do"
        )
    return (
        f"{where.name}: one sequence needs {cache / 2**30:.2f} GiB of cache a chip beside {weights / 2**30:.1f} GiB of "
        f"weights, and {room / 2**30:.2f} GiB are left; {room // page_bytes * PAGE_SIZE:,} tokens would fit"
    )

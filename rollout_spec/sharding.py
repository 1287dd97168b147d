"""Where weights, caches and tables lie on a mesh of devices: the rules by which logical axes become mesh axes.

A mesh has any of the axes `data`, `model` and `expert`. Matrices are split along the axis that heads, the MLP's width
or the vocabulary give them, so that a layer needs one sum over `model` behind attention and one behind the MLP; stacks
of experts are split over `expert` as well. Pages are split by key head, where there are enough of them; tables of
sampling by sequence over `data`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .errors import ConfigError
from .models import ModelConfig, Params, abstract_params

MESH_AXES = ("data", "model", "expert")

MESH_AXIS_OF = {
    "heads": "model",
    "kv_heads": "model",
    "mlp": "model",
    "vocab": "model",
    "expert": "expert",
    "slots": "data",
}
"""Logical axis -> mesh axis; axes that aren't named here are on every device."""

LOGICAL_AXES: dict[str, tuple[str | None, ...]] = {
    "embed_tokens": ("vocab", None),
    "lm_head": (None, "vocab"),
    "q_proj": (None, "heads"),
    "k_proj": (None, "kv_heads"),
    "v_proj": (None, "kv_heads"),
    "o_proj": ("heads", None),
    "q_b_proj": (None, "heads"),
    "kv_b_proj": (None, "heads"),
    "gate_proj": (None, "mlp"),
    "up_proj": (None, "mlp"),
    "down_proj": ("mlp", None),
}
"""Axes of each module's matrix, [in, out]; stacks of experts have "expert" before them. Others are on every device."""


@dataclasses.dataclass(frozen=True)
class MeshLayout:
    """A mesh, and what of a model goes where on it."""

    mesh: Mesh
    config: ModelConfig

    def __post_init__(self) -> None:
        faults = []
        sizes = dict(self.mesh.shape)
        unknown = [axis for axis in sizes if axis not in MESH_AXES]
        if unknown:
            faults.append(f"mesh axes must be of {', '.join(MESH_AXES)}; got {', '.join(map(str, unknown))}")
        config, model = self.config, sizes.get("model", 1)
        if config.num_heads % model:
            faults.append(
                f"{config.num_heads} query heads can't be divided over {model} devices of axis 'model'; "
                f"{_divisors(config.num_heads)} would do"
            )
        if config.intermediate_size % model:
            faults.append(
                f"an MLP of {config.intermediate_size} can't be divided over {model} devices of axis 'model'"
            )
        experts = sizes.get("expert", 1)
        if config.experts is not None and config.experts.num_experts % experts:
            faults.append(
                f"{config.experts.num_experts} experts can't be divided over {experts} devices of axis 'expert'; "
                f"{_divisors(config.experts.num_experts)} would do"
            )
        if faults:
            raise ConfigError("mesh: " + "; ".join(faults))

    @property
    def everywhere(self) -> NamedSharding:
        """The same on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def heads_are_split(self) -> bool:
        """Whether keys and values are split by head. Latents have one head, and few key heads are not cut."""
        return self.config.latent is None and self._axis("kv_heads", self.config.num_kv_heads) is not None

    @property
    def cache(self) -> NamedSharding:
        """Of one layer's pages: [planes, pages, heads, tokens, dimensions]."""
        return self._named(
            "kv_heads" if self.heads_are_split else None, before=2, size=self.config.num_kv_heads
        )

    @property
    def logits(self) -> NamedSharding:
        """Of what the head computes, [R, V]."""
        return self._named("vocab", before=1, size=self.config.vocab_size)

    def tables(self, slots: int) -> NamedSharding:
        """Of the sampling tables [slots, V]."""
        return self._named("slots", before=0, size=slots)

    def by_head(
        self, attention: Callable[..., Any], *, latents: bool, scaled: bool = False
    ) -> Callable[..., Any]:
        """A paged attention that each device computes for the heads it holds.

        attention: `mla_tree_attention` if latents, which are on every device, else `tree_paged_attention`, which
        takes two more arrays [Hk] if `scaled`.
        """
        where = (PartitionSpec(),) * 5
        if latents:
            split = PartitionSpec(None, self._axis("heads", self.config.num_heads))
            inputs: tuple[PartitionSpec, ...] = (split, split, *(PartitionSpec(),) * 3, *where)
        else:
            axis = "model" if self.heads_are_split else None
            split = PartitionSpec(None, axis)
            scales = (PartitionSpec(axis),) * (2 if scaled else 0)
            inputs = (split, split, split, self.cache.spec, *where, *scales)
        return jax.shard_map(
            attention,
            mesh=self.mesh,
            in_specs=inputs,
            out_specs=(split, PartitionSpec() if latents else self.cache.spec),
            check_vma=False,
        )

    def of_pages(self, move: Callable[..., Any]) -> Callable[..., Any]:
        """`move_cached_tokens`, by which each device moves what it holds of the pages."""
        everywhere = PartitionSpec()
        return jax.shard_map(
            move,
            mesh=self.mesh,
            in_specs=(self.cache.spec, everywhere, everywhere, everywhere),
            out_specs=self.cache.spec,
            check_vma=False,
        )

    def params(self) -> Params:
        """A tree like the model's weights, of shardings."""

        def place(path: Any, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
            modules = [str(key.key) for key in path]
            return NamedSharding(self.mesh, self._weight_spec(modules, leaf.shape))

        return jax.tree_util.tree_map_with_path(place, abstract_params(self.config))

    def _weight_spec(self, modules: list[str], shape: tuple[int, ...]) -> PartitionSpec:
        axes = LOGICAL_AXES.get(modules[-2])
        if axes is None or modules[-1] not in ("kernel", "bias", "embedding"):
            return PartitionSpec()
        if modules[-1] == "bias":
            axes = axes[-1:]
        if len(shape) == 3:
            axes = ("expert", *axes)
        return PartitionSpec(*(self._weight_axis(axis, size) for axis, size in zip(axes, shape, strict=True)))

    def _weight_axis(self, logical: str | None, size: int) -> str | None:
        """Whole heads stay together."""
        config = self.config
        if logical == "kv_heads":
            return self._axis(logical, config.num_kv_heads)
        if logical == "heads":
            return self._axis(logical, config.num_heads)
        return self._axis(logical, size)

    def _axis(self, logical: str | None, size: int) -> str | None:
        """The mesh axis that `size` elements of a logical axis are split over; None if they aren't."""
        axis = None if logical is None else MESH_AXIS_OF.get(logical)
        count = 1 if axis is None else dict(self.mesh.shape).get(axis, 1)
        return axis if count > 1 and size % count == 0 else None

    def _named(self, logical: str | None, *, before: int, size: int) -> NamedSharding:
        axis = self._axis(logical, size)
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * before, axis)
        return NamedSharding(self.mesh, spec)


def _divisors(number: int) -> str:
    return ", ".join(str(count) for count in range(1, number + 1) if number % count == 0)

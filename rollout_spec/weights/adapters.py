"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): how they come, and merging them."""

from __future__ import annotations

import functools
import json
import math
import numbers
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import WeightUpdateError
from .arrays import as_array

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_NOT_SUPPORTED = ("use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "use_qalora", "lora_bias")
_PREFIX = "base_model.model."


class Adapter(NamedTuple):
    """What is added to a matrix: scale * (B @ A) under a Hugging Face name, scale * (A @ B) in a params tree.

    a, b: A [r, in] and B [out, r] under a Hugging Face name, as PEFT has them; A [in, r] and B [r, out] in a
    pytree shaped like `engine.params`, whose kernels are [in, out].
    """

    a: Any
    b: Any
    scale: float


def as_adapter(value: Any) -> Adapter | None:
    """`value` if it is (A, B, scale)."""
    if not isinstance(value, tuple) or len(value) != 3:
        return None
    scale = value[2]
    if isinstance(scale, np.ndarray | jax.Array) and scale.ndim == 0:
        scale = float(scale)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        return None
    return Adapter(value[0], value[1], float(scale))


def checked(
    name: str, adapter: Adapter, target: jax.ShapeDtypeStruct, is_kernel: bool, hf_layout: bool
) -> tuple[Adapter | None, list[str]]:
    """The adapter with A [in, r] and B [r, out], and what is wrong with it."""
    if not is_kernel:
        return None, [f"adapter: {name}: only matrices of linear layers take one"]
    try:
        first, second = as_array(adapter.a), as_array(adapter.b)
    except ValueError as error:
        return None, [f"not an array: {name}: adapter: {error}"]
    faults = [
        f"dtype: {name}: {which} of the adapter: expected a floating type, got {matrix.dtype}"
        for which, matrix in (("A", first), ("B", second))
        if not jnp.issubdtype(matrix.dtype, jnp.floating)
    ]
    rows, columns = target.shape
    fits = first.ndim == second.ndim == 2
    if hf_layout:
        fits = fits and first.shape[1] == rows and second.shape[0] == columns
        fits = fits and first.shape[0] == second.shape[1]
        wanted = f"A (r, {rows}) and B ({columns}, r)"
    else:
        fits = fits and first.shape[0] == rows and second.shape[1] == columns
        fits = fits and first.shape[1] == second.shape[0]
        wanted = f"A ({rows}, r) and B (r, {columns})"
    if not fits:
        faults.append(f"shape: {name}: expected {wanted} of an adapter, got {first.shape} and {second.shape}")
    if not math.isfinite(adapter.scale):
        faults.append(f"adapter: {name}: the scale is {adapter.scale}")
    if faults:
        return None, faults
    return Adapter(first.T, second.T, adapter.scale) if hf_layout else Adapter(
        first, second, adapter.scale
    ), []


def merged(base: jax.Array, adapter: Adapter, target: jax.ShapeDtypeStruct) -> jax.Array:
    """base + scale * A @ B, computed in float32 and rounded once to the type of `target`."""
    sharding = target.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    a, b = (jax.device_put(np.asarray(matrix, np.float32), sharding) for matrix in (adapter.a, adapter.b))
    return _merge(target.dtype, target.sharding)(base, a, b, np.float32(adapter.scale))


@functools.lru_cache(maxsize=1024)
def _merge(dtype: np.dtype, sharding: Any) -> Any:
    def merge(base: jax.Array, a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
        added = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
        return (base.astype(jnp.float32) + scale * added).astype(dtype)

    return jax.jit(merge, out_shardings=sharding)


def is_peft_folder(path: Path) -> bool:
    return (path / CONFIG_FILE).is_file()


def peft_adapters(path: Path) -> Iterator[tuple[str, Any]]:
    """(name of the weight, Adapter) of a folder that PEFT's `save_pretrained` wrote.

    What else it holds (modules_to_save) comes as (name, array). Raises WeightUpdateError for kinds of adapters
    that this can't merge.
    """
    from ..loading import safetensors_file

    config = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
    if config.get("peft_type", "LORA") != "LORA":
        raise WeightUpdateError(f"{path} holds an adapter of type {config['peft_type']}; LORA can be merged")
    asked = [name for name in _NOT_SUPPORTED if config.get(name)]
    if asked:
        raise WeightUpdateError(f"{path / CONFIG_FILE} sets {', '.join(asked)}, which can't be merged here")
    rank, alpha = config["r"], config["lora_alpha"]
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    pairs: dict[str, dict[str, Any]] = {}
    for name, tensor in safetensors_file.tensors(path / WEIGHTS_FILE).items():
        module, found, rest = name.removeprefix(_PREFIX).rpartition(".lora_")
        if not found:
            yield name.removeprefix(_PREFIX), tensor.read()
            continue
        pairs.setdefault(f"{module}.weight", {})[rest.partition(".")[0]] = tensor.read()
    for name, matrices in pairs.items():
        if set(matrices) != {"A", "B"}:
            raise WeightUpdateError(
                f"{path / WEIGHTS_FILE}: expected lora_A and lora_B for {name}, got "
                + ", ".join(f"lora_{which}" for which in sorted(matrices))
            )
        yield name, Adapter(matrices["A"], matrices["B"], scale)

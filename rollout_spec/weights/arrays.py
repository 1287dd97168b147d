"""Arrays of other libraries, read without copying."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401 (registers bfloat16 with numpy)
import numpy as np

Array = np.ndarray | jax.Array


def as_array(value: Any) -> Array:
    """`value` as an array of numpy or jax. Tensors of torch and others that speak dlpack share their memory.

    Raises ValueError saying why it can't be read as one.
    """
    if isinstance(value, np.ndarray | jax.Array):
        return value
    if hasattr(value, "__dlpack__") and not np.isscalar(value):
        return _from_dlpack(value)
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(str(error)) from error


def _from_dlpack(tensor: Any) -> Array:
    if getattr(tensor, "requires_grad", False):
        tensor = tensor.detach()
    if hasattr(tensor, "contiguous"):  # jax takes no strides
        tensor = tensor.contiguous()
    try:
        dtype = str(getattr(tensor, "dtype", ""))
        if dtype.endswith("float64"):  # jax would round it to float32 before it is rounded to the engine's
            return np.from_dlpack(tensor)
        return jnp.from_dlpack(tensor)
    except Exception as error:  # whatever the other library raises
        raise ValueError(
            f"a {type(tensor).__module__.partition('.')[0]} tensor that jax can't read here ({error}); "
            "send it from the host's memory (.cpu())"
        ) from error

"""Run as a program on four simulated devices: the sampling kernel on a mesh against the reference on one device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from rollout_spec.kernels.sampling import tree_sample

from tests.kernels.test_tree_sample import random_logits, rows_of, sampling_of, tables_of

VOCABULARY = 300


def main() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    sample = jax.jit(functools.partial(tree_sample, backend="pallas", mesh=mesh))
    for rows in (32, 5):  # shared out, and the same on every device
        inputs = (
            jnp.asarray(random_logits(rows, VOCABULARY)),
            rows_of(rows),
            sampling_of(rows, temperature=np.resize([0.0, 1.0, 0.7], rows)),
            tables_of(rows, VOCABULARY),
        )
        expected = jax.jit(functools.partial(tree_sample, backend="reference"))(*inputs)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            found = sample(*jax.device_put(inputs, everywhere))
        np.testing.assert_array_equal(np.asarray(found.tokens), np.asarray(expected.tokens))
        np.testing.assert_allclose(np.asarray(found.logprobs), np.asarray(expected.logprobs), atol=1e-5)
        assert len(found.tokens.sharding.device_set) == mesh.size
        print(rows, "equal", flush=True)


if __name__ == "__main__":
    main()

"""One local Ray for all tests of the pool, on 2 CPUs."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest
import ray

jax.devices()  # this process's threads are made before Ray's


@pytest.fixture(scope="session")
def ray_on_2_cpus() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=2,
        resources={"TPU": 4},
        object_store_memory=256 << 20,
        include_dashboard=False,
        log_to_driver=False,
    )
    yield
    ray.shutdown()

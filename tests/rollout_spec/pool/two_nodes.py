"""A batch on two raylets, one of which goes away in the middle. Run by test_two_nodes.py in a process of its own."""

from __future__ import annotations

import sys

import ray
from ray.cluster_utils import Cluster

from tests.rollout_spec.pool import pools


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 128 << 20})
    other = cluster.add_node(num_cpus=2, object_store_memory=128 << 20)
    ray.init(address=cluster.address, log_to_driver=False)
    prompts, sampling = pools.requests(24, tokens=70)
    wanted = pools.expected(prompts, sampling)
    with pools.new_pool(2, placement="spread", resources_per_engine={"CPU": 1}) as pool:
        nodes = {handle.facts.node_id for handle in pool._driver.fleet.serving if handle.facts}
        assert len(nodes) == 2, nodes
        pools.assert_same(pool.generate(prompts, sampling), wanted)
        pool.update_weights(pools.model().params)
        stream = pool.stream(prompts, sampling)
        outputs = [next(stream) for _ in range(4)]
        cluster.remove_node(other)
        outputs += list(stream)
        pools.assert_same(sorted(outputs, key=lambda output: output.index), wanted)
        pools.wait_until(lambda: len(pools.pids(pool)) == 2)
        assert pool.stats().engines_lost >= 1
        assert set(pool.weight_versions.values()) == {1}
    ray.shutdown()
    cluster.shutdown()
    print("two nodes: ok", flush=True)


if __name__ == "__main__":
    sys.exit(main())

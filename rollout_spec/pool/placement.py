"""Where engines run: Ray resources, placement groups, and the CPU cores of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..errors import ConfigError

Placement = Literal["pack", "spread"]
_STRATEGIES = {"pack": "PACK", "spread": "SPREAD"}


class Places:
    """Bundles of a placement group, one an engine.

    resources: of one engine, by Ray's names ("CPU", "GPU", "TPU", others). group: an existing placement group; each
    of its bundles that holds the resources takes one engine.
    """

    def __init__(
        self,
        resources: Mapping[str, float],
        placement: Placement = "pack",
        group: PlacementGroup | None = None,
        ready_s: float = 60.0,
    ) -> None:
        if placement not in _STRATEGIES:
            raise ConfigError(f'placement must be "pack" or "spread", got {placement!r}')
        bad = {name: value for name, value in resources.items() if not value >= 0}
        if bad or not any(resources.values()):
            raise ConfigError(
                f"resources_per_engine must hold at least one amount above 0, got {dict(resources)}"
            )
        self.resources = dict(resources)
        self.placement = placement
        self._given = group
        self._ready_s = ready_s
        self._own: dict[int, PlacementGroup] = {}
        self._bundles: dict[int, int] = {}

    def options(self, engines: list[int]) -> dict[int, dict[str, Any]]:
        """Actor options for new engines, which are placed together. Raises ConfigError if the cluster is too small."""
        if self._given is not None:
            return {number: self._in_given(number) for number in engines}
        group = placement_group([self.resources] * len(engines), strategy=_STRATEGIES[self.placement])
        if not group.wait(self._ready_s):
            remove_placement_group(group)
            raise ConfigError(
                f"no room for {len(engines)} engine(s) of {self.resources} within {self._ready_s:g} s; the cluster has "
                f"{ray.cluster_resources()}, of which free {ray.available_resources()}"
            )
        found = {}
        for bundle, number in enumerate(engines):
            self._own[number] = group
            found[number] = self._options(group, bundle)
        return found

    def _in_given(self, number: int) -> dict[str, Any]:
        assert self._given is not None
        taken = set(self._bundles.values())
        for index, bundle in enumerate(self._given.bundle_specs):
            if index not in taken and all(bundle.get(k, 0) >= v for k, v in self.resources.items()):
                self._bundles[number] = index
                return self._options(self._given, index)
        raise ConfigError(
            f"the placement group has no free bundle that holds {self.resources}; its bundles are "
            f"{self._given.bundle_specs}, {len(taken)} of them taken"
        )

    def _options(self, group: PlacementGroup, bundle: int) -> dict[str, Any]:
        rest = {name: value for name, value in self.resources.items() if name not in ("CPU", "GPU")}
        return {
            "num_cpus": self.resources.get("CPU", 0),
            "num_gpus": self.resources.get("GPU", 0),
            "resources": rest,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=bundle
            ),
        }

    def release(self, number: int) -> None:
        """An engine is gone; a group of the pool's own goes with its last one."""
        self._bundles.pop(number, None)
        group = self._own.pop(number, None)
        if group is not None and group not in self._own.values():
            remove_placement_group(group)


def cores_for(number: int, cpus: float, available: list[int]) -> tuple[int, ...]:
    """CPU cores of an engine that asked for so many, the next ones for each engine in turn; () for all of them."""
    count = int(cpus)
    if count < 1 or count >= len(available):
        return ()
    first = number * count
    return tuple(available[(first + i) % len(available)] for i in range(count))

"""Run as a program on eight simulated devices: engines on meshes against the engine on one device."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

from rollout_spec import DraftConfig, EngineConfig, RolloutEngine, SamplingParams
from rollout_spec.weights import to_hf
from tests.helpers.tiny_models import CONFIGS, random_params

MESHES = {"model": {"data": 2, "model": 2}, "expert": {"data": 2, "model": 2, "expert": 2}}


def mesh_of(name: str) -> jax.sharding.Mesh:
    config = CONFIGS[name]
    axes = MESHES["expert" if config.experts is not None else "model"]
    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))])
    return jax.sharding.Mesh(devices.reshape(tuple(axes.values())), tuple(axes))


def generate(engine: RolloutEngine, prompts: list[list[int]]) -> list[list[int]]:
    """A prompt three times each, so that the second and third are drafted from the first."""
    sampling = SamplingParams(max_tokens=10, n=2, seed=5, ignore_eos=True, frequency_penalty=0.2)
    outputs = engine.generate(prompts, sampling)
    return [completion.token_ids.tolist() for output in outputs for completion in output.completions]


def main() -> None:
    chosen = sys.argv[1:] or list(CONFIGS)
    for argument in chosen:  # a model, or model:weight_dtype
        name, _, weight_dtype = argument.partition(":")
        config = CONFIGS[name]
        params, other = random_params(config, 0), random_params(config, 1)
        prompts = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7], [9, 8, 7]]
        options = EngineConfig(
            max_seqs=4,
            page_size=4,
            max_batch_tokens=16,
            draft=DraftConfig(gate=False),
            weight_dtype=weight_dtype or None,
        )
        single = RolloutEngine(config, params, config=options)
        meshed = RolloutEngine(config, params, config=options, mesh=mesh_of(name))
        for weights in (None, dict(to_hf(config, other))):  # as given, and swapped in by name
            if weights is not None:
                single.update_weights(other)
                meshed.update_weights({key: np.asarray(value) for key, value in weights.items()})
            for _ in range(2):
                expected, got = generate(single, prompts), generate(meshed, prompts)
                assert expected == got, (name, expected, got)
        split = [leaf for leaf in jax.tree.leaves(meshed.params) if not leaf.sharding.is_fully_replicated]
        assert split, "some weights are split"
        assert meshed.stats().pages_held == 0
        assert all(jnp.isfinite(leaf).all() for leaf in split)
        print(argument, "equal", flush=True)


if __name__ == "__main__":
    main()

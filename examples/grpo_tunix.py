"""Tunix's GRPO with rollouts by the engine: a tiny Qwen3 of Tunix's own learns to say "a", on a CPU.

    pip install "rollout-spec[tunix]"
    python -m examples.grpo_tunix [--steps 20]

Prints the reward and the engine's weight version behind each step.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from rollout_spec.integrations.tunix import RolloutSpecRollout

LETTERS = "abcdefgh "
PROMPTS = ["abc", "hgf ", "dead", "cab a"]


class LetterTokenizer:
    """A token a letter, with the methods that Tunix asks of a tokenizer."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [2 + LETTERS.index(letter) for letter in text]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(LETTERS[int(token) - 2] for token in ids if token >= 2)

    def bos_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return 1

    def pad_id(self) -> int:
        return 0


def tiny_model(seed: int = 0) -> nnx.Module:
    """A random Qwen3 of Tunix's."""
    from tunix.models.qwen3 import model as qwen3

    config = qwen3.ModelConfig(
        num_layers=2,
        vocab_size=2 + len(LETTERS),
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
    )
    return qwen3.Qwen3(config, rngs=nnx.Rngs(seed))


def share_of_a(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The reward: the share of a completion's letters that are an "a"."""
    return [text.count("a") / max(1, len(text)) for text in completions]


def train(steps: int) -> tuple[Any, RolloutSpecRollout, list[tuple[float, int]]]:
    """Trains; returns the cluster, the rollout worker, and reward and weight version behind each step."""
    from tunix.rl import rl_cluster
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rollout import base_rollout

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    with mesh:
        actor, reference = tiny_model(), tiny_model()
    cluster = rl_cluster.RLCluster(
        actor=actor,
        reference=reference,
        tokenizer=LetterTokenizer(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={
                rl_cluster.Role.ACTOR: mesh,
                rl_cluster.Role.REFERENCE: mesh,
                rl_cluster.Role.ROLLOUT: mesh,
            },
            rollout_engine=RolloutSpecRollout,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(3e-3), eval_every_n_steps=10**6, max_steps=steps
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=12,
                max_prompt_length=8,
                temperature=0.9,
                kv_cache_size=64,
                return_logprobs=True,
            ),
        ),
    )
    rollout = cluster.rollout
    seen: list[tuple[float, int]] = []

    def reward(prompts: list[str], completions: list[str], **more: Any) -> list[float]:
        found = share_of_a(prompts, completions, **more)
        seen.append((float(np.mean(found)), rollout.engine.weight_version))
        print(f"reward {seen[-1][0]:.3f}, weights of version {seen[-1][1]}")
        return found

    learner = GRPOLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(num_generations=4, num_iterations=1, beta=0.0),
        reward_fns=reward,
    )
    learner.train([{"prompts": np.array(PROMPTS)} for _ in range(steps)])
    return cluster, rollout, seen


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    train(parser.parse_args(arguments).steps)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Makes the checkpoint: trains the policy from nothing on solutions of a careless pupil.

    python -m examples.reasoner.pretrain [--steps N] [--seed N] [--output FOLDER]

Four minutes on 2 cores. The last line of a solution is right as often as the pupil's: about 60%.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from examples.reasoner.alphabet import END_ID, encode
from examples.reasoner.model import CHECKPOINT, CONFIG, save_checkpoint
from examples.reasoner.tasks import DIGITS, KINDS, Kind, Problem
from examples.trainer import Objective
from rollout_spec.models import Params, init_params

CARELESSNESS = 0.035
"""Share of the calculated lines that go wrong: leaves about 60% of the answers right."""
STEPS = 600
ROWS = 16
"""Solutions of each kind in a step."""
LEARNING_RATE = 3e-3


def batch(kind: Kind, rows: int, generator: random.Random) -> NDArray[np.int32]:
    """Prompts, solutions and end tokens, int32[B, T + 1]; those of one kind are equally long."""
    texts = []
    for _ in range(rows):
        left, right = (generator.randrange(10 ** (digits - 1), 10**digits) for digits in DIGITS[kind][:2])
        problem = Problem(kind, left, right)
        texts.append([*encode(problem.prompt + problem.solution(CARELESSNESS, generator)), END_ID])
    return np.asarray(texts, np.int32)


def train(steps: int, seed: int) -> Params:
    """Weights after `steps` optimizer steps; the same for the same seed on the same machine."""
    generator = random.Random(seed)
    prompt_tokens = {kind: len(Problem(kind, 1, 1).prompt) for kind in KINDS}
    objective = Objective(CONFIG, temperature=1.0)
    schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, steps // 10, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.1))

    def loss(params: Params, texts: dict[Kind, jax.Array]) -> jax.Array:
        """Nats a token of the solutions; prompts are random and teach nothing."""
        logprobs = [
            objective.token_logprobs(params, ids)[:, prompt_tokens[kind] - 1 :].ravel()
            for kind, ids in texts.items()
        ]
        return -jnp.mean(jnp.concatenate(logprobs))

    @jax.jit
    def step(
        params: Params, state: optax.OptState, texts: dict[Kind, jax.Array]
    ) -> tuple[Params, optax.OptState, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, texts)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    params = init_params(CONFIG, seed)
    state = optimizer.init(params)
    started = time.perf_counter()
    for number in range(steps):
        texts = {kind: jnp.asarray(batch(kind, ROWS, generator)) for kind in KINDS}
        params, state, value = step(params, state, texts)
        if number % 50 == 0 or number == steps - 1:
            print(
                f"step {number}: {value:.4f} nats a token, {time.perf_counter() - started:.0f} s", flush=True
            )
    return params


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=CHECKPOINT)
    parsed = parser.parse_args(arguments)
    save_checkpoint(train(parsed.steps, parsed.seed), parsed.output)


if __name__ == "__main__":
    main()

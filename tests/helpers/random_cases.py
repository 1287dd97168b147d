"""Random requests: prompts that share, repeat and differ, and every sampling parameter in every mixture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_spec.models import ModelConfig


@dataclass(frozen=True)
class Case:
    """One request: a prompt and the keywords of its SamplingParams, `seed` among them."""

    prompt: list[int]
    sampling: dict[str, Any]


def random_tokens(rng: np.random.Generator, config: ModelConfig, length: int) -> list[int]:
    return [int(token) for token in rng.integers(config.vocab_size, size=length)]


def random_prompts(
    rng: np.random.Generator, config: ModelConfig, count: int, longest: int
) -> list[list[int]]:
    """Prompts of 1 to `longest` tokens: fresh ones, repeated ones, and ones that begin like another."""
    prompts: list[list[int]] = []
    for _ in range(count):
        kind = rng.random()
        length = int(rng.integers(1, longest + 1)) if rng.random() < 0.7 else int(rng.integers(1, 5))
        if not prompts or kind < 0.4:
            prompt = random_tokens(rng, config, length)
        else:
            prompt = list(prompts[int(rng.integers(len(prompts)))])
            if kind < 0.75:
                kept = int(rng.integers(1, len(prompt) + 1))
                prompt = (prompt[:kept] + random_tokens(rng, config, length))[:longest]
        prompts.append(prompt)
    return prompts


def random_sampling(rng: np.random.Generator, config: ModelConfig, *, longest: int = 24) -> dict[str, Any]:
    """Keywords of SamplingParams, each of them set now and then; at most `longest` tokens a completion."""

    def some_tokens(most: int) -> list[int]:
        return random_tokens(rng, config, int(rng.integers(1, most + 1)))

    sampling: dict[str, Any] = {
        "temperature": float(rng.choice([0.0, 0.0, 0.3, 0.7, 1.0, 1.0, 1.0, 1.5])),
        "max_tokens": int(rng.integers(1, longest + 1)),
        "seed": int(rng.integers(2**63)) if rng.random() < 0.5 else int(rng.integers(100)),
    }
    if rng.random() < 0.25:
        sampling["top_p"] = float(rng.uniform(0.2, 0.99))
    if rng.random() < 0.25:
        sampling["top_k"] = int(rng.choice([1, 2, 5, 20, config.vocab_size - 1, config.vocab_size + 5]))
    if rng.random() < 0.25:
        sampling["min_p"] = float(rng.choice([0.005, 0.05, 0.3]))
    if rng.random() < 0.3:
        sampling["repetition_penalty"] = float(rng.choice([0.8, 1.1, 1.3, 2.0]))
    if rng.random() < 0.25:
        sampling["presence_penalty"] = float(rng.choice([-0.5, 0.4, 1.5]))
    if rng.random() < 0.25:
        sampling["frequency_penalty"] = float(rng.choice([-0.3, 0.2, 1.0]))
    if rng.random() < 0.2:
        sampling["logit_bias"] = {token: float(rng.uniform(-4, 6)) for token in some_tokens(4)}
    if rng.random() < 0.2:
        sampling["bad_token_ids"] = tuple(some_tokens(6))
    if rng.random() < 0.3:
        sampling["stop_token_ids"] = tuple(some_tokens(config.vocab_size // 20 + 1))
    if rng.random() < 0.3:
        letters = list("abcx é")
        sampling["stop"] = tuple(
            "".join(rng.choice(letters, int(rng.integers(1, 4)))) for _ in range(rng.integers(1, 3))
        )
    if rng.random() < 0.3:
        sampling["min_tokens"] = int(rng.integers(sampling["max_tokens"] + 1))
    if rng.random() < 0.3:
        sampling["ignore_eos"] = True
    if rng.random() < 0.2:
        sampling["n"] = int(rng.integers(2, 4))
    return sampling


def random_cases(
    rng: np.random.Generator, config: ModelConfig, count: int, *, longest_prompt: int, longest: int = 24
) -> list[Case]:
    prompts = random_prompts(rng, config, count, longest_prompt)
    return [Case(prompt, random_sampling(rng, config, longest=longest)) for prompt in prompts]

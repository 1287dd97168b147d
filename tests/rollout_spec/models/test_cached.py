"""Logits computed over the paged cache, as a prompt, token by token and as a tree, are transformers' as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rollout_spec.loading.huggingface_config import parse_config
from rollout_spec.models import ModelConfig, build
from rollout_spec.step import attend_pages, new_cache
from tests.references import cases
from tests.rollout_spec.loading.checkpoints import stored_logits
from tests.rollout_spec.models.test_decoder import case_params

PAGE_SIZE, NUM_PAGES, STEP = 4, 8, 12
CAUSAL = 0xFFFFFFFF
CACHED_CASES = [case for case, raw in cases.CASES.items() if raw["model_type"] not in ("llama", "qwen2")]


def runner(config: ModelConfig) -> Callable[..., Any]:
    """A jitted step of one sequence: logits of STEP tokens over the cache."""

    def run(params: Any, pages: Any, tokens: Any, positions: Any, kv_len: Any, count: Any, words: Any) -> Any:
        model, caches = nnx.merge(build(config), params), list(pages)
        attend = attend_pages(
            config,
            caches,
            kv_lens=kv_len[None],
            page_table=jnp.arange(NUM_PAGES)[None],
            cu_q_lens=jnp.stack([jnp.int32(0), count]),
            ancestors=words,
            num_seqs=jnp.ones(1, jnp.int32),
            backend="reference",
        )
        hidden = model.hidden_states(tokens, positions, attend)
        return model.unembed(hidden), tuple(caches)

    return jax.jit(run)


@pytest.mark.parametrize("case", CACHED_CASES)
def test_prompt_decode_and_tree_give_transformers_logits(case: str) -> None:
    config = parse_config(cases.CASES[case])
    params, expected, run = case_params(config), stored_logits(case)[0], runner(config)
    text = cases.inputs()[0][0]
    pages = new_cache(config, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=jnp.float32)

    def step(tokens: list[int], positions: list[int], words: list[int], cached: int) -> np.ndarray:
        nonlocal pages
        count, padding = len(tokens), [0] * (STEP - len(tokens))
        arrays = [np.array(row + padding, np.int32) for row in (tokens, positions)]
        logits, pages = run(
            params,
            pages,
            *arrays,
            np.int32(cached + count),
            np.int32(count),
            np.array([[word, word if word == CAUSAL else 0] for word in words + padding], np.uint32),
        )
        return np.asarray(logits)[:count]

    def check(logits: np.ndarray, places: list[int]) -> None:
        np.testing.assert_allclose(logits, expected[places], atol=1e-4, rtol=0)

    prompt = list(range(STEP))
    check(step(text[prompt].tolist(), prompt, [CAUSAL] * STEP, 0), prompt)
    check(step([int(text[12])], [12], [1], 12), [12])
    # The text goes on through nodes 0, 2, 3 and 5; nodes 1 and 4 are other tokens at the places of 2 and 3.
    places = [13, 14, 14, 15, 15, 16]
    tokens = [int(text[place]) for place in places]
    tokens[1], tokens[4] = (tokens[1] + 1) % config.vocab_size, (tokens[4] + 1) % config.vocab_size
    logits = step(tokens, places, [0b1, 0b11, 0b101, 0b1101, 0b10101, 0b101101], 13)
    check(logits[[0, 2, 3, 5]], [13, 14, 15, 16])

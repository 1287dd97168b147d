# /// script
# requires-python = ">=3.11"
# dependencies = ["google-tunix==0.1.7"]
# ///
"""Tunix's own sampler, serving a Llama model to `benchmarks/rival_process.py`. Runs in an environment of its own.

Weights are read by Tunix's loader into its Llama3 class. That class rotates by a base of 1,000,000 whatever its
config says, so its rotation is told the checkpoint's. The key/value cache of a call is as long as its longest
prompt and its completion, rounded up to whole blocks, so that nothing is spent on positions which nobody uses. What
a call needs that is not compiled yet is compiled before its time is taken.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.llama3 import model as llama3
from tunix.models.llama3.params import create_model_from_safe_tensors

CACHE_BLOCK = 32
"""Positions that a cache's length is a multiple of: few lengths to compile for, little spent on unused ones."""
NO_TOKEN = -1
"""Ends no completion."""
PACKAGES = ("google-tunix", "jax", "jaxlib", "flax")


class TokenIds:
    """What Tunix calls a tokenizer, of texts that are token ids already."""

    def __init__(self, pad_token_id: int) -> None:
        self._pad_token_id = pad_token_id

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))

    def bos_id(self) -> None:
        return None  # nothing is put before a prompt

    def eos_id(self) -> int:
        return NO_TOKEN

    def pad_id(self) -> int:
        return self._pad_token_id  # masked wherever it stands


class Server:
    """A model and its samplers, by what they were compiled for."""

    def __init__(self, folder: Path, pad_token_id: int) -> None:
        self._pad_token_id = pad_token_id
        described = json.loads((folder / "config.json").read_text())
        self._eos_token_ids: list[int] = described["eos_token_id"]
        self._config = llama3.ModelConfig(
            num_layers=described["num_hidden_layers"],
            vocab_size=described["vocab_size"],
            embed_dim=described["hidden_size"],
            hidden_dim=described["intermediate_size"],
            num_heads=described["num_attention_heads"],
            num_kv_heads=described["num_key_value_heads"],
            head_dim=described["head_dim"],
            rope_theta=described["rope_theta"],
            norm_eps=described["rms_norm_eps"],
            weight_tying=described["tie_word_embeddings"],
        )
        llama3.apply_rope = functools.partial(llama3.apply_rope, rope_theta=self._config.rope_theta)
        self._model = create_model_from_safe_tensors(str(folder), self._config, dtype=jnp.float32)
        self._samplers: dict[tuple[int, int, int, bool, float], Sampler] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Seconds of the call, and the tokens of each completion."""
        prompts, max_tokens = request["prompts"], request["max_tokens"]
        if any(self._pad_token_id in prompt for prompt in prompts):
            raise ValueError(f"a prompt holds token {self._pad_token_id}, which stands for padding here")
        stop_at_eos, temperature = request["stop_at_eos"], request["temperature"]
        cache_size = -(-(max(map(len, prompts)) + max_tokens) // CACHE_BLOCK) * CACHE_BLOCK
        key = (cache_size, len(prompts), max_tokens, stop_at_eos, temperature)
        is_new, sampler = key not in self._samplers, self._sampler(key)
        run = functools.partial(
            sampler,
            [" ".join(map(str, prompt)) for prompt in prompts],
            max_generation_steps=max_tokens,
            max_prompt_length=cache_size - max_tokens,
            eos_tokens=self._eos_token_ids if stop_at_eos else [NO_TOKEN],
            temperature=temperature,
            top_p=1.0 if temperature > 0 else None,  # 1.0 doesn't sort the vocabulary, None is greedy
            seed=request["seed"],
        )
        if is_new:
            run()  # compiles
        started = time.perf_counter()
        output = run()
        seconds = time.perf_counter() - started
        rows = [row.tolist() for row in output.tokens]
        # The end token itself is left out by Tunix and counted by us.
        rows = [row if len(row) == max_tokens else [*row, self._eos_token_ids[0]] for row in rows]
        return {"seconds": seconds, "tokens": rows}

    def _sampler(self, key: tuple[int, int, int, bool, float]) -> Sampler:
        if key not in self._samplers:
            config = self._config
            sizes = CacheConfig(key[0], config.num_layers, config.num_kv_heads, config.head_dim)
            self._samplers[key] = Sampler(self._model, TokenIds(self._pad_token_id), sizes)
        return self._samplers[key]


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a model with Tunix on stdin and stdout.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pad-token-id", type=int, required=True, help="one that no prompt holds")
    arguments = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no answer
    server = Server(arguments.folder, arguments.pad_token_id)
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    hello = {"python": platform.python_version(), "device": jax.devices()[0].platform, "versions": versions}
    print(json.dumps(hello), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(server.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()

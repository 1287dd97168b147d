"""transformers' `generate` as a rival, in a process of its own, so that its threads never meet ours.

Run as a program, this module is that process: it loads a Hugging Face folder, then answers a request of JSON on each
line of its standard input by a line on its standard output.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from safetensors.numpy import save_file

from rollout_spec.models import ModelConfig, Params
from rollout_spec.weights.names import to_hf

PAD_TOKEN_ID = 0


@dataclass(frozen=True)
class Run:
    """One timed call: its seconds, prompt included, and the tokens it generated for each prompt."""

    seconds: float
    tokens: list[list[int]]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def save_huggingface(config: ModelConfig, params: Params, folder: Path) -> None:
    """Writes a Llama model as transformers reads it: the very weights that the engine serves, as float32."""
    if config.architecture != "llama":
        raise ValueError(f"expected a llama model, got {config.architecture}")
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: np.ascontiguousarray(array, dtype=np.float32) for name, array in to_hf(config, params)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": "silu",
        "eos_token_id": list(config.eos_token_ids),
        "bos_token_id": config.bos_token_id,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(described, indent=2))


class Transformers:
    """The rival process; use it as a context manager."""

    def __init__(self, folder: Path, threads: int) -> None:
        command = [sys.executable, "-m", "benchmarks.rival", str(folder), "--threads", str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        stop_at_eos: bool,
        prompt_lookup: int | None = None,
    ) -> Run:
        """Greedy completions of token id prompts in one batch, timed inside the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {
            "prompts": [list(map(int, prompt)) for prompt in prompts],
            "max_tokens": max_tokens,
            "stop_at_eos": stop_at_eos,
            "prompt_lookup": prompt_lookup,
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the transformers process ended; its own message stands above")
        return Run(**json.loads(answer))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()


def _serve(folder: Path, threads: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no answer
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    eos_token_ids = set(model.config.eos_token_id)
    for line in sys.stdin:
        print(json.dumps(_answer(model, eos_token_ids, json.loads(line))), file=answers, flush=True)


def _answer(model: Any, eos_token_ids: set[int], request: dict[str, Any]) -> dict[str, Any]:
    import torch

    prompts = request["prompts"]
    width = max(map(len, prompts))
    token_ids = torch.full((len(prompts), width), PAD_TOKEN_ID)
    mask = torch.zeros_like(token_ids)
    for row, prompt in enumerate(prompts):  # padded at the left, as generate wants it
        token_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    options = {"prompt_lookup_num_tokens": request["prompt_lookup"]} if request["prompt_lookup"] else {}
    model.generation_config.eos_token_id = sorted(eos_token_ids) if request["stop_at_eos"] else None
    model.generation_config.pad_token_id = PAD_TOKEN_ID
    started = time.perf_counter()
    with torch.inference_mode():
        generated = model.generate(
            token_ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=request["max_tokens"],
            **options,
        )
    seconds = time.perf_counter() - started
    rows = generated[:, width:].tolist()
    if request["stop_at_eos"]:
        rows = [_until_eos(row, eos_token_ids) for row in rows]
    return {"seconds": seconds, "tokens": rows}


def _until_eos(row: list[int], eos_token_ids: set[int]) -> list[int]:
    end = next((index for index, token in enumerate(row) if token in eos_token_ids), len(row) - 1)
    return row[: end + 1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve a model with transformers on stdin and stdout.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    _serve(arguments.folder, arguments.threads)

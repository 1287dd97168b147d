"""transformers' `generate`, greedy or sampled, serving a model to `benchmarks/rival_process.py`."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

PAD_TOKEN_ID = 0
PACKAGES = ("transformers", "torch")


def answer(model: Any, eos_token_ids: list[int], request: dict[str, Any]) -> dict[str, Any]:
    """Seconds of the call, and the tokens of each completion up to its end token."""
    prompts = request["prompts"]
    width = max(map(len, prompts))
    token_ids = torch.full((len(prompts), width), PAD_TOKEN_ID)
    mask = torch.zeros_like(token_ids)
    for row, prompt in enumerate(prompts):  # padded at the left, as generate wants it
        token_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    options: dict[str, Any] = {"do_sample": False}
    if request["temperature"] > 0:  # top_k is 50 unless it is switched off
        options = {"do_sample": True, "temperature": request["temperature"], "top_k": 0, "top_p": 1.0}
    if request["prompt_lookup"]:
        options["prompt_lookup_num_tokens"] = request["prompt_lookup"]
    model.generation_config.eos_token_id = eos_token_ids if request["stop_at_eos"] else None
    model.generation_config.pad_token_id = PAD_TOKEN_ID
    torch.manual_seed(request["seed"])
    started = time.perf_counter()
    with torch.inference_mode():
        generated = model.generate(
            token_ids, attention_mask=mask, max_new_tokens=request["max_tokens"], **options
        )
    seconds = time.perf_counter() - started
    rows = generated[:, width:].tolist()
    if request["stop_at_eos"]:
        rows = [_until(row, eos_token_ids) for row in rows]
    return {"seconds": seconds, "tokens": rows}


def _until(row: list[int], eos_token_ids: list[int]) -> list[int]:
    end = next((index for index, token in enumerate(row) if token in eos_token_ids), len(row) - 1)
    return row[: end + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a model with transformers on stdin and stdout.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no answer
    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=torch.float32).eval()
    eos_token_ids = sorted(model.config.eos_token_id)
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    hello = {"python": platform.python_version(), "threads": arguments.threads, "versions": versions}
    print(json.dumps(hello), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(model, eos_token_ids, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()

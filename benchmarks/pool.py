"""What a pool of engines costs and gains on this machine.

    python -m benchmarks.pool [--parts overhead engines push history] [--output FOLDER]

overhead: a null model through a pool of 2: time of one request alone, and requests a second of 10,000 at once.
engines:  SmolLM2-135M, 16 requests: 2 engines of one thread against one engine of both, drafting off, in turns.
push:     its 538 MB to 2 engines, against the copies that takes: into the object store, and out of it for each engine.
history:  the reasoner, second epoch: tokens a step of 2 engines that share history, that don't, and of one engine.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
import ray
from rich.console import Console
from rich.table import Table

from examples.reasoner.model import CHECKPOINT
from examples.reasoner.tasks import problems
from examples.smollm2 import fetch
from rollout_spec import (
    Completion,
    DraftConfig,
    EngineConfig,
    RolloutEngine,
    RolloutOutput,
    RolloutPool,
    SamplingParams,
)
from rollout_spec.loading import load_model
from rollout_spec.models import ModelConfig
from rollout_spec.requests import Request
from rollout_spec.stats import EngineStats


class NullEngine:
    """An engine whose completions are one token and cost nothing."""

    def __init__(self) -> None:
        self.config = EngineConfig(max_seqs=64, draft=DraftConfig(kind="none"))
        self.model_config = ModelConfig("llama", 100, 8, 8, 1, 1, 1, 8, max_position_embeddings=512)
        self.tokenizer = None
        self.max_seq_len = 512
        self.drafter = None
        self.weight_version = 0
        self._waiting: list[Request] = []

    def submit(
        self, prompt: Any, sampling: SamplingParams, *, request_id: Any, group_id: Any, continue_from: Any
    ) -> Request:
        request = Request(request_id, prompt, sampling, group_id)
        self._waiting.append(request)
        return request

    def step(self) -> list[Request]:
        one = np.zeros(1, np.float32)
        token = np.zeros(1, np.int32)
        for request in self._waiting:
            done = Completion(token, None, one, one, one, "length", None, token, request.sampling.seed or 0)
            request.output = RolloutOutput(request.prompt_token_ids, [done], request.group_id)
            request.status = "finished"
        self._waiting = []
        return []

    def stats(self) -> EngineStats:
        return EngineStats(pages=1000)

    def close(self) -> None:
        pass


def overhead() -> dict[str, float]:
    """Milliseconds of a request alone, and requests a second."""
    with RolloutPool(NullEngine, num_engines=2) as pool:  # type: ignore[arg-type]
        sampling = SamplingParams(max_tokens=1, seed=0)
        prompt = np.arange(1, 9)
        pool.generate([prompt] * 100, sampling)
        alone = []
        for _ in range(200):
            started = time.perf_counter()
            pool.submit(prompt, sampling).result()
            alone.append(time.perf_counter() - started)
        prompts = [np.arange(1 + i % 50, 9 + i % 50) for i in range(10_000)]
        started = time.perf_counter()
        pool.generate(prompts, sampling)
        seconds = time.perf_counter() - started
    return {"request_alone_ms": 1000 * median(alone), "requests_per_s": 10_000 / seconds}


def engines_and_push(parts: Sequence[str], rounds: int) -> dict[str, dict[str, Any]]:
    """2 engines against one, and the time of a push to both."""
    found: dict[str, dict[str, Any]] = {}
    model = load_model(fetch())
    generator = np.random.default_rng(0)
    prompts = [generator.integers(100, 40_000, 32) for _ in range(16)]
    sampling = [SamplingParams(max_tokens=48, ignore_eos=True, seed=index) for index in range(16)]

    def config(slots: int) -> EngineConfig:
        return EngineConfig(max_seqs=slots, max_seq_len=128, draft=DraftConfig(kind="none"))

    with RolloutPool((model.config, model.params), config(8), 2, warm_up="engines" in parts) as pool:
        if "engines" in parts:
            engine = RolloutEngine(model.config, model.params, config=config(16))
            engine.warm_up()
            times: dict[str, list[float]] = {"pool": [], "engine": []}
            same = True
            for turn in range(rounds + 1):
                outputs = {}
                for name, one in (("pool", pool), ("engine", engine)):
                    started = time.perf_counter()
                    outputs[name] = one.generate(prompts, sampling)
                    if turn:  # the first round fills caches
                        times[name].append(time.perf_counter() - started)
                same &= all(
                    np.array_equal(left.completions[0].token_ids, right.completions[0].token_ids)
                    for left, right in zip(*outputs.values(), strict=True)
                )
            tokens = 16 * 48
            found["engines"] = {
                "two_engines_tokens_per_s": tokens / median(times["pool"]),
                "one_engine_tokens_per_s": tokens / median(times["engine"]),
                "ratio": median(
                    [other / mine for mine, other in zip(times["pool"], times["engine"], strict=True)]
                ),
                "tokens_identical": same,
            }
            engine.close()
        if "push" in parts:
            arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(model.params)]
            pushes, copies = [], []
            for _ in range(rounds + 1):
                started = time.perf_counter()
                for _ in range(3):
                    fresh = [array.copy() for array in arrays]
                copies.append(time.perf_counter() - started)
                del fresh
                started = time.perf_counter()
                report = pool.update_weights(model.params)
                pushes.append(time.perf_counter() - started)
            found["push"] = {
                "bytes": sum(array.nbytes for array in arrays),
                "push_s": median(pushes[1:]),
                "copies_s": median(copies[1:]),
                "ratio": median([push / copy for push, copy in zip(pushes[1:], copies[1:], strict=True)]),
                "put_s": report.put_s,
            }
    return found


def history(prompts_count: int, group: int) -> dict[str, float]:
    """Tokens a step in the second epoch."""
    tasks = problems(prompts_count, 100)
    draft = DraftConfig(max_nodes=16, gate=False)

    def play(num_engines: int, share: bool) -> float:
        config = EngineConfig(max_seqs=16 // num_engines, max_seq_len=320, draft=draft)
        with RolloutPool(
            str(CHECKPOINT), config, num_engines, share_history=share, history_every_s=0.5, move_running=False
        ) as pool:
            for epoch in range(2):
                pool.reset_stats()
                # Another order each time, so that prompts come to other engines than before.
                order = np.random.default_rng(epoch).permutation(len(tasks))
                pool.generate(
                    [tasks[index].prompt for index in order],
                    [SamplingParams(n=group, max_tokens=240, seed=1000 * epoch + int(i)) for i in order],
                )
                time.sleep(3)
            return pool.stats().acceptance_length

    return {
        "one_engine": play(1, False),
        "two_that_share": play(2, True),
        "two_that_do_not": play(2, False),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = ("overhead", "engines", "push", "history")
    parser.add_argument("--parts", nargs="+", default=every, choices=every)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(arguments)
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 leaves the machine to whatever else runs
    ray.init(
        address="local", num_cpus=2, object_store_memory=3 << 30, include_dashboard=False, log_to_driver=False
    )
    path = options.output / "pool.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if "overhead" in options.parts:
        found["overhead"] = overhead()
    if {"engines", "push"} & set(options.parts):
        found |= engines_and_push(options.parts, options.rounds)
    if "history" in options.parts:
        found["history"] = history(16, 4)
    table = Table("part", "what", "value")
    for part, values in found.items():
        for name, value in values.items():
            table.add_row(part, name, f"{value:,.3f}" if isinstance(value, float) else f"{value:,}")
    Console().print(table)
    options.output.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

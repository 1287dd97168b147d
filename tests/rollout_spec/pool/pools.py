"""Pools of tiny engines, and what one engine says of the same requests."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rollout_spec import (
    Completion,
    DraftConfig,
    EngineConfig,
    RolloutEngine,
    RolloutOutput,
    RolloutPool,
    SamplingParams,
)
from tests.helpers.tiny_models import TinyModel, tiny_model

CONFIG = EngineConfig(max_seqs=4, page_size=4, max_batch_tokens=16, max_seq_len=80)
PLAIN = EngineConfig(
    max_seqs=4, page_size=4, max_batch_tokens=16, max_seq_len=80, draft=DraftConfig(kind="none")
)


def model() -> TinyModel:
    return tiny_model("llama")


def new_pool(num_engines: int = 2, config: EngineConfig = PLAIN, **options: Any) -> RolloutPool:
    options.setdefault("resources_per_engine", {"CPU": 0.1})  # so that several pools fit at a time
    return RolloutPool((model().config, model().params), config, num_engines, **options)


def requests(
    count: int = 12, *, tokens: int = 24, n: int = 2, seed: int = 0
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, some of them equal, and parameters of different lengths."""
    rng = np.random.default_rng(seed)
    prompts = [[int(token) for token in rng.integers(4, 41, rng.integers(1, 9))] for _ in range(count)]
    prompts[1] = prompts[0]
    sampling = [
        SamplingParams(
            n=n,
            seed=100 * seed + index,
            max_tokens=int(rng.integers(2, tokens + 1)),
            temperature=1.0,
            ignore_eos=True,
        )
        for index in range(count)
    ]
    return prompts, sampling


@functools.cache
def single_engine() -> RolloutEngine:
    return RolloutEngine(model().config, model().params, config=PLAIN)


def expected(prompts: Sequence[Any], sampling: Any) -> list[RolloutOutput]:
    """What one engine generates."""
    return single_engine().generate(prompts, sampling)


def all_tokens(outputs: Sequence[RolloutOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids.tolist() for completion in output.completions] for output in outputs]


def assert_same(outputs: Sequence[RolloutOutput], wanted: Sequence[RolloutOutput]) -> None:
    assert all_tokens(outputs) == all_tokens(wanted)
    for output, other in zip(outputs, wanted, strict=True):
        assert output.prompt_token_ids.tolist() == other.prompt_token_ids.tolist()
        assert output.group_id == other.group_id
        for one, two in zip(output.completions, other.completions, strict=True):
            assert_whole(one)
            assert (one.finish_reason, one.seed) == (two.finish_reason, two.seed)
            np.testing.assert_allclose(one.logprobs, two.logprobs, atol=2e-5)


def assert_whole(completion: Completion) -> None:
    count = len(completion.token_ids)
    for values in (completion.logprobs, completion.sampled_logprobs, completion.weight_versions):
        assert len(values) == count


def pids(pool: RolloutPool) -> list[int]:
    """Processes of the engines that serve."""
    return pool._driver.call(
        lambda: [handle.facts.pid for handle in pool._driver.fleet.serving if handle.facts]
    )


def kill_one(pool: RolloutPool, index: int = 0) -> int:
    """kill -9 for one engine's process."""
    pid = pids(pool)[index]
    os.kill(pid, signal.SIGKILL)
    return pid


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Counts only time in which this process ran, as the machine may stand still."""
    waited = 0.0
    while not condition():
        time.sleep(0.05)
        waited += 0.05
        assert waited < seconds, "it didn't happen in time"


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def new_engine_outputs(params: Any, prompts: Sequence[Any], sampling: Any) -> list[RolloutOutput]:
    """What one engine with other weights generates."""
    single_engine().update_weights(params)
    try:
        return single_engine().generate(prompts, sampling)
    finally:
        single_engine().update_weights(model().params)


def pool_of(build: Callable[[], RolloutEngine], num_engines: int, **options: Any) -> RolloutPool:
    """A pool of engines that a function builds in the actor."""
    return RolloutPool(build, num_engines=num_engines, resources_per_engine={"CPU": 0.1}, **options)

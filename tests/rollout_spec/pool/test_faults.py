"""Engines die, hang, are slow and can't be built: every request ends exactly once, with the same tokens."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from rollout_spec import RolloutEngine, SamplingParams
from rollout_spec.errors import EngineLostError, RequestFailedError
from tests.rollout_spec.pool import pools

pytestmark = pytest.mark.usefixtures("ray_on_2_cpus")
POISON = 13


def kill_seeds(config: pytest.Config) -> int:
    return int(config.getoption("--kill-seeds"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kill_seed" in metafunc.fixturenames:
        metafunc.parametrize("kill_seed", range(kill_seeds(metafunc.config)))


@pytest.fixture(scope="module")
def mortal() -> Any:
    """A pool whose engines the tests kill; replaced ones come back by themselves."""
    with pools.new_pool(2, max_retries=20) as made:
        yield made


def both_serve(pool: Any) -> bool:
    return len(pools.pids(pool)) == 2


def test_killed_at_random_moments_nothing_is_lost(mortal: Any, kill_seed: int) -> None:
    pools.wait_until(lambda: both_serve(mortal))
    rng = np.random.default_rng(kill_seed)
    prompts, sampling = pools.requests(24, tokens=70, seed=kill_seed)
    wanted = pools.expected(prompts, sampling)
    lost = mortal.stats().engines_lost
    counts: dict[int, int] = {}
    outputs = []
    kills = sorted(rng.integers(0, len(prompts) - 4, 3).tolist())
    for output in mortal.stream(prompts, sampling):
        counts[output.index] = counts.get(output.index, 0) + 1
        outputs.append(output)
        while kills and len(outputs) > kills[0]:
            kills.pop(0)
            alive = pools.pids(mortal)
            if alive:
                pools.kill_one(mortal, int(rng.integers(len(alive))))
    assert counts == dict.fromkeys(range(len(prompts)), 1)
    pools.assert_same(sorted(outputs, key=lambda output: output.index), wanted)
    pools.wait_until(lambda: mortal.stats().engines_lost > lost)


def test_killed_during_an_update(mortal: Any) -> None:
    pools.wait_until(lambda: both_serve(mortal))
    prompts, sampling = pools.requests(16, tokens=60)
    requests = [mortal.submit(prompt, one) for prompt, one in zip(prompts, sampling, strict=True)]
    killer = threading.Timer(0.02, lambda: pools.kill_one(mortal))
    killer.start()
    version = mortal.update_weights(pools.model().params).version
    killer.join()
    outputs = [request.result(120) for request in requests]
    pools.assert_same(outputs, pools.expected(prompts, sampling))
    pools.wait_until(lambda: both_serve(mortal))
    pools.wait_until(lambda: set(mortal.weight_versions.values()) == {version})
    assert mortal.weight_version == version


def fragile_engine() -> RolloutEngine:
    """Its process ends when it is given a prompt that begins with POISON."""
    engine = RolloutEngine(pools.model().config, pools.model().params, config=pools.PLAIN)
    submit = engine.submit

    def submit_or_die(prompt: Any, *args: Any, **keywords: Any) -> Any:
        if int(prompt[0]) == POISON:
            os._exit(1)
        return submit(prompt, *args, **keywords)

    engine.submit = submit_or_die  # type: ignore[method-assign]
    return engine


def test_a_poison_prompt_fails_alone() -> None:
    prompts = [[5, 6], [POISON, 1], [7], [8, 9]]
    sampling = SamplingParams(max_tokens=8, seed=3)
    with pools.pool_of(fragile_engine, 2) as pool:
        with pytest.raises(RequestFailedError) as caught:
            pool.generate(prompts, sampling)
        assert [request.index for request in caught.value.requests] == [1]
        assert isinstance(caught.value.requests[0].error, EngineLostError)
        wanted = pools.expected([prompts[0], prompts[2], prompts[3]], sampling)
        pools.assert_same([output for output in caught.value.outputs if output is not None], wanted)
        pools.assert_same(pool.generate(prompts[2:], sampling), wanted[1:])


def hanging_engine() -> RolloutEngine:
    """Its steps never end once it is given a prompt that begins with POISON."""
    engine = RolloutEngine(pools.model().config, pools.model().params, config=pools.PLAIN)
    submit, step = engine.submit, engine.step
    hangs = []

    def submit_and_note(prompt: Any, *args: Any, **keywords: Any) -> Any:
        hangs.extend([True] * (int(prompt[0]) == POISON))
        return submit(prompt, *args, **keywords)

    def step_or_hang() -> Any:
        while hangs:
            time.sleep(0.1)
        return step()

    engine.submit, engine.step = submit_and_note, step_or_hang  # type: ignore[method-assign]
    return engine


def test_an_engine_that_hangs_is_replaced() -> None:
    with pools.pool_of(hanging_engine, 1, health_deadline_s=8.0, max_retries=0) as pool:
        sampling = SamplingParams(max_tokens=4, seed=3)
        with pytest.raises(RequestFailedError, match="took longer"):
            pool.generate([[POISON]], sampling)
        pools.assert_same(pool.generate([[5]], sampling), pools.expected([[5]], sampling))


def slow_or_fast_engine() -> RolloutEngine:
    """One of the two, by the parity of its process's number, is slow where the other is not."""
    engine = RolloutEngine(pools.model().config, pools.model().params, config=pools.PLAIN)
    step = engine.step
    pause_s = 0.02 + 0.1 * (os.getpid() % 2)

    def slow_step() -> Any:
        time.sleep(pause_s)
        return step()

    engine.step = slow_step  # type: ignore[method-assign]
    return engine


def test_slow_engines_change_no_token() -> None:
    prompts, sampling = pools.requests(12)
    with pools.pool_of(slow_or_fast_engine, 2) as pool:
        pools.assert_same(pool.generate(prompts, sampling), pools.expected(prompts, sampling))


def unbuildable_engine() -> RolloutEngine:
    raise OSError("no such checkpoint")


def test_an_engine_that_cannot_be_built_says_why() -> None:
    with pytest.raises(EngineLostError, match="no such checkpoint"):
        pools.pool_of(unbuildable_engine, 1)


@dataclasses.dataclass(frozen=True)
class DiesWhileItIsBuilt:
    """Builds an engine, but for the first two times, in which its process is killed from outside, as by the system."""

    marks: Path

    def __call__(self) -> RolloutEngine:
        count = len(list(self.marks.iterdir()))
        (self.marks / f"{count}-{os.getpid()}").touch()
        if count < 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return RolloutEngine(pools.model().config, pools.model().params, config=pools.PLAIN)


def test_an_engine_that_is_killed_while_it_is_built_is_built_again(tmp_path: Path) -> None:
    prompts, sampling = pools.requests(4)
    with pools.pool_of(DiesWhileItIsBuilt(tmp_path), 1) as pool:
        pools.assert_same(pool.generate(prompts, sampling), pools.expected(prompts, sampling))
    assert len(list(tmp_path.iterdir())) == 3


def test_nothing_is_left_after_shutdown() -> None:
    pool = pools.new_pool(2)
    pool.update_weights(pools.model().params)
    alive = pools.pids(pool)
    pool.generate(*pools.requests(4))
    pool.shutdown()
    pools.wait_until(lambda: not any(pools.is_alive(pid) for pid in alive))


DRIVER = """
import sys, time
sys.path.insert(0, {root!r})
import ray
ray.init(address={address!r}, log_to_driver=False)
from tests.rollout_spec.pool import pools
pool = pools.new_pool(2)
print(*pools.pids(pool), flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["time.sleep(600)", "raise RuntimeError('the trainer failed')"])
def test_the_drivers_death_leaves_no_actor(end: str) -> None:
    root = str(Path(__file__).resolve().parents[3])
    address = ray.get_runtime_context().gcs_address
    code = DRIVER.format(root=root, address=address, end=end)
    driver = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert driver.stdout is not None
    line = ""
    while not (line and all(word.isdigit() for word in line.split())):
        line = driver.stdout.readline()
        assert line, "the driver ended too early"
    alive = [int(word) for word in line.split()]
    if "sleep" in end:
        driver.send_signal(signal.SIGKILL)
    driver.wait()
    pools.wait_until(lambda: not any(pools.is_alive(pid) for pid in alive))

"""Part 7, overheads: the host's share of a step, memory over many requests, time to first token, warm-up.

    python -m benchmarks.rollouts_overheads memory|start-up SETTINGS     # one of the processes that part 7 starts

Memory and start-up are of a process of their own, which prints JSON: memory, because what the benchmark freed
before would hide growth; start-up, because nothing may be compiled yet.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from benchmarks.decode import CompileCounter
from benchmarks.drafter_measure import resident_bytes
from benchmarks.rollouts_play import (
    SPECULATIVE,
    TINY,
    Bench,
    Policy,
    Subject,
    Work,
    in_order,
    seeds,
    smollm2,
    untrained,
)
from benchmarks.rollouts_results import goal
from rollout_spec import DraftConfig, EngineConfig, RolloutEngine, SamplingParams

TITLE = "Overheads"
HOST_SHARE_GOAL = 0.05
HOST_SHARE_SLOTS = 16
"""Where the goal holds."""
MEMORY_GROWTH_GOAL = 0.01
_BATCH = 50
_CAPACITY_TOKENS = 20_000
"""Of the history while memory is looked at, so that it is full long before the first look."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """slots: requests at once when the host's time is measured. requests: of the look at memory."""

    slots: tuple[int, ...] = (1, 16, 64)
    rounds: int = 3
    max_tokens: int = 64
    requests: int = 10_000
    start_up_slots: int = 16


FULL = Settings()
QUICK = Settings(slots=(1, 16), rounds=2, max_tokens=32, requests=2_000)
SMOKE = Settings(slots=(1, 2), rounds=1, max_tokens=4, requests=200, start_up_slots=2)


def measure(settings: Settings, bench: Bench, save: Callable[[str, dict[str, Any]], None]) -> None:
    """A cell for the host's time at each number of slots, and one each for the rest."""
    for slots in settings.slots:
        save(f"host time, {slots} slots", host_time(settings, bench, slots))
    save("time to first token", first_token(settings, bench))
    tiny = bench.policy.config == TINY
    save("memory", _memory_cell(_in_process("memory", {"requests": settings.requests})))
    save(
        "start-up", _in_process("start-up", {"slots": settings.start_up_slots, "tiny": tiny}) | {"goals": []}
    )


def host_time(settings: Settings, bench: Bench, slots: int) -> dict[str, Any]:
    """Scheduling, drafting, packing, learning and bookkeeping, of a second epoch of math prompts at temperature 1."""
    numbers = seeds(8)
    prompts = bench.policy.prompts["math"]

    def works() -> list[Work]:
        return [
            Work(
                prompts[number % len(prompts)],
                SamplingParams(max_tokens=settings.max_tokens, ignore_eos=True, seed=next(numbers)),
                ("math", number % len(prompts)),
            )
            for number in range(slots)
        ]

    pair = bench.pair(slots)
    for subject in pair.values():
        subject.forget()
        subject.prime(works())
        subject.play(works())
    rows: dict[str, list[Any]] = {name: [] for name in pair}
    for number in range(settings.rounds):
        one = works()
        for name in in_order(list(pair), number):
            rows[name].append(pair[name].play(one).stats)
    figures = {
        name: {
            "host_ms": statistics.median(1e3 * one.host_s / one.steps for one in stats),
            "step_ms": statistics.median(1e3 * (one.host_s + one.device_s) / one.steps for one in stats),
            "host_share": statistics.median(one.host_share for one in stats),
        }
        for name, stats in rows.items()
    }
    goals = [
        goal(f"{name}, host share of a step", figure["host_share"], HOST_SHARE_GOAL, at_least=False)
        for name, figure in figures.items()
        if slots == HOST_SHARE_SLOTS
    ]
    return {"slots": slots, "subjects": figures, "goals": goals}


def first_token(settings: Settings, bench: Bench) -> dict[str, Any]:
    """Seconds from `submit` to the first token: of an idle engine, and of one with all slots but one busy."""
    slots = max(slots for slots in settings.slots if slots <= HOST_SHARE_SLOTS)
    subject = bench.subject(slots, SPECULATIVE, prefix_cache=False)
    prompts = bench.policy.prompts["math"]
    seconds: dict[str, list[float]] = {"idle": [], "busy": []}
    for number in range(max(3, settings.rounds)):
        seconds["idle"].append(_seconds_to_first_token(subject.engine, prompts[number]))
        others = [
            subject.engine.submit(prompt, SamplingParams(max_tokens=64, ignore_eos=True, seed=number))
            for prompt in prompts[10 : 10 + slots - 1]
        ]
        while any(other.sequences[0].num_generated == 0 for other in others):
            subject.engine.step()
        seconds["busy"].append(_seconds_to_first_token(subject.engine, prompts[number]))
        subject.engine.abort()
        subject.engine.step()
    lengths = [len(prompts[number]) for number in range(max(3, settings.rounds))]
    return {
        "slots": slots,
        "prompt_tokens": statistics.median(lengths),
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "goals": [],
    }


def _seconds_to_first_token(engine: RolloutEngine, prompt: list[int]) -> float:
    started = time.perf_counter()
    request = engine.submit(prompt, SamplingParams(max_tokens=1, seed=0))
    while not request.ended:
        engine.step()
    return time.perf_counter() - started


def _in_process(what: str, settings: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.rollouts_overheads", what, json.dumps(settings)]
    done = subprocess.run(
        command, cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def resident_memory(requests: int) -> dict[str, Any]:
    """Physical memory while a tiny model serves many short requests, looked at ten times."""
    policy = untrained(TINY, num_prompts=_BATCH, max_seq_len=96)
    config = EngineConfig(
        max_seqs=16, max_seq_len=96, draft=DraftConfig(max_nodes=8, capacity_tokens=_CAPACITY_TOKENS)
    )
    engine = RolloutEngine(policy.config, policy.params, config=config)
    engine.warm_up()
    looks, every = [], max(_BATCH, requests // 10)
    for served in range(0, requests, _BATCH):
        sampling = [
            SamplingParams(max_tokens=8, ignore_eos=True, seed=served + number) for number in range(_BATCH)
        ]
        engine.generate(policy.prompts["math"], sampling)
        if (served + _BATCH) % every == 0:
            looks.append({"requests": served + _BATCH, "bytes": resident_bytes()})
    return {"looks": looks}


def _memory_cell(found: dict[str, Any]) -> dict[str, Any]:
    """Growth from a fifth of the requests on, when history and caches are full, to the last."""
    looks = [look["bytes"] for look in found["looks"]]
    if not looks or looks[0] is None:  # a system that doesn't say
        return found | {"goals": []}
    first = looks[min(1, len(looks) - 1)]
    growth = looks[-1] / first - 1
    requests = found["looks"][-1]["requests"]
    return found | {
        "growth": growth,
        "goals": [
            goal(f"growth of memory over {requests:,} requests", growth, MEMORY_GROWTH_GOAL, at_least=False)
        ],
    }


def start_up(slots: int, tiny: bool) -> dict[str, Any]:
    """Loading the model, then `warm_up` with nothing compiled before."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilations = CompileCounter()
    started = time.perf_counter()
    policy: Policy = untrained(TINY) if tiny else smollm2()
    loaded = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(policy, Path(scratch), lambda text: None)
        subject: Subject = bench.subject(slots, SPECULATIVE)
    return {
        "slots": slots,
        "load_s": loaded - started,
        "warm_up_s": time.perf_counter() - loaded,
        "step_shapes": subject.engine.stats().step_shapes,
        "compilations": compilations.count,
    }


if __name__ == "__main__":
    calls: dict[str, Callable[..., dict[str, Any]]] = {"memory": resident_memory, "start-up": start_up}
    print(json.dumps(calls[sys.argv[1]](**json.loads(sys.argv[2]))))

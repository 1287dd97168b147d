"""Part 2, the budget is right: what the engine decides by itself, against every fixed number of draft nodes.

All play the same requests from the same history, so their tokens are the same too. The best fixed number is chosen in
hindsight, by workload and slots. Prompts lie in the prefix cache, so that the figures are of decoding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.rollouts_changing import CHANGING
from benchmarks.rollouts_play import (
    MOST_FIXED_NODES,
    SPECULATIVE,
    Bench,
    Play,
    Subject,
    Work,
    identical,
    in_order,
    seeds,
    summary,
)
from benchmarks.rollouts_results import goal
from rollout_spec import DraftConfig, SamplingParams

TITLE = "The budget against every fixed number of nodes"
FIXED = (0, 1, 2, 3, 4, 6, 8, 12, 16, MOST_FIXED_NODES)
GOAL = 0.95
CHANGING_GOAL = 1.0
WORKLOADS = ("math, temperature 1", "math, temperature 0.6", "grounded, temperature 0")
SAMPLES = 8


@dataclasses.dataclass(frozen=True)
class Settings:
    """requests: by slots. Only fixed numbers within `contending` of the best in the first round play the others."""

    slots: tuple[int, ...] = (1, 8, 16)
    rounds: int = 3
    workloads: tuple[str, ...] = (*WORKLOADS, *CHANGING)
    fixed: tuple[int, ...] = FIXED
    requests: tuple[tuple[int, int], ...] = ((1, 4), (8, 8), (16, 16))
    max_tokens: int = 64
    contending: float = 0.88


FULL = Settings()
QUICK = Settings(
    slots=(1, 16),
    rounds=2,
    workloads=("math, temperature 0.6", "grounded, temperature 0"),
    fixed=(0, 2, 4, 8, 16),
    requests=((1, 2), (16, 16)),
    max_tokens=48,
)
SMOKE = Settings(slots=(1, 2), rounds=2, fixed=(0, 2), requests=((1, 1), (2, 3)), max_tokens=8)


@dataclasses.dataclass(frozen=True)
class Workload:
    """history: played before, by the drafting engine, to be what every subject knows."""

    works: list[Work]
    history: list[Work]


def measure(settings: Settings, bench: Bench, save: Callable[[str, dict[str, Any]], None]) -> None:
    """A cell for each workload and number of slots; one each for the batches that change."""
    for slots in settings.slots:
        for name in (name for name in WORKLOADS if name in settings.workloads):
            requests = dict(settings.requests).get(slots, slots)
            workload = steady(bench, name, requests, settings.max_tokens)
            save(
                f"{name}, {slots} slots", compare(settings, bench, workload, slots, GOAL) | {"workload": name}
            )
    for name in (name for name in CHANGING if name in settings.workloads):
        slots, works, history = CHANGING[name](bench.policy, settings.max_tokens)
        if slots in settings.slots:
            workload = Workload(works, history)
            cell = compare(settings, bench, workload, slots, CHANGING_GOAL)
            save(f"{name}, {slots} slots", cell | {"workload": name})


def steady(bench: Bench, name: str, requests: int, max_tokens: int) -> Workload:
    """Math: a second epoch with new seeds, half as many prompts as requests. Grounded: with nothing known before."""
    kind, _, temperature = name.partition(", temperature ")
    sampling = SamplingParams(temperature=float(temperature), max_tokens=max_tokens)
    if kind == "grounded":
        prompts = bench.policy.prompts["grounded"] + bench.policy.prompts["grounded, again"]
        chosen = prompts[: min(requests, len(prompts))]
        return Workload([Work(prompt, sampling, ("grounded", i)) for i, prompt in enumerate(chosen)], [])
    prompts = bench.policy.prompts["math"]
    number_of_prompts = max(1, min(requests // 2, len(prompts)))
    numbers = seeds(4)
    first, second = (
        [
            Work(prompts[index], dataclasses.replace(sampling, seed=next(numbers)), ("math", index))
            for index in (number % number_of_prompts for number in range(count))
        ]
        for count in (SAMPLES * number_of_prompts, requests)
    )
    return Workload(second, first)


def compare(
    settings: Settings, bench: Bench, workload: Workload, slots: int, wanted: float
) -> dict[str, Any]:
    """The drafting engine as it is by default and those with fixed numbers, in turns from one history."""
    ours = bench.subject(slots, SPECULATIVE)
    fixed = {nodes: _fixed(bench, slots, nodes) for nodes in settings.fixed}
    history = _history(bench, ours, workload)
    everyone: dict[str, Subject] = {"ours": ours} | {str(nodes): one for nodes, one in fixed.items()}
    for subject in everyone.values():
        subject.prime(workload.works)
    played: dict[str, list[Play]] = {name: [] for name in everyone}
    contenders = list(everyone)
    for number in range(settings.rounds):
        for name in in_order(contenders, number):
            played[name].append(everyone[name].play_compiled(workload.works, history))
        if number == 0:
            speeds = {name: plays[0].tokens_per_s for name, plays in played.items()}
            least = settings.contending * max(speed for name, speed in speeds.items() if name != "ours")
            contenders = [name for name in everyone if name == "ours" or speeds[name] >= least]
    summaries = {name: summary(plays) for name, plays in played.items()}
    best = max((name for name in contenders if name != "ours"), key=lambda n: summaries[n]["tokens_per_s"])
    ratio = summaries["ours"]["tokens_per_s"] / summaries[best]["tokens_per_s"]
    firsts = {name: plays[:1] for name, plays in played.items()}
    return {
        "slots": slots,
        "subjects": summaries,
        "best_fixed": int(best),
        "same": identical(firsts),
        "goals": [goal("ours / best fixed number", ratio, wanted)],
    }


def _fixed(bench: Bench, slots: int, nodes: int) -> Subject:
    """The plain engine for 0. Sizes that it needs are compiled in plays that aren't counted."""
    if nodes == 0:
        return bench.subject(slots, DraftConfig(kind="none"))
    return bench.subject(slots, DraftConfig(gate=False, max_nodes=nodes), warm_up=False)


def _history(bench: Bench, ours: Subject, workload: Workload) -> Path | None:
    if not workload.history:
        return None
    ours.forget()
    ours.play(workload.history)
    path = bench.scratch / "history"
    ours.engine.save_history(path)
    return path

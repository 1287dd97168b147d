"""Part 5, grounded work: rewriting, editing and summarising a given text, so that answers repeat the prompt.

Nothing is carried over from one play to the next: the prefix cache is off and the history emptied before each, at one
slot before each prompt. So only the prompt and the output so far are drafted from, and times hold the prompt too.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.rollouts_play import Bench, Play, Subject, Work, identical, in_order, seeds
from benchmarks.rollouts_results import goal
from rollout_spec import SamplingParams

TITLE = "Grounded work: rewrite, edit, summarise"
GREEDY_GOALS = {1: 1.9, 8: 1.2}
"""Speculative / plain at temperature 0, by slots."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """prompts: how many of the seven."""

    slots: tuple[int, ...] = (1, 8)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    rounds: int = 5
    max_tokens: int = 128
    prompts: int = 7


FULL = Settings()
QUICK = Settings(rounds=2)
SMOKE = Settings(slots=(1, 2), rounds=1, max_tokens=8, prompts=2)


def measure(settings: Settings, bench: Bench, save: Callable[[str, dict[str, Any]], None]) -> None:
    """A cell for each number of slots and temperature."""
    for slots in settings.slots:
        pair = bench.pair(slots, prefix_cache=False)
        for temperature in settings.temperatures:
            save(
                f"temperature {temperature:g}, {slots} slots",
                _measure(settings, bench, pair, slots, temperature),
            )


def _measure(
    settings: Settings, bench: Bench, pair: dict[str, Subject], slots: int, temperature: float
) -> dict[str, Any]:
    prompts = bench.policy.prompts["grounded"][: settings.prompts]
    numbers = seeds(7)
    played: dict[str, list[list[Play]]] = {name: [] for name in pair}
    for number in range(settings.rounds):
        works = [
            Work(
                prompt,
                SamplingParams(temperature=temperature, max_tokens=settings.max_tokens, seed=next(numbers)),
                ("grounded", index),
            )
            for index, prompt in enumerate(prompts)
        ]
        batches = [[work] for work in works] if slots == 1 else [works]
        for name in in_order(list(pair), number):
            plays = []
            for batch in batches:
                pair[name].forget()
                plays.append(pair[name].play(batch))
            played[name].append(plays)
    figures = {name: _figures(rounds) for name, rounds in played.items()}
    ratio = statistics.median(
        one / other
        for one, other in zip(
            figures["speculative"]["tokens_per_s_of_rounds"],
            figures["plain"]["tokens_per_s_of_rounds"],
            strict=True,
        )
    )
    wanted = GREEDY_GOALS.get(slots) if temperature == 0 else None
    flat = {name: [play for plays in rounds for play in plays] for name, rounds in played.items()}
    return {
        "temperature": temperature,
        "slots": slots,
        "subjects": figures,
        "ratio": ratio,
        "same": identical(flat),
        "goals": [] if wanted is None else [goal("speculative / plain", ratio, wanted)],
    }


def _figures(rounds: list[list[Play]]) -> dict[str, Any]:
    """A round's speed is of all its prompts together."""
    speeds = [sum(p.num_tokens for p in plays) / sum(p.seconds for p in plays) for plays in rounds]
    stats = [play.stats for plays in rounds for play in plays]
    steps = sum(one.decode_steps for one in stats)
    return {
        "tokens_per_s": statistics.median(speeds),
        "tokens_per_s_of_rounds": speeds,
        "acceptance_length": sum(one.generated_tokens for one in stats) / steps,
        "nodes_per_step": sum(one.drafted for one in stats) / steps,
        "host_share": statistics.median(one.host_share for one in stats),
    }

"""Part 3, RL rollouts: math prompts with 8 samples each, twice over, as two epochs of training ask for them.

The weights are "updated" to themselves between the epochs: the least drift there can be. At one slot a prompt's samples
are a play; the speculative and the plain engine take turns prompt by prompt, or batch by batch.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.rollouts_play import Bench, Play, Subject, Work, identical, in_order, seeds
from benchmarks.rollouts_results import goal
from rollout_spec import SamplingParams
from rollout_spec.stats import EngineStats

TITLE = "RL rollouts of SmolLM2 on math prompts"
EPOCHS = (1, 2)
NOWHERE_BELOW = 0.98
GOALS_AT_ONE_SLOT = {1.0: 1.05, 0.6: 1.45}
"""By temperature, in epoch 2."""
BINS = 60
"""Of a timeline."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """prompts: by slots. samples: of each. rounds: each of new prompts, with an empty history."""

    slots: tuple[int, ...] = (1, 8, 16)
    temperatures: tuple[float, ...] = (1.0, 0.6)
    rounds: int = 2
    samples: int = 8
    max_tokens: int = 128
    prompts: tuple[tuple[int, int], ...] = ((1, 2), (8, 4), (16, 8))


FULL = Settings()
QUICK = Settings(slots=(1, 16), rounds=1, max_tokens=64, prompts=((1, 1), (16, 4)))
SMOKE = Settings(slots=(1, 2), rounds=1, samples=3, max_tokens=8, prompts=((1, 1), (2, 1)))

Epochs = dict[int, list[Play]]
"""Plays by epoch, in the order of rounds and, at one slot, of prompts."""


def measure(settings: Settings, bench: Bench, save: Callable[[str, dict[str, Any]], None]) -> None:
    """A cell for each number of slots and temperature."""
    for slots in settings.slots:
        pair = bench.pair(slots)
        for temperature in settings.temperatures:
            cell = _measure(settings, bench, pair, slots, temperature)
            save(f"temperature {temperature:g}, {slots} slots", cell)


def _measure(
    settings: Settings, bench: Bench, pair: dict[str, Subject], slots: int, temperature: float
) -> dict[str, Any]:
    prompts = bench.policy.prompts["math"]
    count = dict(settings.prompts).get(slots, slots)
    numbers = seeds(3)
    played: dict[str, Epochs] = {name: {epoch: [] for epoch in EPOCHS} for name in pair}
    turn = 0
    for number in range(settings.rounds):
        for subject in pair.values():
            subject.forget()
        chosen = [(number * count + index) % len(prompts) for index in range(count)]
        for epoch in EPOCHS:
            for subject in pair.values():
                subject.new_weights()
            works = [
                Work(
                    prompts[index],
                    SamplingParams(
                        temperature=temperature,
                        max_tokens=settings.max_tokens,
                        n=settings.samples,
                        seed=next(numbers),
                    ),
                    ("math", index),
                )
                for index in chosen
            ]
            for batch in [[work] for work in works] if slots == 1 else [works]:
                for name in in_order(list(pair), turn):
                    played[name][epoch].append(pair[name].play(batch, trace=True))
                turn += 1
    return _cell(played, slots, temperature)


def _cell(played: dict[str, Epochs], slots: int, temperature: float) -> dict[str, Any]:
    last = EPOCHS[-1]
    cell: dict[str, Any] = {"temperature": temperature, "slots": slots, "epochs": {}, "goals": []}
    for epoch in EPOCHS:
        plays = {name: epochs[epoch] for name, epochs in played.items()}
        figures = {name: _figures(list(those), slots) for name, those in plays.items()}
        ratio = figures["speculative"]["tokens_per_s"] / figures["plain"]["tokens_per_s"]
        cell["epochs"][str(epoch)] = {"subjects": figures, "ratio": ratio, "same": identical(plays)}
        wanted = GOALS_AT_ONE_SLOT.get(temperature) if slots == 1 and epoch == last else None
        cell["goals"].append(
            goal(f"epoch {epoch}, speculative / plain", ratio, NOWHERE_BELOW if wanted is None else wanted)
        )
        tails = {name: figures[name]["tail"]["tokens_per_s"] for name in figures}
        if all(tails.values()):
            tail = tails["speculative"] / tails["plain"]
            cell["epochs"][str(epoch)]["tail_ratio"] = tail
            cell["goals"].append(goal(f"epoch {epoch}, tail, speculative / plain", tail, NOWHERE_BELOW))
    stats = [play.stats for play in played["speculative"][last]]
    cell["by_depth"] = by_depth(stats)
    cell["timelines"] = {name: timeline(epochs[last][-1]) for name, epochs in played.items()}
    return cell


def _figures(plays: Sequence[Play], slots: int) -> dict[str, Any]:
    """Over all plays of an epoch, so that longer completions count for more; and of their tails."""
    steps = sum(play.stats.decode_steps for play in plays)
    tails = [play.tail(slots) for play in plays] if slots > 1 else []
    tail_tokens, tail_s = (sum(tail[index] for tail in tails) for index in (0, 1))
    return {
        "tokens_per_s": sum(play.num_tokens for play in plays) / sum(play.seconds for play in plays),
        "tokens_per_s_of_plays": [play.tokens_per_s for play in plays],
        "tokens": sum(play.num_tokens for play in plays),
        "acceptance_length": sum(play.stats.generated_tokens for play in plays) / steps,
        "nodes_per_step": sum(play.stats.drafted for play in plays) / steps,
        "host_share": statistics.median(play.stats.host_share for play in plays),
        "steps_without_drafts": sum((play.stats.steps_without_drafts for play in plays), Counter()),
        "estimated_speedup": statistics.median(play.stats.estimated_speedup for play in plays),
        "prediction_error": statistics.median(play.stats.prediction_error for play in plays),
        "tail": {"tokens": tail_tokens, "tokens_per_s": tail_tokens / tail_s if tail_s else None},
    }


def by_depth(stats: Sequence[EngineStats]) -> dict[str, list[int]]:
    """Nodes drafted and accepted 1, 2, 3, ... tokens below the root."""
    return {
        name: [sum(depth) for depth in itertools.zip_longest(*rows, fillvalue=0)]
        for name, rows in (
            ("drafted_by_depth", [one.drafted_by_depth for one in stats]),
            ("accepted_by_depth", [one.accepted_by_depth for one in stats]),
        )
    }


def timeline(play: Play, bins: int = BINS) -> dict[str, list[float]]:
    """How a batch drained: seconds, sequences, nodes a sequence and step, tokens/s, in intervals of equal length."""
    end = play.steps[-1].end_s
    rows: dict[str, list[float]] = {name: [] for name in ("seconds", "sequences", "nodes", "tokens_per_s")}
    edges = [end * number / bins for number in range(1, bins + 1)]
    steps, begun = list(play.steps), 0.0
    for edge in edges:
        inside = [step for step in steps if begun < step.end_s <= edge]
        if not inside:
            continue  # steps longer than an interval
        sequences = sum(step.sequences for step in inside)
        rows["seconds"].append(round(edge, 3))
        rows["sequences"].append(round(sequences / len(inside), 2))
        rows["nodes"].append(round(sum(step.drafted for step in inside) / max(1, sequences), 2))
        rows["tokens_per_s"].append(
            round(sum(step.tokens for step in inside) / (inside[-1].end_s - begun), 1)
        )
        begun = inside[-1].end_s
    return rows

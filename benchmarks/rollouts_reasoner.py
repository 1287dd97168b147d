"""Part 4, RL rollouts of a policy that reasons: GRPO on worked arithmetic (examples/reasoner).

    python -m benchmarks.rollouts --parts 4

Every epoch samples 8 solutions to each of the same problems, on the plain and on the speculative engine in turns, and
ends with an optimizer step whose weights both get. Rounds begin anew, with the checkpoint and an empty history.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.rollouts_play import PLAIN, Bench, Play, Policy, Subject, identical, in_order, seeds, summary
from benchmarks.rollouts_results import goal
from examples.grpo import completions, timed_generate
from examples.reasoner.alphabet import encode, make_tokenizer
from examples.reasoner.grpo import FULL as EXAMPLE
from examples.reasoner.grpo import MAX_SEQ_LEN, PROBLEMS_SEED, make_optimizer, row_lengths
from examples.reasoner.model import CHECKPOINT
from examples.reasoner.tasks import Problem, problems
from examples.trainer import Objective, Trainer
from rollout_spec import DraftConfig, RolloutOutput, SamplingParams
from rollout_spec.loading import load_model

TITLE = "RL rollouts of a policy that reasons"
GOALS = {1: 2.5, 8: 2.0, 16: 1.5}
"""Speculative over plain from the second epoch on, by slots."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """problems: by slots. max_nodes, gate: of the speculative engine. warm_up: compile all sizes of step beforehand."""

    slots: tuple[int, ...] = (1, 8, 16)
    problems: tuple[tuple[int, int], ...] = ((1, 8), (8, 16), (16, 32))
    rounds: int = 3
    epochs: int = 4
    samples: int = 8
    max_nodes: int = 32
    gate: bool = True
    warm_up: bool = True


FULL = Settings()
QUICK = Settings(problems=((1, 4), (8, 8), (16, 16)), rounds=1, epochs=3)
SMOKE = Settings(
    slots=(2,), problems=((2, 1),), rounds=1, epochs=2, samples=2, max_nodes=4, gate=False, warm_up=False
)

Played = dict[str, list[list[Play]]]
"""By subject, epoch and round."""


def measure(settings: Settings, bench: Bench, save: Callable[[str, dict[str, Any]], None]) -> None:
    """A cell for each number of slots."""
    for slots in settings.slots:
        tasks = problems(dict(settings.problems).get(slots, slots), PROBLEMS_SEED)
        policy = reasoner(tasks)
        drafts = {
            "plain": PLAIN,
            "speculative": DraftConfig(max_nodes=settings.max_nodes, gate=settings.gate),
        }
        pair = {
            name: bench.subject(slots, draft, policy=policy, warm_up=settings.warm_up)
            for name, draft in drafts.items()
        }
        played: Played = {name: [[] for _ in range(settings.epochs)] for name in pair}
        rewards: list[list[float]] = [[] for _ in range(settings.epochs)]
        for number in range(settings.rounds):
            play_round(settings, pair, policy, tasks, number, played, rewards)
        save(f"{slots} slots", make_cell(played, rewards, slots, len(tasks)))


def reasoner(tasks: Sequence[Problem]) -> Policy:
    """The checkpoint in float32."""
    model = load_model(CHECKPOINT)
    prompts = {"arithmetic": [encode(task.prompt) for task in tasks]}
    return Policy("reasoner", model.config, model.params, prompts, MAX_SEQ_LEN)


def play_round(
    settings: Settings,
    pair: dict[str, Subject],
    policy: Policy,
    tasks: Sequence[Problem],
    number: int,
    played: Played,
    rewards: list[list[float]],
) -> None:
    """All epochs, from the checkpoint on; appends the plays, and the mean reward of each epoch."""
    objective = Objective(policy.config, EXAMPLE.temperature)
    trainer = Trainer(policy.params, objective, make_optimizer(EXAMPLE), rows=EXAMPLE.train_rows)
    for subject in pair.values():
        subject.engine.update_weights(policy.params)
        subject.forget()
    tokenizer = make_tokenizer()
    numbers = seeds(40 + number)
    for epoch in range(settings.epochs):
        sampling = [
            SamplingParams(n=settings.samples, max_tokens=EXAMPLE.max_tokens, seed=next(numbers))
            for _ in tasks
        ]
        outputs: list[RolloutOutput] = []
        for name in in_order(list(pair), number + epoch):
            outputs, play = generate(pair[name], policy.prompts["arithmetic"], sampling)
            played[name][epoch].append(play)
        earned = [
            [
                task.reward(tokenizer.decode(completion.token_ids.tolist()))
                for completion in output.completions
            ]
            for task, output in zip(tasks, outputs, strict=True)
        ]
        rewards[epoch].append(float(np.mean(earned)))
        trainer.update(outputs, earned, row_lengths(EXAMPLE.max_tokens))
        for subject in pair.values():
            subject.engine.update_weights(trainer.params)


def generate(
    subject: Subject, prompts: list[list[int]], sampling: list[SamplingParams]
) -> tuple[list[RolloutOutput], Play]:
    """The outputs, for the trainer, and what they took."""
    subject.engine.reset_stats()
    outputs, seconds = timed_generate(subject.engine, prompts, sampling)
    tokens = [completion.token_ids.tolist() for completion in completions(outputs)]
    return outputs, Play(seconds, tokens, subject.engine.stats())


def make_cell(played: Played, rewards: list[list[float]], slots: int, num_problems: int) -> dict[str, Any]:
    """Figures by epoch, and of all epochs but the first together."""
    cell: dict[str, Any] = {"slots": slots, "problems": num_problems, "epochs": {}}
    for epoch, reward in enumerate(rewards):
        plays = {name: epochs[epoch] for name, epochs in played.items()}
        subjects = {name: summary(those) for name, those in plays.items()}
        cell["epochs"][str(epoch + 1)] = {
            "subjects": subjects,
            "ratio": speed_up([plays]),
            "same": identical(plays),
            "mean_reward": statistics.mean(reward),
        }
    later = [{name: epochs[epoch] for name, epochs in played.items()} for epoch in range(1, len(rewards))]
    wanted = GOALS.get(slots)
    ratio = speed_up(later)
    cell["ratio"] = ratio
    name = "from epoch 2 on, speculative / plain"
    cell["goals"] = [] if wanted is None else [goal(name, ratio, wanted)]
    return cell


def speed_up(epochs: Sequence[dict[str, list[Play]]]) -> float:
    """Plain seconds over speculative ones of these epochs together, median over the rounds."""
    seconds = {
        name: [
            sum(rounds) for rounds in zip(*([p.seconds for p in one[name]] for one in epochs), strict=True)
        ]
        for name in ("plain", "speculative")
    }
    return statistics.median(
        plain / speculative for plain, speculative in zip(*seconds.values(), strict=True)
    )

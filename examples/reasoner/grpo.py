"""GRPO on a small policy that works out arithmetic step by step, with drafting on and off side by side.

    python -m examples.reasoner [--quick] [--help]

The policy writes long additions and multiplications, 156 or 223 characters each, and gets about 60% of the answers
right. Every step of training samples 8 solutions to each of 16 problems, rewards those with the right answer and
hands the new weights to the engine; every epoch goes over the same problems. A second engine with drafting off
repeats every rollout with the same prompts and seeds: its tokens must be the same.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
import optax
from rich.console import Console

from examples import grpo
from examples.reasoner.model import CHECKPOINT
from examples.reasoner.tasks import KINDS, Problem, problems
from examples.report import print_table, save_json, save_plot
from rollout_spec import DraftConfig, EngineConfig, RolloutEngine, SamplingParams

FULL = grpo.Settings(
    epochs=8,
    prompts=48,
    prompts_per_step=16,
    max_tokens=240,
    temperature=1.0,
    learning_rate=3e-4,
    train_rows=16,
    max_nodes=32,
)
QUICK = dataclasses.replace(
    FULL, epochs=2, prompts=2, prompts_per_step=2, group_size=2, train_rows=2, max_seqs=4, max_nodes=8
)
PROBLEMS_SEED = 100
HELD_OUT_SEED = 101
MAX_SEQ_LEN = 320


def row_lengths(max_tokens: int) -> tuple[int, ...]:
    """What the trainer's rows are padded to: a whole solution of either kind, or the longest text there can be."""
    prompts = {problem.kind: problem for problem in problems(len(KINDS), PROBLEMS_SEED)}
    whole = [len(problem.prompt) + len(problem.solution()) + 1 for problem in prompts.values()]
    longest = max(len(problem.prompt) for problem in prompts.values()) + max_tokens
    return tuple(sorted({*whole, longest}))


def make_optimizer(settings: grpo.Settings) -> optax.GradientTransformation:
    """AdamW, its rate falling to a tenth over the run: the fewer mistakes are left, the noisier is their gradient."""
    steps = settings.epochs * -(-settings.prompts // settings.prompts_per_step)
    rate = optax.linear_schedule(settings.learning_rate, 0.1 * settings.learning_rate, steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.99, weight_decay=0.0))


def pass_rate(
    engine: RolloutEngine, tasks: Sequence[Problem], settings: grpo.Settings, *, seed: int
) -> float:
    """Share of right answers among `group_size` solutions to each problem, at the temperature of the training."""
    sampling = [
        SamplingParams(
            n=settings.group_size,
            temperature=settings.temperature,
            max_tokens=settings.max_tokens,
            seed=seed + index,
        )
        for index in range(len(tasks))
    ]
    outputs = engine.generate([task.prompt for task in tasks], sampling)
    rewards = [
        task.reward(completion.text or "")
        for task, output in zip(tasks, outputs, strict=True)
        for completion in output.completions
    ]
    return float(np.mean(rewards))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the training; returns 1 if drafting changed a token, which it never may."""
    started = time.perf_counter()
    settings, output = grpo.parse_arguments(arguments, description=__doc__, full=FULL, quick=QUICK)
    console = Console()
    config = EngineConfig(
        max_seqs=settings.max_seqs,
        max_seq_len=MAX_SEQ_LEN,
        draft=DraftConfig(max_nodes=settings.max_nodes),
    )
    tasks = {
        "training": problems(settings.prompts, PROBLEMS_SEED),
        "held-out": problems(settings.prompts, HELD_OUT_SEED),
    }
    rates: dict[str, dict[str, float]] = {name: {} for name in tasks}

    def examine(engine: RolloutEngine, when: str) -> None:
        for number, (name, some) in enumerate(tasks.items(), start=1):
            rates[name][when] = pass_rate(engine, some, settings, seed=settings.seed + number * 1_000_000)

    plain = dataclasses.replace(config, draft=DraftConfig(kind="none"))
    with RolloutEngine.from_pretrained(CHECKPOINT, plain) as examiner:
        examine(examiner, "before")
        with RolloutEngine.from_pretrained(CHECKPOINT, config) as engine:
            records = grpo.train(
                engine,
                tasks["training"],
                settings,
                console,
                stop=(),
                lengths=row_lengths(settings.max_tokens),
                optimizer=make_optimizer(settings),
            )
            examiner.update_weights(engine.params)
        examine(examiner, "after")

    print_table(records, console)
    for name, rate in rates.items():
        console.print(f"Right answers to {name} problems: {rate['before']:.1%}, then {rate['after']:.1%}")
    save_plot(records, output / "reasoner.png")
    save_json(records, {**dataclasses.asdict(settings), "pass_rates": rates}, output / "reasoner.json")
    console.print(
        f"Plot: {output / 'reasoner.png'}   numbers: {output / 'reasoner.json'}   "
        f"total: {time.perf_counter() - started:.0f} s",
        highlight=False,
    )
    return 0 if all(record.tokens_identical for record in records) else 1

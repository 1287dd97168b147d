"""GRPO with a pool of engines on Ray and a trainer, synchronous or one step off policy.

    python -m examples.grpo_ray [--off-policy] [--quick] [--help]

The policy is that of examples/reasoner. In the synchronous loop the engines wait while the trainer works. One step off
policy, the next step's rollouts run meanwhile, and new weights are swapped in between their tokens: a completion then
has tokens of several weight versions. The importance ratio of each token is taken against the log-probability that the
weights of its own version gave it, and tokens older than --max-lag versions are left out of the loss.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from examples.grpo import Settings, Task, schedule
from examples.reasoner.grpo import FULL, MAX_SEQ_LEN, PROBLEMS_SEED, QUICK, make_optimizer, row_lengths
from examples.reasoner.model import CHECKPOINT
from examples.reasoner.tasks import problems
from examples.trainer import Objective, Trainer
from rollout_spec import DraftConfig, EngineConfig, RolloutOutput, RolloutPool, SamplingParams
from rollout_spec.loading import load_model
from rollout_spec.pool.requests import PoolRequest


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One step. lag: mean weight updates between a token and the step that learns from it. mixed: share of completions
    with tokens of several versions. wait_s: the trainer's wait for rollouts."""

    step: int
    mean_reward: float
    tokens: int
    lag: float
    mixed: float
    wait_s: float
    train_s: float
    update_s: float


def begin(pool: RolloutPool, batch: Sequence[Task], settings: Settings, step: int) -> list[PoolRequest]:
    """Submits a step's prompts."""
    return [
        pool.submit(
            problem.prompt,
            SamplingParams(
                n=settings.group_size,
                temperature=settings.temperature,
                max_tokens=settings.max_tokens,
                seed=settings.seed + step * len(batch) + index,
            ),
        )
        for index, problem in enumerate(batch)
    ]


def train(
    pool: RolloutPool,
    trainer: Trainer,
    settings: Settings,
    console: Console,
    *,
    off_policy: bool,
    max_lag: int,
) -> list[StepRecord]:
    """The loop. `pool` serves the trained weights afterwards."""
    steps = [batch for _, batch in schedule(problems(settings.prompts, PROBLEMS_SEED), settings)]
    lengths = row_lengths(settings.max_tokens)
    records = []
    started = time.perf_counter()
    requests = begin(pool, steps[0], settings, 0)
    for step, batch in enumerate(steps):
        waiting = time.perf_counter()
        outputs = [request.result() for request in requests]
        waited_s = time.perf_counter() - waiting
        following = step + 1
        if off_policy and following < len(steps):
            requests = begin(pool, steps[following], settings, following)
        rewards = [
            [problem.reward(completion.text or "") for completion in output.completions]
            for problem, output in zip(batch, outputs, strict=True)
        ]
        training = time.perf_counter()
        version = pool.weight_version
        trainer.update(outputs, rewards, lengths, oldest_version=version - max_lag)
        updating = time.perf_counter()
        pool.update_weights(trainer.params, mode="inflight" if off_policy else "drain", overlap=off_policy)
        updated = time.perf_counter()
        if not off_policy and following < len(steps):
            requests = begin(pool, steps[following], settings, following)
        records.append(
            StepRecord(
                step=step,
                mean_reward=float(np.mean(rewards)),
                tokens=sum(len(versions) for versions in versions_of(outputs)),
                lag=version - float(np.mean(np.concatenate(versions_of(outputs)))),
                mixed=float(np.mean([len(set(versions.tolist())) > 1 for versions in versions_of(outputs)])),
                wait_s=waited_s,
                train_s=updating - training,
                update_s=updated - updating,
            )
        )
        one = records[-1]
        console.print(
            f"step {step}: reward {one.mean_reward:.3f}, {one.tokens} tokens, lag {one.lag:.2f}, "
            f"waited {one.wait_s:.1f} s, trained {one.train_s:.1f} s, update {one.update_s:.2f} s",
            highlight=False,
        )
    console.print(f"{len(steps)} steps in {time.perf_counter() - started:.1f} s")
    return records


def versions_of(outputs: Sequence[RolloutOutput]) -> list[np.ndarray]:
    """int32[T] weight versions of every completion's tokens."""
    return [completion.weight_versions for output in outputs for completion in output.completions]


def print_table(records: Sequence[StepRecord], console: Console) -> None:
    """One row a step."""
    table = Table(*[field.name for field in dataclasses.fields(StepRecord)])
    for record in records:
        table.add_row(*[f"{value:.3g}" for value in dataclasses.asdict(record).values()])
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--off-policy", action="store_true", help="generate the next step's rollouts meanwhile"
    )
    parser.add_argument("--quick", action="store_true", help="two small steps, to see that it runs")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument(
        "--max-lag", type=int, default=2, help="oldest tokens to learn from, in weight versions"
    )
    parser.add_argument("--steps", type=int, default=None, help="stop after so many")
    parser.add_argument("--output", type=Path, default=Path("outputs"))
    options = parser.parse_args(arguments)
    settings = dataclasses.replace(QUICK if options.quick else FULL, steps=options.steps)
    console = Console()
    model = load_model(CHECKPOINT)
    config = EngineConfig(
        max_seqs=settings.max_seqs, max_seq_len=MAX_SEQ_LEN, draft=DraftConfig(max_nodes=settings.max_nodes)
    )
    trainer = Trainer(
        model.params,
        Objective(model.config, settings.temperature),
        make_optimizer(settings),
        rows=settings.train_rows,
    )
    with RolloutPool(
        (model.config, model.params), config, options.engines, tokenizer=model.tokenizer
    ) as pool:
        records = train(
            pool, trainer, settings, console, off_policy=options.off_policy, max_lag=options.max_lag
        )
        stats = pool.stats()
    print_table(records, console)
    console.print(
        f"tokens a step {stats.acceptance_length:.2f}, engines lost {stats.engines_lost}", highlight=False
    )
    options.output.mkdir(parents=True, exist_ok=True)
    content = {
        "settings": dataclasses.asdict(settings),
        "steps": [dataclasses.asdict(one) for one in records],
    }
    (options.output / "grpo_ray.json").write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The pool's scheduler on a simulated cluster: real scheduling code, simulated clock and engines.

    python -m benchmarks.pool_sim [--engines 256] [--output FOLDER]

Lengths are log-normal with a long tail, cut at --max-tokens, and alike within a group. A step of an engine with b
samples takes base + b * per_sample seconds and gives each a token; a prompt costs prefill seconds a token. The lower
bound is the larger of: all work at the best rate of all engines, and the longest completion alone on one engine.
The scheduler doesn't know lengths; in the second epoch it has seen each prompt once, with other lengths.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from rollout_spec.pool.lengths import LengthHistory
from rollout_spec.pool.scheduling import Scheduler, Work


@dataclass(frozen=True)
class Cluster:
    """Engines and the time they take, in seconds."""

    engines: int = 256
    slots: int = 32
    base_s: float = 0.010
    per_sample_s: float = 0.0001
    prefill_s: float = 0.000_02

    def step_s(self, samples: int) -> float:
        return self.base_s + self.per_sample_s * samples


@dataclass(frozen=True)
class Sample:
    """What a sample will be, which the scheduler doesn't know. group: index of its prompt."""

    group: int
    prompt_tokens: int
    tokens: int


def long_tailed(
    generator: np.random.Generator, groups: int, size: int, median: float, sigma: float, max_tokens: int
) -> list[Sample]:
    """Samples of groups: the group's own scale, and its samples around it, both log-normal."""
    samples = []
    for group in range(groups):
        scale = median * np.exp(sigma * generator.standard_normal())
        prompt = int(generator.integers(100, 600))
        for _ in range(size):
            tokens = int(np.clip(scale * np.exp(0.4 * generator.standard_normal()), 8, max_tokens))
            samples.append(Sample(group, prompt, tokens))
    return samples


@dataclass(frozen=True)
class Outcome:
    """batch_s: until the last sample ended. utilisation: work done over what the engines could have done. moved:
    samples that ended on another engine than they began on."""

    batch_s: float
    utilisation: float
    moved: int = 0


class _Engine:
    """Runs samples in steps; between two events all of them advance by the same number of tokens."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.queue: list[tuple[int, int]] = []  # sample and tokens it has
        self.running: dict[int, int] = {}
        self.now = 0.0
        self.version = 0

    def admit(self, samples: Sequence[Sample]) -> None:
        while self.queue and len(self.running) < self.cluster.slots:
            index, done = self.queue.pop(0)
            self.running[index] = done
            self.now += self.cluster.prefill_s * (samples[index].prompt_tokens + done)

    def advance(self, until: float) -> None:
        if self.running:
            steps = int(max(0.0, until - self.now) / self.cluster.step_s(len(self.running)) + 1e-6)
            for index in self.running:
                self.running[index] += steps
            self.now += steps * self.cluster.step_s(len(self.running))
        self.now = max(self.now, until) if not self.running else self.now

    def next_end(self, samples: Sequence[Sample]) -> float:
        left = min(samples[index].tokens - done for index, done in self.running.items())
        return self.now + max(left, 0) * self.cluster.step_s(len(self.running))


def simulate(
    cluster: Cluster,
    samples: Sequence[Sample],
    max_tokens: int,
    lengths: LengthHistory,
    *,
    moving: bool = True,
) -> Outcome:
    """Plays the samples through the pool's Scheduler."""
    scheduler = Scheduler(moving=moving)
    engines = [_Engine(cluster) for _ in range(cluster.engines)]
    for number in range(cluster.engines):
        scheduler.add_engine(number, cluster.slots)

    def work(index: int, done: int) -> Work:
        one = samples[index]
        expected = lengths.expected(one.group, max_tokens)
        return Work(
            index,
            one.group,
            one.prompt_tokens,
            max_tokens,
            expected,
            done,
            known=lengths.knows(one.group),
        )

    for index in range(len(samples)):
        scheduler.add(work(index, 0))
    events: list[tuple[float, int, int]] = []
    now, moved, unfinished, last_moves = 0.0, 0, len(samples), -1.0

    def plan(number: int) -> None:
        engine = engines[number]
        engine.admit(samples)
        engine.version += 1
        if engine.running:
            heapq.heappush(events, (engine.next_end(samples), number, engine.version))

    def dispatch(touched: set[int]) -> None:
        nonlocal moved, last_moves
        for number, given in scheduler.assign():
            _catch_up(engines[number], now)
            engines[number].queue.append((int(given.key), 0))  # type: ignore[call-overload]
            touched.add(number)
        if now >= last_moves + 0.2:
            last_moves = now
            for engine in engines:
                for index, done in engine.running.items():
                    scheduler.progress(index, done)
            for engine, load in zip(engines, scheduler.engines.values(), strict=True):
                load.tokens_per_s = 1 / cluster.step_s(len(engine.running)) if engine.running else 0.0
            scheduler.hold()
            for move in scheduler.moves():
                index = int(move.key)  # type: ignore[call-overload]
                source, target = engines[move.source], engines[move.target]
                _catch_up(source, now)
                _catch_up(target, now)
                touched |= {move.source, move.target}
                if index in source.running:
                    done = source.running.pop(index)
                else:
                    done = dict(source.queue)[index]
                    source.queue = [entry for entry in source.queue if entry[0] != index]
                old = scheduler.discard(index)
                assert old is not None
                new = work(index, done)
                new.moves = old.moves
                assert scheduler.place(new, move.target)
                target.queue.append((index, done))
                moved += 1
        for number in touched:
            plan(number)

    dispatch(set())
    while unfinished:
        now, number, version = heapq.heappop(events)
        engine = engines[number]
        if version != engine.version:
            continue
        _catch_up(engine, now)
        for index in [index for index, done in engine.running.items() if done >= samples[index].tokens]:
            del engine.running[index]
            scheduler.discard(index)
            lengths.record(samples[index].group, samples[index].tokens)
            scheduler.expect(samples[index].group, lengths.expected(samples[index].group, max_tokens))
            unfinished -= 1
        dispatch({number})
    return Outcome(now, _utilisation(cluster, samples, now), moved)


def _catch_up(engine: _Engine, now: float) -> None:
    engine.advance(now)


def round_robin(cluster: Cluster, samples: Sequence[Sample]) -> Outcome:
    """Groups dealt out to the engines in turn, each engine on its own."""
    last = 0.0
    for number in range(cluster.engines):
        engine = _Engine(cluster)
        engine.queue = [
            (index, 0) for index, one in enumerate(samples) if one.group % cluster.engines == number
        ]
        while engine.queue or engine.running:
            engine.admit(samples)
            engine.advance(engine.next_end(samples) + 1e-9)
            for index in [index for index, done in engine.running.items() if done >= samples[index].tokens]:
                del engine.running[index]
        last = max(last, engine.now)
    return Outcome(last, _utilisation(cluster, samples, last))


def _work_s(cluster: Cluster, samples: Sequence[Sample]) -> float:
    """Engine seconds of all samples at the best rate, each prompt computed once a sample."""
    per_token = cluster.step_s(cluster.slots) / cluster.slots
    return sum(one.tokens * per_token + one.prompt_tokens * cluster.prefill_s for one in samples)


def _utilisation(cluster: Cluster, samples: Sequence[Sample], batch_s: float) -> float:
    return _work_s(cluster, samples) / (batch_s * cluster.engines)


def lower_bound(cluster: Cluster, samples: Sequence[Sample]) -> float:
    """No schedule is faster, in seconds."""
    longest = max(one.tokens * cluster.step_s(1) + one.prompt_tokens * cluster.prefill_s for one in samples)
    return max(longest, _work_s(cluster, samples) / cluster.engines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=256)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--median", type=float, default=600.0)
    parser.add_argument("--sigma", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(arguments)
    cluster = Cluster(engines=options.engines)
    console = Console()
    table = Table("samples a slot", "epoch", "bound, s", "pool, s", "pool / bound", "utilisation", "moved")
    for column in ("without moves / bound", "round-robin / bound", "round-robin utilisation"):
        table.add_column(column)
    rows = []
    for waves in (1, 4, 16):
        generator = np.random.default_rng(options.seed)
        groups = waves * cluster.engines * cluster.slots // options.group_size
        lengths, without = LengthHistory(), LengthHistory()
        for epoch in (1, 2):
            samples = long_tailed(
                np.random.default_rng(options.seed) if epoch == 1 else generator,
                groups,
                options.group_size,
                options.median,
                options.sigma,
                options.max_tokens,
            )
            if epoch == 1:
                first = samples
            else:  # the same prompts, each with lengths like those it had
                samples = [
                    Sample(
                        one.group,
                        one.prompt_tokens,
                        int(
                            np.clip(
                                one.tokens * np.exp(0.3 * generator.standard_normal()), 8, options.max_tokens
                            )
                        ),
                    )
                    for one in first
                ]
            bound = lower_bound(cluster, samples)
            pool = simulate(cluster, samples, options.max_tokens, lengths)
            still = simulate(cluster, samples, options.max_tokens, without, moving=False)
            robin = round_robin(cluster, samples)
            row = {
                "waves": waves,
                "epoch": epoch,
                "bound_s": bound,
                "pool": asdict(pool),
                "without_moves": asdict(still),
                "round_robin": asdict(robin),
            }
            rows.append(row)
            table.add_row(
                str(waves),
                str(epoch),
                f"{bound:.0f}",
                f"{pool.batch_s:.0f}",
                f"{pool.batch_s / bound:.3f}",
                f"{pool.utilisation:.0%}",
                str(pool.moved),
                f"{still.batch_s / bound:.3f}",
                f"{robin.batch_s / bound:.3f}",
                f"{robin.utilisation:.0%}",
            )
    console.print(table)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "pool_sim.json").write_text(
        json.dumps({"cluster": asdict(cluster), "rows": rows}, indent=1)
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

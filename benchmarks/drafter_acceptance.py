"""Tokens per verify step and calibration on the recorded workloads, against the goals of docs/drafting.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks import replay
from rollout_spec.draft import DraftConfig, TrieDrafter
from rollout_spec.recorded import load_workload

CALIBRATION_GOAL = 0.05
THRESHOLDS = (DraftConfig().min_prob, 0.5)
"""Between these the threshold that spends a given number of nodes is looked for."""


@dataclass(frozen=True)
class Case:
    """A replay. goals: tokens per step to reach, by epoch.

    spend: if given, `min_prob` is set so that about that many nodes a step are proposed in the last epoch.
    """

    workload: str
    goals: tuple[float | None, ...]
    nodes: int = 16
    order: replay.Order = "staggered"
    spend: float | None = None


CASES = (
    Case("easy", (4.65, 9.3)),
    Case("hard", (3.4, 5.9)),
    Case("hard", (2.08, 5.85), order="group"),
    Case("natural", (2.1,)),
    Case("rollouts", (None, 1.72)),
    Case("rollouts_t06", (None, 3.05)),
    Case("rollouts_qwen", (None, 3.08)),
    Case("rollouts", (None, 1.45), nodes=3),
    Case("rollouts_t06", (None, 2.12), nodes=3),
    Case("rollouts_qwen", (None, 2.13), nodes=3),
    Case("easy", (None, 14.5), nodes=63),
    Case("hard", (None, 7.5), nodes=63),
    Case("hard", (None, 4.9), spend=6.0),
)
QUICK_CASES = tuple(case for case in CASES if case.workload == "rollouts_qwen")


@dataclass(frozen=True)
class Acceptance:
    """One epoch of a case's replay. min_prob: of our drafter. goal: of tokens per step."""

    drafter: str
    workload: str
    order: replay.Order
    epoch: int
    nodes: int
    min_prob: float | None
    equal_nodes: bool  # min_prob was set so that a given number of nodes is proposed
    tokens_per_step: float
    nodes_per_step: float
    calibration_error: float
    goal: float | None


def measure(
    cases: Iterable[Case],
    rivals: Mapping[str, Callable[[], replay.ReplayDrafter]],
    say: Callable[[str], None],
) -> list[Acceptance]:
    """Every case with our drafter, and, where the threshold is the default one, with each rival."""
    measured: list[Acceptance] = []
    for case in cases:
        say(f"Replaying {case.workload} with {case.nodes} nodes ...")
        config = DraftConfig(max_nodes=case.nodes) if case.spend is None else spending(case, case.spend)
        measured += measure_with(case, config)
        if case.spend is None:
            for name, make in rivals.items():
                measured += _epochs(name, case, make(), None, [None] * len(case.goals))
    return measured


def measure_with(case: Case, config: DraftConfig) -> list[Acceptance]:
    """A case with our drafter, by epoch."""
    return list(_epochs("trie", case, TrieDrafter(config), config.min_prob, case.goals))


def spending(
    case: Case, nodes_per_step: float, *, tolerance: float = 0.01, most_tries: int = 10
) -> DraftConfig:
    """The config whose threshold spends about `nodes_per_step` in the last epoch, by bisection of its logarithm."""
    least, most = map(math.log, THRESHOLDS)
    for _ in range(most_tries):
        config = DraftConfig(max_nodes=case.nodes, min_prob=math.exp((least + most) / 2))
        spent = list(_replays(case, TrieDrafter(config)))[-1].nodes_per_step
        if abs(spent / nodes_per_step - 1) <= tolerance:
            break
        if spent > nodes_per_step:
            least = math.log(config.min_prob)
        else:
            most = math.log(config.min_prob)
    return config


def _replays(case: Case, drafter: replay.ReplayDrafter) -> Iterator[replay.Replay]:
    workload = load_workload(replay.FOLDER / f"{case.workload}.npz")
    return replay.replay_epochs(drafter, workload, nodes=case.nodes, order=case.order)


def _epochs(
    name: str,
    case: Case,
    drafter: replay.ReplayDrafter,
    min_prob: float | None,
    goals: Sequence[float | None],
) -> Iterator[Acceptance]:
    for number, (epoch, goal) in enumerate(zip(_replays(case, drafter), goals, strict=True), 1):
        yield Acceptance(
            drafter=name,
            workload=case.workload,
            order=case.order,
            epoch=number,
            nodes=case.nodes,
            min_prob=min_prob,
            equal_nodes=case.spend is not None,
            tokens_per_step=epoch.tokens_per_step,
            nodes_per_step=epoch.nodes_per_step,
            calibration_error=epoch.calibration_error,
            goal=goal,
        )

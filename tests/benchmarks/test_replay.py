"""The replay of recorded completions: what a step emits, the order of requests, what calibration counts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks import replay
from rollout_spec.errors import DraftError
from rollout_spec.recorded import Recorded, Workload, load_workload
from rollout_spec.tree import DraftTree


def ids(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


class Scripted:
    """Proposes the same trees for every request, in turn, and writes down what it is told."""

    def __init__(self, *trees: DraftTree) -> None:
        self.trees = trees
        self.calls: list[tuple[str, Hashable]] = []
        self.groups: list[Hashable] = []
        self.most_at_once = 0
        self.text: dict[Hashable, list[int]] = {}
        self._steps: dict[Hashable, int] = {}

    def start(self, request_id: Hashable, prompt: NDArray[np.int32], group_id: Hashable = None) -> None:
        self.calls.append(("start", request_id))
        self.groups.append(group_id)
        self.text[request_id] = prompt.tolist()

    def extend(self, request_id: Hashable, tokens: NDArray[np.int32]) -> None:
        self.text[request_id] += tokens.tolist()

    def propose(self, request_ids: Sequence[Hashable], budgets: Sequence[int]) -> list[DraftTree]:
        self.most_at_once = max(self.most_at_once, len(request_ids))
        step = [self._steps.setdefault(name, 0) for name in request_ids]
        self._steps.update({name: at + 1 for name, at in zip(request_ids, step, strict=True)})
        return [self.trees[at % len(self.trees)] for at in step]

    def finish(self, request_id: Hashable) -> None:
        self.calls.append(("finish", request_id))


def one(*tokens: int) -> Recorded:
    return Recorded(0, 0, 0, ids(1), ids(*tokens))


def workload(prompts: int, samples: int) -> Workload:
    completions = [
        Recorded(0, number, sample, ids(1), ids(number, sample))
        for number in range(prompts)
        for sample in range(samples)
    ]
    return Workload("made", tuple(completions), ids())


def test_a_step_emits_the_accepted_path_and_one_token_more() -> None:
    tree = DraftTree(ids(7, 8, 9), [-1, 0, -1], [0.9, 0.8, 0.1])
    drafter = Scripted(tree)
    done = replay.replay(drafter, [one(7, 8, 5, 9, 6, 4)])
    assert (done.steps, done.tokens, done.nodes) == (3, 6, 9)  # 7 8 5, then 9 6, then 4
    assert done.tokens_per_step == 2.0
    assert drafter.text[0, 0, 0] == [1, 7, 8, 5, 9, 6, 4]


def test_nothing_is_emitted_past_the_end() -> None:
    done = replay.replay(Scripted(DraftTree.path([7, 8, 9])), [one(7, 8)])
    assert (done.steps, done.tokens) == (1, 2)


def test_calibration_error_is_nil_for_probabilities_that_come_true() -> None:
    calibration = replay.Calibration()
    for accepted in ([0], [0], [], [0]):
        calibration.add(np.array([0.75], np.float32), accepted)
    assert calibration.expected_error == pytest.approx(0)


def test_calibration_error_is_a_mean_over_nodes() -> None:
    calibration = replay.Calibration()
    calibration.add(np.array([1.0, 0.5, 0.5, 0.5], np.float32), [0])  # errs by 0, and by 0.5 three times
    assert calibration.expected_error == pytest.approx(3 * 0.5 / 4)


def test_no_more_requests_run_at_once_than_there_are_slots_and_each_finishes_once() -> None:
    drafter = Scripted(DraftTree())
    replay.replay(drafter, workload(3, 2).epoch(0), slots=4)
    assert drafter.most_at_once == 4
    names = [name for call, name in drafter.calls if call == "start"]
    assert sorted(name for call, name in drafter.calls if call == "finish") == sorted(names)


def test_orders_stagger_or_gather_the_samples_of_a_prompt() -> None:
    made = workload(2, 2)
    assert [(c.prompt_number, c.sample) for c in made.epoch(0)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [(c.prompt_number, c.sample) for c in made.epoch(0, "group")] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_tree_over_its_budget_is_refused() -> None:
    with pytest.raises(DraftError, match="at most 2"):
        replay.replay(Scripted(DraftTree.path([7, 8, 9])), [one(7, 8)], nodes=2)


def test_warm_text_is_learnt_before_and_in_groups_of_its_own() -> None:
    warm = np.arange(replay.WARM_TOKENS_A_REQUEST + 10, dtype=np.int32)
    drafter = Scripted(DraftTree())
    list(replay.replay_epochs(drafter, Workload("made", (one(7),), warm)))
    assert drafter.groups == [("warm", 0), ("warm", replay.WARM_TOKENS_A_REQUEST), 0]
    assert drafter.text["warm", 0] + drafter.text["warm", replay.WARM_TOKENS_A_REQUEST] == warm.tolist()


@pytest.mark.parametrize(
    ("name", "prompts", "completions", "epochs"),
    [
        ("easy", 12, 192, 2),
        ("hard", 12, 192, 2),
        ("natural", 48, 48, 1),
        ("rollouts", 23, 368, 2),
        ("rollouts_t06", 11, 176, 2),
        ("rollouts_qwen", 7, 112, 2),
    ],
)
def test_recorded_workloads_are_whole(name: str, prompts: int, completions: int, epochs: int) -> None:
    read = load_workload(replay.FOLDER / f"{name}.npz")
    assert len(read.completions) == completions
    assert len({c.prompt_number for c in read.completions}) == prompts
    assert len(read.epochs) == epochs
    assert all(len(c.prompt) and len(c.tokens) for c in read.completions)
    assert len(read.warm) == (300_000 if name == "natural" else 0)
    assert sum(len(read.epoch(number)) for number in read.epochs) == completions

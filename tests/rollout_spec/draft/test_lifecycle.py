"""Requests come and go: what stays of them, and who may use it."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_spec.draft import DraftConfig, TrieDrafter
from rollout_spec.draft.config import LONGEST_MATCH
from rollout_spec.tree import DraftTree

SECRET = [101, 102, 103, 104, 105, 106, 107, 108]
COMMON = [1, 2, 3, 4]


def new_drafter() -> TrieDrafter:
    return TrieDrafter(DraftConfig(capacity_tokens=5_000))


def draft(drafter: TrieDrafter, prompt: list[int], group: object = None, budget: int = 16) -> DraftTree:
    """The tree after a prompt, of a request that leaves again."""
    drafter.start("ask", prompt, group_id=group)
    tree = drafter.propose(["ask"], [budget])[0]
    drafter.finish("ask")
    return tree.validate(max_nodes=budget)


def listed(trees: list[DraftTree]) -> list[tuple[list[int], list[int], list[float]]]:
    return [(tree.tokens.tolist(), tree.parents.tolist(), tree.probs.tolist()) for tree in trees]


@pytest.mark.parametrize("rows", [1, 60, 64, 65, 500])
def test_no_request_drafts_from_another_ones_prompt_even_in_its_place(rows: int) -> None:
    drafter = new_drafter()
    prompt = (SECRET * 200)[:rows] + SECRET[:2]
    for ending in ("finish", "begin anew"):
        drafter.start("private", prompt, group_id="g")
        assert len(draft(drafter, SECRET[:2], group="g")) == 0
        if ending == "finish":
            drafter.finish("private")
        else:
            drafter.start("private", [5], group_id="g")
        for number in range(20):  # more than there are freed places
            filler = [9] * rows if number % 2 else []  # a short text may lie in a large text's place
            drafter.start(number, filler + SECRET[: 2 + number % 3], group_id="g")
            assert not set(drafter.propose([number], [16])[0].tokens.tolist()) & set(SECRET)
        for number in range(20):
            drafter.finish(number)


def test_requests_that_only_had_a_prompt_leave_no_trace() -> None:
    rng = np.random.default_rng(0)
    drafter = new_drafter()
    drafter.start("taught", COMMON[:1])
    drafter.extend("taught", COMMON[1:])
    drafter.finish("taught")
    before = [array.copy() for array in drafter._history._small_arrays().values()]
    table, drafts = drafter._history.slots.copy(), listed([draft(drafter, COMMON[:1])])
    for _ in range(3):
        for number in range(40):
            drafter.start(number, rng.integers(0, 9, 30))  # begun anew each turn, as after preemption
            drafter.propose([number], [16])
    for number in range(40):
        drafter.finish(number)
    assert (drafter._history.slots == table).all()
    for was, now in zip(before, drafter._history._small_arrays().values(), strict=True):
        assert (was == now).all()
    assert listed([draft(drafter, COMMON[:1])]) == drafts


def test_beginning_anew_again_and_again_takes_no_more_memory() -> None:
    drafter = new_drafter()
    drafter.start("preempted", COMMON)
    before = drafter.memory_bytes
    for turn in range(200):
        drafter.start("preempted", COMMON * (1 + turn % 5))
    assert drafter.memory_bytes == before


def test_a_request_begun_anew_drafts_as_one_never_interrupted() -> None:
    drafter = new_drafter()
    text = [int(token) for token in np.random.default_rng(4).integers(0, 6, 40)]
    drafter.start("other", text, group_id="g")
    drafter.start("preempted", text[:25], group_id="g")
    drafter.propose(["preempted"], [16])
    drafter.start("preempted", text, group_id="g")  # the prompt and what it had generated
    assert listed(drafter.propose(["preempted"], [16])) == listed(drafter.propose(["other"], [16]))


def test_a_request_that_misses_steps_is_not_forgotten() -> None:
    drafter = new_drafter()
    drafter.start("waiting", SECRET + SECRET[:3])
    for number in range(100):
        drafter.start(number, [number, 7])
        drafter.extend(number, [8, 9])
        drafter.propose([number], [8])
        drafter.finish(number)
        drafter.new_version(number)
    assert drafter.propose(["waiting"], [5])[0].tokens.tolist() == SECRET[3:]
    drafter.extend("waiting", SECRET[3:5])
    assert drafter.propose(["waiting"], [3])[0].tokens.tolist() == SECRET[5:]


def test_a_prompt_in_a_later_epoch_drafts_from_all_its_earlier_completions() -> None:
    drafter = new_drafter()
    prompt = [50, 51, 52]
    completions = [[60 + c, 70 + c, 80 + c] for c in range(4)]
    for epoch in range(2):
        for c, completion in enumerate(completions[2 * epoch : 2 * epoch + 2]):
            drafter.start((epoch, c), prompt)
            drafter.extend((epoch, c), completion)
            drafter.finish((epoch, c))
        drafter.new_version(epoch)
    tree = draft(drafter, prompt, budget=12)
    for completion in completions:
        assert len(tree.accepted(completion)) == 3, f"{completion} is not drafted"


def test_a_group_id_joins_different_prompts_and_parts_equal_ones() -> None:
    drafter = new_drafter()
    for number in range(4):  # the same last tokens, so that everything knows all four
        drafter.start(number, [40 + number, 7, 7], group_id=f"group {number // 2}")
        drafter.extend(number, [90 + number // 2])
        drafter.finish(number)
    for group in range(2):
        assert draft(drafter, [7, 7], group=f"group {group}", budget=1).tokens.tolist() == [90 + group]


@pytest.mark.parametrize(
    ("one", "same"),
    [
        (3, np.int64(3)),
        ("a", np.str_("a")),
        (True, 1),
        (("a", 3), ("a", np.int32(3))),
    ],
)
def test_equal_group_ids_are_one_group(one: object, same: object) -> None:
    drafter = new_drafter()
    for group, token in ((one, 30), ("another", 31), ("a third", 32)):
        drafter.start("r", [1, 2, 3], group_id=group)
        drafter.extend("r", [token])
        drafter.finish("r")
    assert draft(drafter, [1, 2, 3], group=same, budget=1).tokens.tolist() == [30]


def test_equal_prompts_of_any_form_are_a_group() -> None:
    drafter = new_drafter()
    for first in (40, 41, 42):
        drafter.start("r", [first, 7, 8])
        drafter.extend("r", [first + 10])
        drafter.finish("r")
    for prompt in ((41, 7, 8), np.array([41, 7, 8], np.uint16), np.array([[41, 0], [7, 0], [8, 0]])[:, 0]):
        drafter.start("r", prompt)
        assert drafter.propose(["r"], [1])[0].tokens.tolist() == [51]


def test_a_draft_of_a_request_that_left_does_not_calibrate_the_next() -> None:
    drafter = new_drafter()
    drafter.start("a", SECRET + SECRET[:3])
    assert len(drafter.propose(["a"], [8])[0]) > 0
    drafter.finish("a")
    before = drafter._history.calibration.copy()
    drafter.start("b", [5])
    drafter.extend("b", [6])
    assert (drafter._history.calibration == before).all()


def test_a_prompt_refused_leaves_the_request_as_it_was() -> None:
    drafter = new_drafter()
    drafter.start("a", SECRET + SECRET[:3])
    with pytest.raises(ValueError, match="token ids"):
        drafter.start("a", [-1])
    with pytest.raises(ValueError, match="token ids"):
        drafter.extend("a", [2**31])
    assert drafter.propose(["a"], [5])[0].tokens.tolist() == SECRET[3:]


def test_a_context_matches_across_prompt_and_output() -> None:
    drafter = new_drafter()
    text = list(range(200, 200 + LONGEST_MATCH + 1))
    drafter.start("a", text[:-3])
    drafter.extend("a", text[-3:])
    drafter.finish("a")
    assert draft(drafter, text[:-2], budget=2).tokens.tolist() == text[-2:]

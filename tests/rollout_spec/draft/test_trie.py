"""What the trie drafts, what it remembers, and what it must not."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.draft import DraftConfig, Drafter, TrieDrafter, make_drafter
from rollout_spec.errors import ConfigError, DraftError, UnknownRequestError
from rollout_spec.tree import DraftTree

SENTENCE = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


def feed(drafter: TrieDrafter, request: object, tokens: list[int], group: object = None) -> None:
    drafter.start(request, tokens[:1], group_id=group)
    drafter.extend(request, tokens[1:])
    drafter.finish(request)


def draft(drafter: TrieDrafter, prompt: list[int], budget: int = 16, group: object = "other") -> DraftTree:
    """The tree after a prompt, of a request that leaves again."""
    drafter.start("draft", prompt, group_id=group)
    tree = drafter.propose(["draft"], [budget])[0]
    drafter.finish("draft")
    return tree.validate(max_nodes=budget)


def test_it_is_a_drafter_and_never_imports_jax() -> None:
    assert isinstance(make_drafter(DraftConfig()), Drafter)
    assert make_drafter(DraftConfig(kind="none")) is None
    code = "import sys, rollout_spec.draft; raise SystemExit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kind", ["mtp", "hybrid"])
def test_every_kind_has_a_drafter(kind: str) -> None:
    assert isinstance(make_drafter(DraftConfig(kind=kind)), Drafter)  # type: ignore[arg-type]


def test_a_config_lists_all_that_is_out_of_range() -> None:
    with pytest.raises(ConfigError) as caught:
        DraftConfig(
            kind="tri",  # type: ignore[arg-type]
            max_nodes=64,
            capacity_tokens=0,
            max_match=17,
            branching=1,  # type: ignore[arg-type]
            min_prob=0.0,
            version_decay=1.5,
        )
    for name in (
        "kind",
        "max_nodes",
        "capacity_tokens",
        "max_match",
        "branching",
        "min_prob",
        "version_decay",
    ):
        assert name in str(caught.value)


def test_a_prompt_that_repeats_itself_is_continued() -> None:
    tree = draft(TrieDrafter(DraftConfig()), SENTENCE + SENTENCE[:3])
    assert tree.accepted(SENTENCE[3:]) == list(range(7))


@pytest.mark.parametrize("group", ["same", "another"])
def test_outputs_are_recalled_in_their_group_and_elsewhere(group: str) -> None:
    drafter = TrieDrafter(DraftConfig())
    feed(drafter, "first", SENTENCE, group="same")
    assert draft(drafter, SENTENCE[:3], group=group).tokens.tolist() == SENTENCE[3:]


def test_an_output_still_running_helps_its_siblings() -> None:
    drafter = TrieDrafter(DraftConfig())
    drafter.start("first", SENTENCE[:2], group_id=7)
    drafter.extend("first", SENTENCE[2:8])
    assert draft(drafter, SENTENCE[:3], group=7).tokens.tolist() == SENTENCE[3:8]


def test_a_group_prefers_its_own_continuation() -> None:
    drafter = TrieDrafter(DraftConfig())
    for number in range(3):
        feed(drafter, number, [1, 2, 3, 30 + number], group=f"group {number}")
    for number in range(3):
        assert draft(drafter, [1, 2, 3], group=f"group {number}").tokens[0] == 30 + number


def test_equal_prompts_are_a_group_by_default() -> None:
    drafter = TrieDrafter(DraftConfig())
    for last in (40, 41):
        drafter.start("r", np.array([last, 1, 2], np.int64))
        drafter.extend("r", [last + 10])
        drafter.finish("r")
    drafter.start("r", [41, 1, 2])
    assert drafter.propose(["r"], [4])[0].tokens[0] == 51


def test_a_new_token_in_a_known_text_is_skipped_over() -> None:
    drafter = TrieDrafter(DraftConfig())
    feed(drafter, "first", SENTENCE)
    assert draft(drafter, [*SENTENCE[:5], 999]).tokens[:3].tolist() == SENTENCE[6:9]


def test_a_private_context_serves_no_other_request() -> None:
    drafter = TrieDrafter(DraftConfig())
    drafter.start("a", SENTENCE * 2, group_id="g")
    assert len(draft(drafter, SENTENCE[:3], group="g")) == 0
    drafter.finish("a")
    assert len(draft(drafter, SENTENCE[:3], group="g")) == 0  # its room is used again
    drafter.start("a", SENTENCE[:3], group_id="g")  # the id is, too
    assert len(drafter.propose(["a"], [8])[0]) == 0
    drafter.start("a", SENTENCE * 2, group_id="g")  # begun anew, as after preemption
    drafter.start("a", SENTENCE[:3], group_id="g")
    assert len(drafter.propose(["a"], [8])[0]) == 0


def test_a_new_version_keeps_history_and_prefers_what_is_recent() -> None:
    drafter = TrieDrafter(DraftConfig(version_decay=0.5))
    for _ in range(2):
        feed(drafter, "old", [1, 2, 3, 4, 5])
    for version in range(1, 4):
        drafter.new_version(version)
    assert draft(drafter, [1, 2, 3]).tokens.tolist() == [4, 5]
    feed(drafter, "new", [1, 2, 3, 6, 7])
    assert draft(drafter, [1, 2, 3], budget=1).tokens.tolist() == [6]
    for version in range(4, 300):
        drafter.new_version(version)
    assert len(draft(drafter, [1, 2, 3])) > 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5), max_size=30), min_size=1, max_size=6),
    st.integers(0, 70),
    st.booleans(),
    st.sampled_from([1e-4, 0.004, 0.2]),
)
def test_proposals_are_well_formed(
    texts: list[list[int]], budget: int, branching: bool, min_prob: float
) -> None:
    drafter = TrieDrafter(DraftConfig(branching=branching, min_prob=min_prob))
    for number, text in enumerate(texts):
        drafter.start(number, text[: len(text) // 2], group_id=number % 2)
    for _ in range(2):
        trees = drafter.propose(range(len(texts)), [budget] * len(texts))
        for tree in trees:
            tree.validate(max_nodes=min(budget, 63))
            assert (tree.probs >= min_prob).all()
            assert branching or tree.parents.tolist() == list(range(-1, len(tree) - 1))
            assert (tree.depth_first().tokens == tree.tokens).all()
        for number, text in enumerate(texts):
            drafter.extend(number, text[len(text) // 2 :])


def test_a_batch_drafts_what_each_request_alone_does() -> None:
    rng = np.random.default_rng(3)
    drafter = TrieDrafter(DraftConfig())
    for number in range(20):
        drafter.start(number, rng.integers(0, 4, 30), group_id=number % 3)
        drafter.extend(number, rng.integers(0, 4, 30))
    together = drafter.propose(range(20), [number % 17 for number in range(20)])
    for number, tree in enumerate(together):
        alone = drafter.propose([number], [number % 17])[0]
        for name in ("tokens", "parents", "probs"):
            assert (getattr(tree, name) == getattr(alone, name)).all()


def test_probabilities_match_what_is_accepted() -> None:
    rng = np.random.default_rng(5)
    follow = rng.integers(0, 50, (50, 3))
    drafter = TrieDrafter(DraftConfig())
    given, hits = [], []
    for number in range(150):
        text = [int(rng.integers(50))]
        for _ in range(60):
            text.append(int(follow[text[-1], rng.choice(3, p=[0.75, 0.2, 0.05])]))
        drafter.start("r", text[:1], group_id=number)
        done = 1
        while done < len(text):
            tree = drafter.propose(["r"], [8])[0]
            accepted = tree.accepted(text[done:])
            if number > 50:
                given += tree.probs.tolist()
                hits += [node in accepted for node in range(len(tree))]
            step = text[done : done + len(accepted) + 1]
            drafter.extend("r", step)
            done += len(step)
        drafter.finish("r")
    bins = np.minimum((np.array(given) * 10).astype(int), 9)
    error = sum(
        abs(np.mean(np.array(given)[bins == b]) - np.mean(np.array(hits)[bins == b])) * np.mean(bins == b)
        for b in range(10)
        if (bins == b).any()
    )
    assert len(given) > 5_000
    assert error < 0.05


def test_edges_of_the_input() -> None:
    drafter = TrieDrafter(DraftConfig(capacity_tokens=1))  # less than one context
    drafter.start("a", [])
    assert len(drafter.propose(["a"], [8])[0]) == 0
    assert drafter.propose([], []) == []
    drafter.extend("a", [])
    largest = 2**31 - 1
    drafter.extend("a", np.array([largest, 0] * 50, np.uint32))
    assert drafter.propose(["a", "a"], [0, 2])[1].tokens.tolist() == [largest, 0]
    assert len(drafter.propose(["a"], [0])[0]) == 0
    drafter.start("b", [5])
    assert len(drafter.propose(["b"], [8])[0].validate()) <= 8
    for bad in ([-1], [2**31], [1.5], [[1, 2]]):
        with pytest.raises(DraftError):
            drafter.extend("b", bad)  # type: ignore[arg-type]
    with pytest.raises(DraftError, match="budget"):
        drafter.propose(["a", "b"], [1])
    for call in (
        lambda: drafter.extend("c", [1]),
        lambda: drafter.propose(["c"], [1]),
        lambda: drafter.finish("c"),
    ):
        with pytest.raises(UnknownRequestError, match="'c'"):
            call()


def test_one_token_repeated_takes_linear_memory_and_time() -> None:
    drafter = TrieDrafter(DraftConfig())
    drafter.start("a", [7] * 500_000)
    drafter.extend("a", np.full(500_000, 7))
    history_bytes = drafter._history.memory_bytes
    assert history_bytes < 100_000
    assert drafter.memory_bytes - history_bytes < 1_000_000 * 100
    assert drafter.propose(["a"], [16])[0].tokens.tolist() == [7] * 16
    drafter.finish("a")


def test_many_interleaved_requests_leave_only_history() -> None:
    drafter = TrieDrafter(DraftConfig())
    rng = np.random.default_rng(2)
    private_bytes = []
    for wave in range(3):
        for number in range(100):
            drafter.start((wave, number), rng.integers(0, 9, 50), group_id=number)
        for number in range(100):
            drafter.extend((wave, number), rng.integers(0, 9, 50))
        for number in range(100):
            drafter.finish((wave, number))
        private_bytes.append(drafter._texts.memory_bytes)
    assert private_bytes[0] == private_bytes[2]
    assert not drafter._rows


def test_threads_may_learn_and_propose_at_once() -> None:
    drafter = TrieDrafter(DraftConfig(capacity_tokens=2_000))
    failures: list[BaseException] = []

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        try:
            for turn in range(30):
                request = (number, turn)
                drafter.start(request, rng.integers(0, 5, 20), group_id=number)
                for _ in range(10):
                    drafter.extend(request, rng.integers(0, 5, 5))
                    drafter.propose([request], [16])[0].validate(max_nodes=16)
                drafter.finish(request)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for version in range(20):
        drafter.new_version(version)
    for thread in threads:
        thread.join()
    assert not failures
    assert drafter.tokens_learnt == 4 * 30 * 50

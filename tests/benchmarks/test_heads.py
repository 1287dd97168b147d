"""The language of the heads' benchmark is what it says; heads are judged by what they name; a short run."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import heads, heads_policy
from benchmarks.heads_language import (
    LETTERS,
    REFRAIN_LENGTH,
    REFRAIN_SHARE,
    STYLES,
    VOCABULARY_SIZE,
    Language,
    Style,
)
from rollout_spec.models import build, init_params

LANGUAGE = Language(3)


@given(st.sampled_from(STYLES), st.integers(2, 90), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_every_token_written_is_one_that_may_come(style: Style, length: int, seed: int) -> None:
    text = LANGUAGE.write(style, length, np.random.default_rng(seed)).tolist()
    assert len(text) == length
    for end in range(1, length):
        probs = LANGUAGE.next_probs(text[:end])
        assert probs.shape == (VOCABULARY_SIZE,)
        assert probs.sum() == pytest.approx(1.0)
        assert probs[text[end]] > 0


def test_texts_follow_the_probabilities() -> None:
    """The text's own nats a token are the entropy but for noise: what is written is drawn from `next_probs`."""
    generator = np.random.default_rng(0)
    for style in STYLES:
        texts = [LANGUAGE.write(style, 120, generator) for _ in range(40)]
        nats = LANGUAGE.nats(texts, 40)
        assert nats == pytest.approx(LANGUAGE.entropy(texts, 40), rel=0.1)


def test_the_likeliest_letter_depends_on_the_one_three_before_alone() -> None:
    style = int(LANGUAGE.write("novel", 1, np.random.default_rng(0))[0])
    texts = ([5, 9, 60], [5, 33, 2], [7, 1, 2, 5, 0, 0])
    probs = [LANGUAGE.next_probs([style, *letters]) for letters in texts]
    for one in probs[1:]:
        np.testing.assert_array_equal(probs[0], one)
    np.testing.assert_allclose(probs[0][:LETTERS], LANGUAGE.transitions[5])


def test_a_refrain_leaves_nothing_open_and_styles_differ_in_how_often_one_begins() -> None:
    starts: Counter[Style] = Counter()
    first = {int(refrain[0]): refrain.tolist() for refrain in LANGUAGE.refrains}
    for style in STYLES:
        text = LANGUAGE.write(style, 4000, np.random.default_rng(1)).tolist()
        for place, token in enumerate(text[:-REFRAIN_LENGTH]):
            if token in first:
                starts[style] += 1
                assert text[place : place + REFRAIN_LENGTH] == first[token]
    assert starts["novel"] == 0
    assert starts["repetitive"] >= 4000 // REFRAIN_LENGTH - 2
    expected = 4000 * REFRAIN_SHARE["mixed"] / (1 + REFRAIN_SHARE["mixed"] * (REFRAIN_LENGTH - 1))
    assert starts["mixed"] == pytest.approx(expected, rel=0.3)
    pairs = Counter(pair for refrain in first.values() for pair in itertools.pairwise(refrain))
    assert max(pairs.values()) == 1


def test_accuracy_counts_what_the_heads_name() -> None:
    """Against the logits read place by place."""
    params = init_params(heads_policy.CONFIG, 2)
    rows = np.random.default_rng(0).integers(0, VOCABULARY_SIZE, (3, 14)).astype(np.int32)
    ahead = jax.jit(lambda tokens: nnx.merge(build(heads_policy.CONFIG), params).logits_ahead(tokens, 2))
    logits = np.asarray(ahead(rows))
    # Texts that follow the heads at some places, so that there is something to count.
    for row in range(3):
        for place in range(5, 9):
            rows[row, place] = logits[0, row, place - 2].argmax()
    logits = np.asarray(ahead(rows))
    tried = first = second = steps = 0
    right = [
        [logits[0, row, token - 2].argmax() == rows[row, token] for token in range(2, 14)] for row in range(3)
    ]
    then = [
        [logits[1, row, token - 2].argmax() == rows[row, token + 1] for token in range(2, 13)]
        for row in range(3)
    ]
    for row in range(3):
        for token in range(6, 13):
            tried += 1
            first += right[row][token - 2]
            second += right[row][token - 2] and then[row][token - 2]
        token, steps = 7, steps + 1  # the prompt's step emits token 6
        while token < 14:
            accepted = int(right[row][token - 2]) and 1 + int(token + 1 < 14 and then[row][token - 2])
            token, steps = token + accepted + 1, steps + 1
    found = heads.accuracy(params, rows, 6)
    assert first > 0
    assert (found.first, found.second) == (first / tried, second / first)
    assert found.mean_tokens_per_step == pytest.approx(1 + first / tried + second / tried)
    assert found.best_tokens_per_step == 3 * 8 / steps


def results(**lengths: float) -> dict[str, Any]:
    drafters = {
        name.replace("_", " "): {"tokens_per_step": length, "tokens_identical": True}
        for name, length in lengths.items()
    }
    return {"styles": {"mixed": {"best_tokens_per_step": 2.0, "drafters": drafters}}}


def test_what_falls_short_is_named() -> None:
    good = {"off": 1.0, "mtp_chain": 1.95, "mtp": 2.0, "trie": 3.0, "hybrid": 3.5}
    assert heads.faults(results(**good)) == []
    assert "95%" in heads.faults(results(**{**good, "mtp_chain": 1.89}))[0]
    assert "hybrid 3.000" in heads.faults(results(**{**good, "hybrid": 3.0}))[0]
    changed = results(**good)
    changed["styles"]["mixed"]["drafters"]["trie"]["tokens_identical"] = False
    assert heads.faults(changed) == ["mixed: trie changed a token"]


def test_a_short_run_measures_and_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(heads, "STYLES", ("mixed",))
    kinds = {name: heads.DRAFTERS[name] for name in ("off", "mtp chain", "trie", "hybrid")}
    monkeypatch.setattr(heads, "DRAFTERS", {**kinds, "mtp": kinds["mtp chain"]})
    file = tmp_path / "heads.json"
    options = ["--steps", "3", "--prompts", "2", "--max-tokens", "10", "--output", str(file)]
    heads.main(options)
    stored = json.loads(file.read_text())["results"]
    assert len(stored["nats"]) == 3
    found = stored["styles"]["mixed"]["drafters"]
    assert all(one["tokens_identical"] and one["tokens_per_step"] >= 1 for one in found.values())
    assert found["mtp chain"]["drafted_by_depth"][0] > 0

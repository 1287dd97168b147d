"""A round of shared completions stays within its budget and keeps the latest."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollout_spec.pool.history import TextBatch
from rollout_spec.pool.messages import LearntText


def text(number: int, tokens: int) -> LearntText:
    return LearntText(number, "group", np.zeros(2, np.int32), np.zeros(tokens, np.int32))


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(0, 400))
def test_within_the_budget(lengths: list[int], budget: int) -> None:
    batch = TextBatch(budget)
    texts = [text(number, tokens) for number, tokens in enumerate(lengths)]
    for one in texts:
        batch.add(one)
    total = sum(one.size_bytes for one in texts)
    assert batch.size_bytes <= budget
    assert batch.size_bytes + batch.left_out_bytes == total
    taken = batch.take()
    assert taken == texts[len(texts) - len(taken) :]
    assert batch.size_bytes == 0

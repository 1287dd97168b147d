"""A request's own text is searched as a plain search would."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollout_spec.draft import DraftConfig, TrieDrafter, own
from rollout_spec.draft.config import LONGEST_MATCH
from rollout_spec.draft.kernels import fill_context
from rollout_spec.draft.own import MATCHES, NEAR
from rollout_spec.draft.state import LENGTH, OWN_FIRST


def found_places(drafter: TrieDrafter, request: object, longest: int) -> list[tuple[int, int]]:
    """(tokens that match, token that followed) of the places found for the request's present context."""
    state, row = drafter._state(), drafter._requests[drafter._rows[request]]
    context = np.zeros(LONGEST_MATCH, np.int64)
    length = min(fill_context(state.texts, row, context), longest)
    followers, matched = np.zeros((2, 2 * MATCHES), np.int64)
    found = own.find(state.texts, row, context, length, followers, matched) if length > 0 else 0
    return list(zip(matched[:found].tolist(), followers[:found].tolist(), strict=True))


def naive_places(text: list[int], longest: int) -> list[tuple[int, int]]:
    """The same of all places, newest first."""
    places = []
    for place in range(len(text) - 1, 0, -1):
        same = 0
        while same < min(longest, place) and text[place - 1 - same] == text[len(text) - 1 - same]:
            same += 1
        if same:
            places.append((same, text[place]))
    return places


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3) | st.just(2**31 - 1), max_size=30), min_size=1, max_size=6),
    st.integers(1, LONGEST_MATCH),
)
def test_a_short_text_is_searched_completely(parts: list[list[int]], longest: int) -> None:
    drafter = TrieDrafter(DraftConfig(capacity_tokens=100))
    drafter.start("other", [0, 1, 2] * 40)
    drafter.start("a", parts[0])
    text = list(parts[0])
    for part in parts[1:]:
        drafter.extend("a", part)
        text += part
    found, expected = found_places(drafter, "a", longest), naive_places(text, longest)
    assert set(found) <= set(expected)
    if len(text) <= MATCHES:
        assert sorted(found) == sorted(expected)
    near = [place for place in expected if place[0] >= NEAR]
    assert [place for place in found if place[0] >= NEAR][: MATCHES // 2] == near[: MATCHES // 2]


@pytest.mark.parametrize("begin", [0, 1, 63, 64, 65])
def test_a_text_keeps_its_places_when_it_moves_to_larger_blocks(begin: int) -> None:
    rng = np.random.default_rng(begin)
    text = rng.integers(0, 5, 1_000).tolist()
    drafter = TrieDrafter(DraftConfig(capacity_tokens=100))
    drafter.start("a", text[:begin])
    for end in range(begin, len(text), 50):
        drafter.start(("neighbour", end), [7] * 30)
        drafter.extend("a", text[end : end + 50])
    row, whole = drafter._requests[drafter._rows["a"]], TrieDrafter(DraftConfig(capacity_tokens=100))
    stored: NDArray = drafter._texts.rows[row[OWN_FIRST] : row[OWN_FIRST] + row[LENGTH], own.TOKEN]
    assert stored.tolist() == text
    whole.start("a", text)
    assert found_places(drafter, "a", 16) == found_places(whole, "a", 16)


def test_blocks_of_running_requests_never_overlap() -> None:
    rng = np.random.default_rng(0)
    drafter = TrieDrafter(DraftConfig(capacity_tokens=100))
    texts: dict[int, list[int]] = {}
    for _ in range(600):
        number, tokens = int(rng.integers(12)), rng.integers(0, 9, int(rng.choice([0, 3, 70, 400]))).tolist()
        if number not in texts or rng.random() < 0.2:
            drafter.start(number, tokens)
            texts[number] = tokens
        elif rng.random() < 0.2:
            drafter.finish(number)
            del texts[number]
        else:
            drafter.extend(number, tokens)
            texts[number] = texts[number] + tokens
    assert texts
    for number, text in texts.items():
        first, length = drafter._requests[drafter._rows[number], [OWN_FIRST, LENGTH]].tolist()
        assert drafter._texts.rows[first : first + length, own.TOKEN].tolist() == text


def test_private_texts_take_memory_in_proportion_and_give_it_back() -> None:
    drafter = TrieDrafter(DraftConfig(capacity_tokens=100))
    empty = drafter.memory_bytes
    for turn in range(3):
        drafter.start(turn, np.arange(100_000))
        assert drafter.memory_bytes - empty < 100_000 * 90
        drafter.finish(turn)
    assert drafter.memory_bytes - empty < 100_000 * 45

"""Worked solutions are right unless the pupil is careless, and the reward reads nothing but the answer."""

from __future__ import annotations

import random
import re

import pytest

from examples.reasoner.tasks import DIGITS, KINDS, Problem, labelled, problems


def test_solutions_are_right() -> None:
    assert all(problem.reward(problem.solution()) == 1.0 for problem in problems(400, seed=1))


@pytest.mark.parametrize(
    "problem",
    [
        Problem("addition", 9_999_999_999, 9_999_999_999),
        Problem("addition", 1_000_000_000, 1_000_000_000),
        Problem("multiplication", 9_999, 99),
        Problem("multiplication", 1_000, 10),
    ],
)
def test_extremes_are_right(problem: Problem) -> None:
    assert problem.reward(problem.solution()) == 1.0


def test_every_line_says_what_is_true() -> None:
    for problem in problems(100, seed=2):
        for line in problem.solution().splitlines():
            if product := re.fullmatch(r".(\d)\*.(\d)=(\d\d)\+(\d)=(\d\d).(\d)", line):
                one, other, result, carry, total, digit = map(int, product.groups())
                assert one * other == result
                assert result + carry == total
                assert total % 10 == digit
            elif added := re.fullmatch(r"\D?(\d)\+\D?(\d)\+(\d)=(\d\d).(\d)", line):
                one, other, carry, total, digit = map(int, added.groups())
                assert one + other + carry == total
                assert total % 10 == digit
            else:
                assert re.fullmatch(r"[a-zA-Z]\d|=([k-u]\d)+", line), line


def test_texts_of_a_kind_are_equally_long() -> None:
    generator = random.Random(3)
    for kind, length in zip(KINDS, (156, 223), strict=True):
        some = [problem for problem in problems(200, seed=3) if problem.kind == kind]
        assert {len(problem.solution(0.3, generator)) for problem in some} == {length}
        assert len({len(problem.prompt) for problem in some}) == 1


def test_carelessness_is_what_makes_answers_wrong() -> None:
    generator = random.Random(4)
    some = problems(1000, seed=4)
    rates = {
        carelessness: sum(p.reward(p.solution(carelessness, generator)) for p in some) / len(some)
        for carelessness in (0.035, 0.2)
    }
    assert 0.55 < rates[0.035] < 0.72
    assert rates[0.2] < 0.15


def test_only_the_whole_right_answer_on_the_last_line_earns() -> None:
    problem = Problem("multiplication", 4831, 27)
    answer = "=p1o3n0m4l3k7"
    assert problem.answer == 130_437
    assert problem.solution().endswith(f"\n{answer}")
    assert problem.reward(answer) == 1.0
    for text in (
        "",
        "=",
        answer[:-1],
        f"{answer}\n",
        f"{answer}0",
        f"{answer}\n=p1",
        answer.replace("4", "5"),
    ):
        assert problem.reward(text) == 0.0


def test_prompts_show_both_numbers() -> None:
    assert Problem("multiplication", 4831, 27).prompt == "d4c8b3a1*B2A7\n"
    assert labelled(42, "abc") == ["a2", "b4", "c0"]


def test_problems_are_distinct_mixed_and_repeatable() -> None:
    some = problems(300, seed=5)
    assert len(set(some)) == 300
    assert some == problems(300, seed=5)
    assert some != problems(300, seed=6)
    for problem in some:
        assert (len(str(problem.left)), len(str(problem.right))) == DIGITS[problem.kind][:2]
    assert {problem.kind for problem in some[:2]} == set(KINDS)

"""The demo's tasks: their answers, their prompts, and a checker that any text may be given to."""

from __future__ import annotations

import pytest

from examples.tasks import TASKS_FILE, WORKED_EXAMPLES, Task, load_tasks

TASK = Task(("hundred", "thousand", "names"), "m", 1)


def test_stored_answers_are_right() -> None:
    count = len(TASKS_FILE.read_text().splitlines())
    for task in load_tasks(count):
        assert task.answer == sum(word.count(task.letter) for word in task.words)


def test_tasks_are_distinct_and_no_worked_example() -> None:
    tasks = load_tasks(64)
    assert len({(task.words, task.letter) for task in tasks}) == 64
    assert not {(task.words, task.letter) for task in tasks} & set(WORKED_EXAMPLES)


def test_more_tasks_than_there_are_is_an_error_with_the_number() -> None:
    with pytest.raises(ValueError, match="between 1 and 64"):
        load_tasks(65)


def test_prompts_share_all_but_their_question() -> None:
    first, second = (task.prompt for task in load_tasks(2))
    shared = first[: first.rindex("Count the letter")]
    assert second.startswith(shared)
    assert first != second


def test_worked_examples_satisfy_the_checker() -> None:
    answers = TASK.prompt.split("\n\n")[:-1]
    assert len(answers) == len(WORKED_EXAMPLES)
    for (words, letter), answer in zip(WORKED_EXAMPLES, answers, strict=True):
        task = Task(words, letter, sum(word.count(letter) for word in words))
        assert task.reward(answer.splitlines()[-1]) == 1.0


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("hundred 0, thousand 0, names 1. Total: 1\n", 1.0),
        ("Total: 1", 1.0),
        ("Total: 12", 0.0),
        ("Total: 2. Total: 1", 0.0),
        ("hundred 0, thousand 0, names 1", 0.0),
        ("", 0.0),
        ("Total: ", 0.0),
        ("Total: " + "1" * 10_000, 0.0),
        ("Total: \u00b9", 0.0),
    ],
)
def test_reward_goes_by_the_first_total(text: str, reward: float) -> None:
    assert TASK.reward(text) == reward

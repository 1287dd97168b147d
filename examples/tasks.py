"""The tasks of the GRPO demo: counting letters, with a checker that reads the answer from the text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TASKS_FILE = Path(__file__).parent / "data" / "letter_counting.jsonl"
# Shown in every prompt, so that the policy sees the form; the prefix cache computes them once for all prompts.
WORKED_EXAMPLES = (
    (("the", "seven", "trees"), "e"),
    (("hundred", "thousand", "names"), "m"),
    (("enormous", "frontier", "of"), "o"),
    (("and", "mark", "was"), "k"),
)
STOP = "\n"  # an answer is one line
_TOTAL = re.compile(r"Total: (\d{1,9})\b")


@dataclass(frozen=True)
class Task:
    """Words, the letter to count in them, and how often it occurs."""

    words: tuple[str, ...]
    letter: str
    answer: int

    @property
    def prompt(self) -> str:
        """Worked examples and the question, up to the place where the answer starts."""
        examples = [
            f"{_question(words, letter)}{_answer(words, letter)}\n" for words, letter in WORKED_EXAMPLES
        ]
        return "\n".join([*examples, _question(self.words, self.letter)])

    def reward(self, text: str) -> float:
        """1.0 if the first total that the text states is right, else 0.0."""
        total = _TOTAL.search(text)
        return float(total is not None and int(total[1]) == self.answer)


def load_tasks(count: int, file: Path = TASKS_FILE) -> list[Task]:
    """The first `count` tasks of a file. Raises ValueError if it holds fewer."""
    tasks = [json.loads(line) for line in file.read_text().splitlines()]
    if not 1 <= count <= len(tasks):
        raise ValueError(
            f"expected between 1 and {len(tasks)} tasks, as many as {file.name} holds; got {count}"
        )
    return [Task(tuple(task["words"]), task["letter"], task["answer"]) for task in tasks[:count]]


def _question(words: Sequence[str], letter: str) -> str:
    return f"Count the letter {letter} in: {', '.join(words)}\n"


def _answer(words: Sequence[str], letter: str) -> str:
    counts = [word.count(letter) for word in words]
    working = ", ".join(f"{word} {count}" for word, count in zip(words, counts, strict=True))
    return f"{working}. Total: {sum(counts)}"

"""Worked arithmetic: problems, their solutions written out step by step, and a reward that reads the answer.

Long addition of two numbers of ten digits, and long multiplication of a number of four digits by one of two. Every
digit stands behind the letter of its column, units first, so that looking it up takes one match (index hints,
https://arxiv.org/abs/2310.16028): left a, b, c, ..., right A, B, C, ..., answer k, l, m, .... 4831 * 27 is

    d4c8b3a1*B2A7          the prompt
    a1*A7=07+0=07e7        1 * 7 = 07, plus carry 0 is 07: e, the first row's units, is 7, and 0 is carried
    b3*A7=21+0=21f1
    ...
    i3                     the row's highest digit is what was carried
    a1*B2=02+0=02E2        the second row, which belongs one column further left
    ...
    e7+0+0=07k7            the rows added up: digit, digit and carry
    f1+E2+0=03l3
    ...
    =p1o3n0m4l3k7          the answer, 130437
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["addition", "multiplication"]
KINDS: tuple[Kind, ...] = ("addition", "multiplication")
DIGITS: dict[Kind, tuple[int, int, int]] = {"addition": (10, 10, 11), "multiplication": (4, 2, 6)}
"""Digits of the left number, of the right one and of the answer."""

LEFT, RIGHT, ANSWER = "abcdefghij", "ABCDEFGHIJ", "klmnopqrstu"
ROWS = ("efghi", "EFGHI")
"""Columns of the two partial products."""


@dataclass(frozen=True)
class Problem:
    """Two numbers to add or to multiply."""

    kind: Kind
    left: int
    right: int

    @property
    def answer(self) -> int:
        return self.left + self.right if self.kind == "addition" else self.left * self.right

    @property
    def prompt(self) -> str:
        """Both numbers, the highest digit first, and a line break."""
        left, right = self._operands()
        sign = "+" if self.kind == "addition" else "*"
        return f"{''.join(left[::-1])}{sign}{''.join(right[::-1])}\n"

    def reward(self, text: str) -> float:
        """1.0 if the last line states the right answer in full, else 0.0; how it came about is not looked at."""
        columns = labelled(self.answer, ANSWER[: DIGITS[self.kind][2]])
        return float(text.rpartition("\n")[2] == f"={''.join(columns[::-1])}")

    def solution(self, carelessness: float = 0.0, generator: random.Random | None = None) -> str:
        """The worked solution. Each line that calculates goes wrong with probability `carelessness`.

        What follows a mistake is consistent with it, as in the work of a pupil.
        """
        pupil = _Pupil(carelessness, generator or random.Random(0))
        left, right = self._operands()
        if self.kind == "addition":
            pupil.add(left, right)
            pupil.lines.append(f"{ANSWER[len(left)]}{pupil.carry}")
            pupil.answer.append(pupil.lines[-1])
        else:
            first, second = (pupil.multiply(left, digit, row) for digit, row in zip(right, ROWS, strict=True))
            pupil.add([*first, "0"], ["0", *second])
        return "\n".join([*pupil.lines, f"={''.join(pupil.answer[::-1])}"])

    def _operands(self) -> tuple[list[str], list[str]]:
        left_digits, right_digits, _ = DIGITS[self.kind]
        return labelled(self.left, LEFT[:left_digits]), labelled(self.right, RIGHT[:right_digits])


def labelled(number: int, labels: str) -> list[str]:
    """Label and digit of every column, units first."""
    return [label + digit for label, digit in zip(labels, f"{number:0{len(labels)}d}"[::-1], strict=True)]


class _Pupil:
    """Writes lines, and makes a mistake in each with a given probability.

    Mistakes are those that people make: a carry forgotten, a neighbour in the times table, a sum off by one.
    """

    def __init__(self, carelessness: float, generator: random.Random) -> None:
        self.lines: list[str] = []
        self.answer: list[str] = []
        self.carry = 0
        self._carelessness = carelessness
        self._generator = generator

    def multiply(self, number: Sequence[str], digit: str, labels: str) -> list[str]:
        """The columns of number * digit, one more than number's."""
        row, self.carry = [], 0
        for column, label in zip(number, labels, strict=False):
            one, other = int(column[-1]), int(digit[-1])
            product, carry = one * other, self.carry
            total = product + carry
            if self._errs():
                mistake = self._generator.choice(("table", "carry", "sum") if carry else ("table", "sum"))
                if mistake == "table":
                    product = self._either(product, other, 9 * other)
                    total = product + carry
                elif mistake == "carry":
                    carry, total = 0, product
                else:
                    total = self._either(total, 1, 89)
            row.append(f"{label}{total % 10}")
            self.lines.append(f"{column}*{digit}={product:02d}+{carry}={total:02d}{row[-1]}")
            self.carry = total // 10
        row.append(f"{labels[len(number)]}{self.carry}")
        self.lines.append(row[-1])
        return row

    def add(self, left: Sequence[str], right: Sequence[str]) -> None:
        """Adds column by column; the answer's columns are appended to `answer`, and the last carry stays."""
        self.carry = 0
        for one, other, label in zip(left, right, ANSWER, strict=False):
            carry = self.carry
            total = int(one[-1]) + int(other[-1]) + carry
            if self._errs():
                if carry and self._generator.random() < 0.5:
                    carry, total = 0, total - 1
                else:
                    total = self._either(total, 1, 19)
            self.answer.append(f"{label}{total % 10}")
            self.lines.append(f"{one}+{other}+{carry}={total:02d}{self.answer[-1]}")
            self.carry = total // 10

    def _errs(self) -> bool:
        return self._generator.random() < self._carelessness

    def _either(self, value: int, step: int, most: int) -> int:
        """value - step or value + step, whichever lies between 0 and `most`; one of them by chance if both do."""
        return self._generator.choice([v for v in (value - step, value + step) if 0 <= v <= most])


def problems(count: int, seed: int) -> list[Problem]:
    """`count` random problems, additions and multiplications in turns, none twice."""
    generator = random.Random(seed)
    found: dict[Problem, None] = {}
    while len(found) < count:
        kind = KINDS[len(found) % len(KINDS)]
        left, right = (generator.randrange(10 ** (digits - 1), 10**digits) for digits in DIGITS[kind][:2])
        found[Problem(kind, left, right)] = None
    return list(found)

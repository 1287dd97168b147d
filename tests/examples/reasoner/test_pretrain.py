"""What the policy is pretrained on, and that it learns from it."""

from __future__ import annotations

import random

import pytest

from examples.reasoner import pretrain
from examples.reasoner.alphabet import END_ID, TOKENS
from examples.reasoner.tasks import KINDS


def test_batches_are_prompts_solutions_and_ends() -> None:
    for kind, length in zip(KINDS, (199, 238), strict=True):
        ids = pretrain.batch(kind, 3, random.Random(0))
        assert ids.shape == (3, length)
        assert (ids[:, -1] == END_ID).all()
        assert (ids[:, :-1] != END_ID).all()
        text = "".join(TOKENS[token] for token in ids[0, :-1])
        assert ("+" if kind == "addition" else "*") in text.partition("\n")[0]


def test_a_few_steps_teach_something(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pretrain, "ROWS", 2)
    pretrain.train(steps=12, seed=0)
    first, last = (
        float(line.split()[2]) for line in capsys.readouterr().out.splitlines() if line.startswith("step")
    )
    assert last < first - 1

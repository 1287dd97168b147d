"""What the plain loop says of random cases, computed once for all tests."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollout_spec.tokenizer import Tokenizer
from tests.helpers.plain_loop import PlainCompletion, plain_samples
from tests.helpers.random_cases import Case, random_cases
from tests.helpers.tiny_models import TinyModel, tiny_model
from tests.helpers.tiny_tokenizer import tiny_tokenizer

LONGEST_PROMPT = 40
LONGEST_COMPLETION = 24


@dataclass(frozen=True, eq=False)
class Expectation:
    """Cases, and the completions of each, flat: sample after sample, case after case."""

    cases: list[Case]
    completions: list[PlainCompletion]
    owners: list[Case]
    """The case of each completion."""

    def sequences(self) -> list[list[int]]:
        """Prompt and completion of each."""
        return [
            [*case.prompt, *completion.token_ids]
            for case, completion in zip(self.owners, self.completions, strict=True)
        ]


def expect(model: TinyModel, cases: Sequence[Case], tokenizer: Tokenizer | None) -> Expectation:
    completions, owners = [], []
    for case in cases:
        samples = plain_samples(
            model.plain, case.prompt, case.sampling, seed=case.sampling["seed"], tokenizer=tokenizer
        )
        completions += samples
        owners += [case] * case.sampling.get("n", 1)
    return Expectation(list(cases), completions, owners)


@functools.cache
def expected_cases(model_name: str, seed: int, count: int) -> Expectation:
    """`count` random cases for a tiny model; a prompt and its completion stay below every engine's limits."""
    model = tiny_model(model_name)
    cases = random_cases(
        np.random.default_rng(seed),
        model.config,
        count,
        longest_prompt=LONGEST_PROMPT,
        longest=LONGEST_COMPLETION,
    )
    return expect(model, cases, tiny_tokenizer(model.config.vocab_size, model.config.eos_token_ids))


def unending(expectation: Expectation, model: TinyModel) -> list[list[int]]:
    """The sequences, each going on where its completion ended: an engine must return none of the rest."""
    longer = []
    for case, completion in zip(expectation.owners, expectation.completions, strict=True):
        endless = {**case.sampling, "stop": (), "stop_token_ids": (), "ignore_eos": True}
        endless |= {"n": 1, "min_tokens": 0, "max_tokens": len(completion.token_ids) + 6}
        (whole,) = plain_samples(model.plain, case.prompt, endless, seed=completion.seed)
        if whole.token_ids[: len(completion.token_ids)] == completion.token_ids:
            longer.append([*case.prompt, *whole.token_ids])
    return longer

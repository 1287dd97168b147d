"""Part 6, against others: transformers, transformers with prompt lookup, and Tunix's sampler, on the same machine.

    make rivals        or        python -m benchmarks.rollouts_rivals [--rounds N] [--parts one,many] [--add]

`make rivals` makes an environment for each of the two packages: google-tunix==0.1.7 in .venv-tunix, torch and
transformers in .venv-torch. --tunix-python and --torch-python name other interpreters.

All are given the same float32 weights and the same token ids, are warmed up, and take turns, in the opposite order
every round; each rival runs in a process of its own with all cores. A time holds the whole call, prompt included. Ours
starts every call with an empty history and no prefix cache, so it knows no more of a prompt than the others do.

One request: the grounded prompts, greedy, to their ends. 16 requests: math prompts at temperature 1 from the whole
vocabulary, end tokens ignored, so that all have the same number of tokens to make.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import operator
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import machine
from benchmarks.huggingface_folder import save_huggingface
from benchmarks.rival_process import FOLDER, RivalProcess, Run, transformers_process
from benchmarks.rivals_tables import OURS, PATH, print_cells
from benchmarks.rollouts_play import Bench, Subject, Work, in_order, smollm2
from benchmarks.rollouts_results import Results, goal
from rollout_spec import SamplingParams

PART = "6"
TITLE = "Against transformers and Tunix"
PROMPT_LOOKUP_TOKENS = 10
CERTAIN_TOKENS = 8
"""Greedy tokens that all must begin with: later ones may part where two logits are closer than rounding."""

ONE, MANY = "grounded prompts, one request, greedy", "math prompts, {} requests, temperature 1"
GOALS_OF_ONE = {"transformers": 4.0, "transformers, prompt lookup": 1.5, "Tunix": 2.0}
GOALS_OF_MANY = {"transformers": 1.4, "Tunix": 1.8}
"""Speed of our engine with its defaults over that of each, at least."""
Generate = Callable[..., Run]
"""As `RivalProcess.generate`."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """rounds: turns of every subject. max_tokens: of each completion. requests: at once in the second measurement.

    prompts: how many of the grounded ones; None is all. first_round: its number, by which seeds go.
    """

    rounds: int = 3
    max_tokens: int = 128
    requests: int = 16
    prompts: int | None = None
    first_round: int = 0
    parts: tuple[str, ...] = ("one", "many")


@dataclasses.dataclass(frozen=True)
class Interpreters:
    """Those with Tunix, and with torch and transformers."""

    tunix: str = ".venv-tunix/bin/python"
    torch: str = ".venv-torch/bin/python"


_DEFAULT_INTERPRETERS = Interpreters()

FULL = Settings()
QUICK = Settings(rounds=2, max_tokens=64, prompts=3)
SMOKE = Settings(rounds=1, max_tokens=8, requests=2, prompts=1)


def measure(
    settings: Settings,
    bench: Bench,
    save: Callable[[str, dict[str, Any]], None],
    interpreters: Interpreters = _DEFAULT_INTERPRETERS,
) -> None:
    """A cell for one request and one for many, saved anew after every round.

    Raises RuntimeError if an interpreter lacks a rival, saying how to get it, or if a rival's greedy tokens show that
    it doesn't run the same model.
    """
    check_interpreters(interpreters)
    pair = bench.pair(settings.requests, prefix_cache=False)
    ours = {name: functools.partial(generate, subject) for name, subject in pair.items()}
    with _rivals(bench, interpreters) as (transformers, tunix):
        bench.say("Loading the rivals ...")
        for rival in (transformers, tunix):
            rival.wait()
        described = {rival.name: rival.described for rival in (transformers, tunix)}
        prompts = bench.policy.prompts
        if "one" in settings.parts:
            lookup = functools.partial(transformers.generate, prompt_lookup=PROMPT_LOOKUP_TOKENS)
            subjects: dict[str, Generate] = {
                **ours,
                "transformers": transformers.generate,
                "transformers, prompt lookup": lookup,
                "Tunix": tunix.generate,
            }
            batches = [[prompt] for prompt in prompts["grounded"][: settings.prompts]]
            for played in _in_turns(settings, bench, subjects, batches, stop_at_eos=True):
                save(ONE, cell(played, GOALS_OF_ONE, described) | {"same_tokens": same_tokens(played)})
        if "many" in settings.parts:
            subjects = {**ours, "transformers": transformers.generate, "Tunix": tunix.generate}
            batch = prompts["math"][: settings.requests]
            for played in _in_turns(settings, bench, subjects, [batch], stop_at_eos=False, temperature=1.0):
                save(MANY.format(settings.requests), cell(played, GOALS_OF_MANY, described))


def check_interpreters(interpreters: Interpreters) -> None:
    """Raises RuntimeError that says of every rival that can't be run how to get it."""
    faults = []
    for python, module, target, option in (
        (interpreters.tunix, "tunix", ".venv-tunix", "--tunix-python"),
        (interpreters.torch, "transformers", ".venv-torch", "--torch-python"),
    ):
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        try:
            found = subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
            fault = f"{python} has no package {module}"
        except OSError as error:
            found, fault = False, f"{python} can't be run ({error.strerror})"
        if not found:
            faults.append(
                f"{fault}: run `make rivals`, which makes {target}, or name another with {option} PATH"
            )
    if faults:
        raise RuntimeError("expected interpreters with the rivals:\n  " + "\n  ".join(faults))


@contextmanager
def _rivals(bench: Bench, interpreters: Interpreters) -> Iterator[tuple[RivalProcess, RivalProcess]]:
    """transformers and Tunix, loading."""
    policy = bench.policy
    folder = bench.scratch / "rivals_model"
    save_huggingface(policy.config, policy.params, folder)
    used = {token for prompts in policy.prompts.values() for prompt in prompts for token in prompt}
    pad = next(token for token in range(policy.config.vocab_size) if token not in used)
    with ExitStack() as stack:
        yield (
            stack.enter_context(transformers_process(folder, machine.cores(), python=interpreters.torch)),
            stack.enter_context(
                RivalProcess(
                    "Tunix",
                    FOLDER / "tunix_worker.py",
                    folder,
                    "--pad-token-id",
                    str(pad),
                    python=interpreters.tunix,
                )
            ),
        )


def generate(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    stop_at_eos: bool,
    temperature: float = 0.0,
    seed: int = 0,
) -> Run:
    """As `RivalProcess.generate`, by our engine with an empty history. The i-th prompt's seed is `seed` + i."""
    subject.forget()
    works = [
        Work(
            list(prompt),
            SamplingParams(
                temperature=temperature, max_tokens=max_tokens, ignore_eos=not stop_at_eos, seed=seed + index
            ),
        )
        for index, prompt in enumerate(prompts)
    ]
    return subject.play(works)


def _in_turns(
    settings: Settings,
    bench: Bench,
    subjects: dict[str, Generate],
    batches: Sequence[Sequence[Sequence[int]]],
    **options: Any,
) -> Iterator[dict[str, list[list[Run]]]]:
    """Runs of each subject, a list a round with one for each batch of prompts; yielded after every round."""
    bench.say("Warming up the rivals ...")
    for one in subjects.values():
        one(batches[0], settings.max_tokens, **options)
    played: dict[str, list[list[Run]]] = {name: [] for name in subjects}
    for number in range(settings.first_round, settings.first_round + settings.rounds):
        bench.say(f"Round {number + 1} ...")
        for name in in_order(list(subjects), number):
            seed = 1000 * (number + 1)
            played[name].append(
                [subjects[name](batch, settings.max_tokens, seed=seed, **options) for batch in batches]
            )
        yield played


def cell(
    played: dict[str, list[list[Run]]], goals: dict[str, float], described: dict[str, Any]
) -> dict[str, Any]:
    """Speeds of all subjects and what is wanted of ours. described: the rivals' own words about themselves."""
    speeds = {
        name: [sum(run.num_tokens for run in runs) / sum(run.seconds for run in runs) for runs in rounds]
        for name, rounds in played.items()
    }
    tokens = {name: sum(run.num_tokens for run in rounds[0]) for name, rounds in played.items()}
    return {"rivals": described, "tokens_of_a_round": tokens} | _compared(speeds, goals)


def _compared(speeds: dict[str, list[float]], goals: dict[str, float]) -> dict[str, Any]:
    """Medians over the rounds, and of the ratios within the rounds."""
    return {
        "subjects": {
            name: {"tokens_per_s": statistics.median(those), "tokens_per_s_of_rounds": those}
            for name, those in speeds.items()
        },
        "goals": [
            goal(
                f"{OURS} / {name}",
                statistics.median(map(operator.truediv, speeds[OURS], speeds[name])),
                wanted,
            )
            for name, wanted in goals.items()
        ],
    }


def with_rounds_of(stored: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """A measured cell with the rounds of a stored one before its own.

    Raises ValueError if they were measured with other rivals.
    """
    if stored["rivals"] != measured["rivals"]:
        raise ValueError(
            f"the stored rounds are of {stored['rivals']}, the new ones of {measured['rivals']}: measure all anew"
        )
    speeds = {
        name: stored["subjects"][name]["tokens_per_s_of_rounds"] + figures["tokens_per_s_of_rounds"]
        for name, figures in measured["subjects"].items()
    }
    goals = {one["name"].removeprefix(f"{OURS} / "): one["goal"] for one in measured["goals"]}
    return measured | _compared(speeds, goals)


def same_tokens(played: dict[str, list[list[Run]]]) -> dict[str, dict[str, int]]:
    """By subject: completions, those identical to our first subject's, and the least number of tokens that agree.

    Raises RuntimeError if a subject's greedy tokens differ from the beginning.
    """
    tokens = {
        name: [completion for run in rounds[0] for completion in run.tokens]
        for name, rounds in played.items()
    }
    reference = tokens[OURS]
    same = {}
    for name, completions in tokens.items():
        agreeing = [
            next(
                (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
                min(len(one), len(other)),
            )
            for one, other in zip(completions, reference, strict=True)
        ]
        for number, (agree, other) in enumerate(zip(agreeing, reference, strict=True)):
            if agree < min(CERTAIN_TOKENS, len(other)):
                raise RuntimeError(
                    f"{name} doesn't run the same model: of prompt {number} it agrees with {OURS} in {agree} greedy "
                    f"tokens: {completions[number][:CERTAIN_TOKENS]} and {other[:CERTAIN_TOKENS]}"
                )
        same[name] = {
            "completions": len(completions),
            "identical": sum(map(list.__eq__, completions, reference)),
            "least_tokens_that_agree": min(agreeing),
        }
    return same


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=Settings.rounds, help=f"default: {Settings.rounds}")
    parser.add_argument("--max-tokens", type=int, default=Settings.max_tokens)
    parser.add_argument("--parts", default="one,many", help="default: one,many")
    parser.add_argument("--quick", action="store_true", help="fewer prompts, shorter completions")
    parser.add_argument("--add", action="store_true", help="keep the stored rounds and add to them")
    parser.add_argument("--tunix-python", default=Interpreters.tunix, help=f"default: {Interpreters.tunix}")
    parser.add_argument("--torch-python", default=Interpreters.torch, help=f"default: {Interpreters.torch}")
    parser.add_argument("--output", type=Path, default=PATH)
    parsed = parser.parse_args(arguments)
    parts = tuple(parsed.parts.split(","))
    if unknown := sorted(set(parts) - {"one", "many"}):
        parser.error(f"--parts: expected one, many or both, got {', '.join(unknown)}")
    settings = dataclasses.replace(QUICK if parsed.quick else FULL, parts=parts)
    if not parsed.quick:
        settings = dataclasses.replace(settings, rounds=parsed.rounds, max_tokens=parsed.max_tokens)
    console = Console()
    results = Results(parsed.output, machine.describe())
    stored = dict(results.parts.get(PART, {"cells": {}})["cells"]) if parsed.add else {}
    rounds = [len(one["subjects"][OURS]["tokens_per_s_of_rounds"]) for one in stored.values()]
    settings = dataclasses.replace(settings, first_round=max(rounds, default=0))
    measured: dict[str, dict[str, Any]] = {}

    def save(title: str, one: dict[str, Any]) -> None:
        measured[title] = with_rounds_of(stored[title], one) if title in stored else one
        results.put(PART, TITLE, title, dataclasses.asdict(settings), measured[title])

    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(smollm2(), Path(scratch), lambda text: console.print(text, highlight=False))
        try:
            measure(settings, bench, save, Interpreters(parsed.tunix_python, parsed.torch_python))
        except RuntimeError as error:
            sys.exit(f"{parser.prog}: {error}")
    print_cells(measured, console)
    console.print(f"Written to {parsed.output}", highlight=False)


if __name__ == "__main__":
    main()

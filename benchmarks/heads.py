"""Drafting by the policy's own heads, by the trie, and by both, on a language whose entropy is known.

    python -m benchmarks.heads [--steps 600] [--output benchmarks/results/heads.json]

Trains a small policy with two heads (`benchmarks.heads_policy`) and lets it write texts of three styles at
temperature 1: novel ones, repetitive ones, and mixtures. Reported are tokens per step, the bonus token included, of

- "mtp chain": what the heads name first, two tokens ahead, beside the best possible with such heads: what a walk over
  the same texts reaches that takes each token they name rightly there; and beside 1 + a + a b, where a is how
  often head 1 is right over all places, and b how often head 2 is where head 1 is;
- "mtp", "trie", "hybrid": the drafters with their defaults, drafting in every step whether that pays or not.

All of them, and drafting off, must write the same tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.heads_language import STYLES, Language, Style
from benchmarks.heads_policy import CONFIG, Schedule, losses, texts, train
from benchmarks.machine import describe, write_results
from rollout_spec import DraftConfig, EngineConfig, RolloutEngine, SamplingParams
from rollout_spec.models import Params, build

RESULTS = Path(__file__).parent / "results" / "heads.json"
DRAFTERS = {
    "off": DraftConfig(kind="none"),
    "mtp chain": DraftConfig(kind="mtp", gate=False, head_depth=2, branching=False),
    "mtp": DraftConfig(kind="mtp", gate=False),
    "trie": DraftConfig(kind="trie", gate=False),
    "hybrid": DraftConfig(kind="hybrid", gate=False),
}
PROMPT = 8
"""Tokens of a prompt, the style included."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """steps: of training. prompts: of each style. max_tokens: of each completion."""

    steps: int = Schedule.steps
    prompts: int = 32
    max_tokens: int = 160
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """How often each head names the token that came, given that those before it did; and what that allows.

    best_tokens_per_step: of a chain of two drafts in every step, beginning where those steps would. Where one token
    is hard to guess its neighbours are too, so this is a little less than `mean_tokens_per_step`.
    """

    first: float
    second: float
    best_tokens_per_step: float

    @property
    def mean_tokens_per_step(self) -> float:
        """The same if every place were as hard as the mean."""
        return 1 + self.first + self.first * self.second


def accuracy(params: Params, rows: NDArray[np.int32], first: int) -> Accuracy:
    """Of both heads on texts int32[B, T], of the tokens from `first` on, which are a completion's."""
    ahead = jax.jit(lambda params, tokens: nnx.merge(build(CONFIG), params).logits_ahead(tokens, 2))
    named = np.asarray(jnp.argmax(ahead(params, jnp.asarray(rows)), axis=-1))
    one = named[0, :, :-2] == rows[:, 2:]  # of the draft of token i + 2 behind place i
    two = one[:, :-1] & (named[1, :, :-3] == rows[:, 3:])  # and of token i + 3 too
    tokens, steps = rows[:, first:].size, 0
    for right, both in zip(one.tolist(), two.tolist(), strict=True):
        last = first  # a step over the prompt emits the first token, and drafts nothing
        steps += 1
        while last + 1 < rows.shape[1]:
            drafts = right[last - 1] + (last + 2 < rows.shape[1] and both[last - 1])
            last, steps = last + 1 + drafts, steps + 1
    one = one[:, first - 2 : -1]
    return Accuracy(float(one.mean()), float(two[:, first - 2 :].sum() / max(1, one.sum())), tokens / steps)


def prompts_of(language: Language, style: Style, settings: Settings) -> list[list[int]]:
    """The same for all drafters."""
    generator = np.random.default_rng([settings.seed, STYLES.index(style), 1])
    return [language.write(style, PROMPT, generator).tolist() for _ in range(settings.prompts)]


def write(
    params: Params, draft: DraftConfig, prompts: Sequence[list[int]], settings: Settings
) -> tuple[NDArray[np.int32], dict[str, Any]]:
    """Prompts and completions int32[B, T], and what drafting did."""
    config = EngineConfig(
        max_seqs=8, max_seq_len=PROMPT + settings.max_tokens, seed=settings.seed, draft=draft
    )
    with RolloutEngine(CONFIG, params, config=config) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=settings.max_tokens, ignore_eos=True))
        stats = engine.stats()
    written = [[*prompt, *out.completions[0].token_ids] for prompt, out in zip(prompts, outputs, strict=True)]
    return np.array(written, np.int32), {
        "tokens_per_step": stats.acceptance_length,
        "nodes_per_step": stats.nodes_per_step,
        "drafted_by_depth": stats.drafted_by_depth,
        "accepted_by_depth": stats.accepted_by_depth,
    }


def measure_style(params: Params, language: Language, style: Style, settings: Settings) -> dict[str, Any]:
    """All drafters on texts of one style."""
    prompts = prompts_of(language, style, settings)
    plain, drafters = None, {}
    for name, draft in DRAFTERS.items():
        rows, drafters[name] = write(params, draft, prompts, settings)
        plain = rows if plain is None else plain
        drafters[name]["tokens_identical"] = bool((rows == plain).all())
    assert plain is not None
    found = accuracy(params, plain, PROMPT)
    return {
        "entropy": language.entropy(list(plain[:4]), PROMPT),
        "heads_right": [found.first, found.second],
        "best_tokens_per_step": found.best_tokens_per_step,
        "mean_tokens_per_step": found.mean_tokens_per_step,
        "drafters": drafters,
    }


def measure(settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """Training and all measurements."""
    language = Language(settings.seed)
    schedule = Schedule(steps=settings.steps)
    params = train(language, schedule, settings.seed, say)
    generator = np.random.default_rng([settings.seed, 2])
    held_out = texts(language, 4 * len(STYLES), schedule.length, generator)
    results: dict[str, Any] = {
        "nats": np.asarray(jax.jit(losses)(params, jnp.asarray(held_out))).tolist(),
        "language_nats": language.nats(list(held_out)),
        "styles": {},
    }
    say(
        f"Held out: {results['nats'][0]:.4f} nats a token, {results['language_nats']:.4f} by the language itself"
    )
    for style in STYLES:
        say(f"{style} ...")
        results["styles"][style] = measure_style(params, language, style, settings)
    return results


def tables(results: dict[str, Any]) -> list[Table]:
    """Tokens per step, and the chain beside the best."""
    lengths = Table("texts", *DRAFTERS, title="Tokens per step", title_justify="left")
    columns = ("head 1 right", "head 2 right", "mtp chain", "best possible", "share", "1 + a + a b")
    best = Table("texts", *columns, title="A chain of two drafts", title_justify="left")
    for style, found in results["styles"].items():
        drafters = found["drafters"]
        lengths.add_row(style, *(f"{drafters[name]['tokens_per_step']:.3f}" for name in DRAFTERS))
        chain, bound = drafters["mtp chain"]["tokens_per_step"], found["best_tokens_per_step"]
        right = [f"{share:.1%}" for share in found["heads_right"]]
        mean = f"{found['mean_tokens_per_step']:.3f}"
        best.add_row(style, *right, f"{chain:.3f}", f"{bound:.3f}", f"{chain / bound:.1%}", mean)
    return [lengths, best]


def faults(results: dict[str, Any]) -> list[str]:
    """Sentences about what is not as it must be."""
    found = []
    for style, one in results["styles"].items():
        lengths = {name: drafter["tokens_per_step"] for name, drafter in one["drafters"].items()}
        for name, drafter in one["drafters"].items():
            if not drafter["tokens_identical"]:
                found.append(f"{style}: {name} changed a token")
        if lengths["mtp chain"] < 0.95 * one["best_tokens_per_step"]:
            found.append(f"{style}: the chain is below 95% of what its heads allow")
        better = max(lengths["trie"], lengths["mtp"])
        if lengths["hybrid"] < better or (style == "mixed" and lengths["hybrid"] == better):
            found.append(f"{style}: hybrid {lengths['hybrid']:.3f}, the better of trie and mtp {better:.3f}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if something is not as it must be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in dataclasses.fields(Settings):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parsed = vars(parser.parse_args(arguments))
    output, settings, console = parsed.pop("output"), Settings(**parsed), Console()
    described = describe()
    results = measure(settings, lambda text: console.print(text, highlight=False))
    write_results(output, described, settings, results)
    console.print(*tables(results))
    wrong = faults(results)
    for fault in wrong:
        console.print(fault, style="red")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

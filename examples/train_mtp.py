"""Adds a multi-token-prediction head to SmolLM2-135M and trains it on text that the model itself wrote.

    python -m examples.train_mtp [--quick] [--help]

The model has no such head. It gets one, `rollout_spec.training.init_mtp_heads`, answers some math problems, and the
head learns from the answers what comes next but one, `rollout_spec.training.mtp_loss`. The rest of the model stays as
it is, so its tokens do too: checked at the end against an engine that drafts nothing. Before, during and after the
training the head drafts the model's greedy answers to other problems.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from examples.grpo import completions, same_tokens, timed_generate
from examples.smollm2 import fetch
from rollout_spec import DraftConfig, EngineConfig, RolloutEngine, RolloutOutput, SamplingParams
from rollout_spec.draft.config import DraftKind
from rollout_spec.intake import Prompt
from rollout_spec.loading import LoadedModel, load_model
from rollout_spec.models import Params
from rollout_spec.training import init_mtp_heads, mtp_loss, trunk_states

PROBLEMS = Path(__file__).parent.parent / "benchmarks" / "data" / "prompts.jsonl"
KINDS: tuple[DraftKind, ...] = ("none", "trie", "mtp", "hybrid")


@dataclasses.dataclass(frozen=True)
class Settings:
    """All knobs of a run. Lengths in tokens."""

    train_prompts: int = 40
    held_out_prompts: int = 16
    samples: int = 4  # answers of each training prompt
    temperature: float = 0.5  # of those answers; held-out ones are greedy
    max_tokens: int = 128
    max_prompt: int = 192  # longer problems are left out
    epochs: int = 4  # times that the training goes over all answers
    measurements: int = 4  # of the head while it trains
    rows: int = 4  # answers in an optimizer step
    learning_rate: float = 1e-3
    other_tokens: int = 2048  # that compete in an optimizer step beside those that occur in the answers
    depth: int = 2  # tokens that the head drafts ahead, and learns to
    seed: int = 0


FULL = Settings()
QUICK = Settings(train_prompts=2, held_out_prompts=2, samples=1, max_tokens=16, epochs=1, measurements=1)


@dataclasses.dataclass(frozen=True)
class Measured:
    """The head on the held-out problems after so many seconds of training.

    tokens_per_step: the bonus token included. accepted_share: of the head's first choices 1, 2, ... tokens ahead.
    loss: nats a token on the answers trained on, of the last steps.
    """

    trained_s: float
    steps: int
    loss: float | None
    tokens_per_step: float
    accepted_share: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Prompts and answers. token_ids int32[N, L], padded at the right; answered bool[N, L]: the answers' tokens."""

    token_ids: NDArray[np.int32]
    answered: NDArray[np.bool_]


def make_rows(outputs: Sequence[RolloutOutput]) -> Rows:
    """One row for each completion."""
    texts = [
        (output.prompt_token_ids, completion.token_ids)
        for output in outputs
        for completion in output.completions
    ]
    length = max(len(prompt) + len(answer) for prompt, answer in texts)
    rows = Rows(np.zeros((len(texts), length), np.int32), np.zeros((len(texts), length), bool))
    for number, (prompt, answer) in enumerate(texts):
        end = len(prompt) + len(answer)
        rows.token_ids[number, :end] = [*prompt, *answer]
        rows.answered[number, len(prompt) : end] = True
    return rows


class HeadTrainer:
    """Trains the heads of a model whose trunk stays as it is, and saves what that allows to save on few cores.

    The trunk runs over the texts once. And of the vocabulary only the tokens that occur in them compete, beside some
    others, new ones in each step: scoring all would take most of the time.
    """

    def __init__(self, model: LoadedModel, rows: Rows, settings: Settings) -> None:
        self.params = model.params
        self.settings = settings
        total = settings.epochs * -(-len(rows.token_ids) // settings.rows)
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, settings.learning_rate, max(1, total // 20), total + 1
        )
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))
        self._optimizer_state = optimizer.init(model.params["mtp"])

        occurring, numbers = np.unique(rows.token_ids, return_inverse=True)
        self._occurring = occurring.astype(np.int32)
        self._others = np.setdiff1d(np.arange(model.config.vocab_size, dtype=np.int32), self._occurring)
        self._num_others = min(settings.other_tokens, len(self._others))
        competing = len(occurring) + self._num_others
        config = dataclasses.replace(model.config, vocab_size=competing)

        def loss(heads: Params, params: Params, vocabulary: jax.Array, *batch: jax.Array) -> jax.Array:
            tokens, answered, states = batch
            cut = {**params, "mtp": heads, **cut_vocabulary(params, vocabulary)}
            return mtp_loss(cut, tokens, answered, config=config, depths=settings.depth, states=states)

        def step(params: Params, optimizer_state: Any, *batch: jax.Array) -> tuple[Params, Any, jax.Array]:
            value, gradients = jax.value_and_grad(loss)(params["mtp"], params, *batch)
            updates, optimizer_state = optimizer.update(gradients, optimizer_state, params["mtp"])
            return optax.apply_updates(params["mtp"], updates), optimizer_state, value

        self._step = jax.jit(step, donate_argnums=1)
        run_trunk = jax.jit(lambda params, tokens: trunk_states(params, tokens, config=model.config))
        parts = in_parts(np.arange(len(rows.token_ids)), settings.rows)
        states = np.concatenate([run_trunk(model.params, rows.token_ids[some]) for some in parts])
        numbers = numbers.reshape(rows.token_ids.shape).astype(np.int32)
        self._data = (numbers, rows.answered, states[: len(rows.token_ids)])

    def epoch(self, number: int) -> Iterator[float]:
        """Takes the steps of an epoch, its rows in random order; yields the loss of each, in nats a token."""
        generator = np.random.default_rng([self.settings.seed, number])
        order = generator.permutation(len(self._data[0]))
        for some in in_parts(order, self.settings.rows):
            others = generator.choice(self._others, self._num_others, replace=False)
            vocabulary = np.concatenate([self._occurring, others])
            batch = [array[some] for array in self._data]
            heads, self._optimizer_state, value = self._step(
                self.params, self._optimizer_state, vocabulary, *batch
            )
            self.params = {**self.params, "mtp": heads}
            yield float(value)


def cut_vocabulary(params: Params, vocabulary: jax.Array) -> Params:
    """Embedding and output head of the tokens int32[N] alone: token i is then vocabulary[i]."""
    parts = {"embed_tokens": {"embedding": params["embed_tokens"]["embedding"][vocabulary]}}
    if "lm_head" in params:
        parts["lm_head"] = {"kernel": params["lm_head"]["kernel"][:, vocabulary]}
    return parts


def in_parts(numbers: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    """Parts of `size` numbers; the last one is filled up from the beginning."""
    return list(np.resize(numbers, -(-len(numbers) // size) * size).reshape(-1, size))


def engine_of(model: LoadedModel, kind: DraftKind, settings: Settings) -> RolloutEngine:
    """An engine that drafts in every step, whether that pays or not, so that acceptance is measured everywhere."""
    draft = DraftConfig(kind=kind, gate=False, max_nodes=12, head_depth=settings.depth, head_choices=1)
    config = EngineConfig(max_seqs=8, max_seq_len=settings.max_prompt + settings.max_tokens, draft=draft)
    return RolloutEngine(model.config, model.params, tokenizer=model.tokenizer, config=config)


def load_prompts(model: LoadedModel, settings: Settings) -> tuple[list[Prompt], list[Prompt]]:
    """Token ids of the math problems to train on, and of those to measure with."""
    assert model.tokenizer is not None
    entries = [json.loads(line) for line in PROBLEMS.read_text().splitlines()]
    texts = [entry["prompt"] for entry in entries if entry["kind"] == "math"]
    prompts: list[Prompt] = []
    for text in texts:
        ids = model.tokenizer.apply_chat_template([{"role": "user", "content": text}])
        if len(ids) <= settings.max_prompt:
            prompts.append(ids)
    held_out, rest = prompts[: settings.held_out_prompts], prompts[settings.held_out_prompts :]
    return rest[: settings.train_prompts], held_out


def measure(
    engine: RolloutEngine, params: Params, prompts: Sequence[Prompt], settings: Settings
) -> tuple[float, tuple[float, ...], list[RolloutOutput]]:
    """Tokens per step, the accepted share of drafts at each depth, and the greedy answers."""
    engine.update_weights(params)
    engine.reset_stats()
    greedy = SamplingParams(temperature=0.0, max_tokens=settings.max_tokens)
    outputs = engine.generate(prompts, greedy)
    stats = engine.stats()
    shares = [
        accepted / drafted
        for accepted, drafted in zip(stats.accepted_by_depth, stats.drafted_by_depth, strict=True)
    ]
    return stats.acceptance_length, tuple(shares), outputs


def run(model: LoadedModel, settings: Settings, console: Console) -> dict[str, Any]:
    """Everything: answers, training, measurements; what is written as JSON."""
    train_prompts, held_out = load_prompts(model, settings)
    model = init_mtp_heads(model, seed=settings.seed)
    with engine_of(model, "trie", settings) as engine:
        sampling = SamplingParams(
            n=settings.samples,
            temperature=settings.temperature,
            max_tokens=settings.max_tokens,
            seed=settings.seed,
        )
        outputs, seconds = timed_generate(engine, train_prompts, [sampling] * len(train_prompts))
    count = sum(len(completion.token_ids) for completion in completions(outputs))
    console.print(f"{len(train_prompts)} problems answered: {count} tokens in {seconds:.0f} s")

    started = time.perf_counter()
    trainer = HeadTrainer(model, make_rows(outputs), settings)
    trained_s = time.perf_counter() - started
    console.print(f"The trunk has run over them in {trained_s:.0f} s")
    curve: list[Measured] = []
    losses: list[float] = []
    drafting = engine_of(model, "mtp", settings)

    def look() -> None:
        length, shares, _ = measure(drafting, trainer.params, held_out, settings)
        loss = float(np.mean(losses[-10:])) if losses else None
        curve.append(Measured(trained_s, len(losses), loss, length, shares))
        console.print(line(curve[-1]), highlight=False)

    look()
    steps = settings.epochs * len(in_parts(np.arange(count_rows(outputs)), settings.rows))
    wanted = [round(steps * (number + 1) / settings.measurements) for number in range(settings.measurements)]
    for number in range(settings.epochs):
        started = time.perf_counter()
        for value in trainer.epoch(number):
            losses.append(value)
            if len(losses) in wanted:
                trained_s += time.perf_counter() - started
                look()
                started = time.perf_counter()
        trained_s += time.perf_counter() - started
    drafting.close()

    trained = dataclasses.replace(model, params=trainer.params)
    lengths, same, plain = {}, True, None
    for kind in KINDS:
        with engine_of(trained, kind, settings) as engine:
            lengths[kind], _, answers = measure(engine, trainer.params, held_out, settings)
        plain = answers if plain is None else plain
        same = same and same_tokens(answers, plain)
    return {
        "settings": dataclasses.asdict(settings),
        "answer_tokens": count,
        "answering_s": seconds,
        "curve": [dataclasses.asdict(one) for one in curve],
        "tokens_per_step": lengths,
        "tokens_identical": same,
    }


def count_rows(outputs: Sequence[RolloutOutput]) -> int:
    return len(completions(outputs))


def line(one: Measured) -> str:
    shares = ", ".join(f"{share:.0%}" for share in one.accepted_share)
    loss = "" if one.loss is None else f", loss {one.loss:.2f}"
    return (
        f"{one.trained_s:.0f} s of training, {one.steps} steps{loss}: {one.tokens_per_step:.3f} tokens a step; "
        f"accepted 1, 2, ... tokens ahead: {shares}"
    )


def parse_arguments(arguments: Sequence[str] | None) -> tuple[Settings, Path]:
    """Settings and output folder; the other options start from `FULL`, or from `QUICK` if --quick is given."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    defaults = QUICK if first.parse_known_args(arguments)[0].quick else FULL
    parser = argparse.ArgumentParser(
        description=__doc__, parents=[first], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in dataclasses.fields(Settings):
        default = getattr(defaults, field.name)
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), default=default, help=f"default: {default}")
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder of the numbers")
    parsed = vars(parser.parse_args(arguments))
    output = parsed.pop("output")
    del parsed["quick"]
    return Settings(**parsed), output


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all of it; returns 1 if a head changed a token, which it never may."""
    settings, output = parse_arguments(arguments)
    console = Console()
    console.print("Loading SmolLM2-135M-Instruct (4-bit weights, dequantised to float32) ...")
    results = run(load_model(fetch()), settings, console)
    table = Table("drafts of", "tokens a step", title="Held-out problems, greedy", title_justify="left")
    for kind, length in results["tokens_per_step"].items():
        table.add_row(kind, f"{length:.3f}")
    console.print(table)
    console.print(f"Tokens {'identical' if results['tokens_identical'] else 'DIFFER'}")
    output.mkdir(parents=True, exist_ok=True)
    (output / "train_mtp.json").write_text(json.dumps(results, indent=2) + "\n")
    return 0 if results["tokens_identical"] else 1


if __name__ == "__main__":
    raise SystemExit(main())

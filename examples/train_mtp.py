"""Adds a multi-token-prediction head to SmolLM2-135M, trains it on text the model itself writes, and drafts with it.

    python -m examples.train_mtp [--minutes 8] [--output outputs/train_mtp.json]

The trunk is frozen, so no token changes: only how many of them a step emits. Prints tokens a step at temperature 0 on
prompts that the head was not trained on, before, during and after, and writes the curve as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray
from rich.console import Console

from examples.smollm2 import fetch
from rollout_spec import DraftConfig, EngineConfig, RolloutEngine, SamplingParams
from rollout_spec.loading import load_model
from rollout_spec.training import init_mtp_heads, mtp_loss

PROMPTS = Path(__file__).parents[1] / "benchmarks" / "data" / "prompts.jsonl"


@dataclasses.dataclass(frozen=True)
class Settings:
    """minutes: of training, the writing of text not counted. samples, length: completions of a training prompt, and
    their tokens. rows: texts in a batch. held_out: prompts that nothing is trained on. checks: measurements on the way.
    """

    minutes: float = 8.0
    samples: int = 8
    length: int = 160
    rows: int = 8
    learning_rate: float = 1e-3
    held_out: int = 12
    checks: int = 4


def train(settings: Settings, console: Console) -> dict[str, Any]:
    """Trains a head; returns the curve of tokens a step, and the loss."""
    model = init_mtp_heads(load_model(fetch()))
    assert model.tokenizer is not None
    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    chats = [[{"role": "user", "content": line["prompt"]}] for line in lines if line["kind"] == "math"]
    engine = RolloutEngine(
        model.config,
        model.params,
        tokenizer=model.tokenizer,
        config=EngineConfig(
            max_seqs=16,
            max_seq_len=512,
            draft=DraftConfig(kind="mtp", gate=False, head_depth=2, head_choices=1),
        ),
    )
    held_out, known = chats[: settings.held_out], chats[settings.held_out :]

    def tokens_per_step() -> float:
        engine.reset_stats()
        engine.generate(held_out, SamplingParams(temperature=0.0, max_tokens=96))
        return engine.stats().acceptance_length

    curve = [{"minutes": 0.0, "tokens_per_step": tokens_per_step()}]
    console.print(f"untrained head: {curve[0]['tokens_per_step']:.3f} tokens a step")
    console.print("The model writes the texts to train on ...")
    outputs = engine.generate(known, SamplingParams(n=settings.samples, max_tokens=settings.length, seed=0))
    texts = [
        np.concatenate([output.prompt_token_ids, completion.token_ids])
        for output in outputs
        for completion in output.completions
    ]
    prompt_lens = [len(output.prompt_token_ids) for output in outputs for _ in output.completions]
    tokens, mask = padded(texts, prompt_lens)
    console.print(f"{len(texts)} texts, {int(mask.sum()):,} tokens")

    trunk = {name: part for name, part in model.params.items() if name != "mtp"}
    heads = model.params["mtp"]
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(settings.learning_rate, b2=0.95))
    state = optimizer.init(heads)

    @jax.jit
    def step(
        trunk: Any, heads: Any, state: Any, tokens: jax.Array, mask: jax.Array
    ) -> tuple[Any, Any, jax.Array]:
        loss, gradient = jax.value_and_grad(
            lambda part: mtp_loss({**trunk, "mtp": part}, tokens, mask, config=model.config)
        )(heads)
        updates, state = optimizer.update(gradient, state, heads)
        return optax.apply_updates(heads, updates), state, loss

    random, losses, spent = np.random.default_rng(0), [], 0.0
    for check in range(1, settings.checks + 1):
        until = settings.minutes * 60 * check / settings.checks
        started = time.perf_counter()
        while spent + time.perf_counter() - started < until:
            rows = random.choice(len(texts), settings.rows, replace=False)
            heads, state, loss = step(trunk, heads, state, jnp.asarray(tokens[rows]), jnp.asarray(mask[rows]))
            losses.append(float(loss))
        spent += time.perf_counter() - started
        engine.update_weights({**trunk, "mtp": heads})
        curve.append({"minutes": spent / 60, "tokens_per_step": tokens_per_step()})
        console.print(
            f"{spent / 60:.1f} minutes, {len(losses)} steps, loss {np.mean(losses[-20:]):.3f}: "
            f"{curve[-1]['tokens_per_step']:.3f} tokens a step"
        )
    engine.close()
    return {"curve": curve, "first_loss": losses[0], "last_loss": float(np.mean(losses[-20:]))}


def padded(
    texts: Sequence[NDArray[np.int32]], prompt_lens: Sequence[int]
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """int32[N, T] and bool[N, T]: texts, padded at the right, and which of their tokens are a completion's."""
    longest = max(map(len, texts))
    tokens = np.zeros((len(texts), longest), np.int32)
    mask = np.zeros(tokens.shape, bool)
    for row, (text, start) in enumerate(zip(texts, prompt_lens, strict=True)):
        tokens[row, : len(text)] = text
        mask[row, start : len(text)] = True
    return tokens, mask


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=Settings.minutes)
    parser.add_argument("--samples", type=int, default=Settings.samples)
    parser.add_argument("--output", type=Path, default=Path("outputs/train_mtp.json"))
    parsed = parser.parse_args(arguments)
    settings = Settings(minutes=parsed.minutes, samples=parsed.samples)
    found = train(settings, Console())
    parsed.output.parent.mkdir(parents=True, exist_ok=True)
    parsed.output.write_text(
        json.dumps({"settings": dataclasses.asdict(settings), "results": found}, indent=1) + "\n"
    )
    print(f"wrote {parsed.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

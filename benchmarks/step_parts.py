"""Where a step's time goes: matmuls, attention, sampling and the host, at 1 and 16 requests that decode.

    python -m benchmarks.step_parts [--cached N]

Each part is compiled and timed alone, on the arrays that a plain step has, so their sum need not be the whole. The
host's part is of a whole run of `generate`.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table
from rollout_spec.kernels.sampling import tree_sample
from rollout_spec.kernels.tree_attention import tree_paged_attention

from benchmarks import machine
from examples.smollm2 import fetch
from rollout_spec import DraftConfig, EngineConfig, RolloutEngine, SamplingParams
from rollout_spec.loading import load_model
from rollout_spec.models import build
from rollout_spec.step_inputs import HostBatch, StepBatch, StepShape, batch_layout

RESULTS = Path(__file__).parent / "results" / "step_parts.json"


@dataclasses.dataclass(frozen=True)
class Settings:
    """requests: numbers of them. cached: tokens of each in the cache. repeats: of each measurement."""

    requests: tuple[int, ...] = (1, 16)
    cached: int = 160
    repeats: int = 25


def median_ms(call: Callable[[], Any], repeats: int) -> float:
    """Of calls that return device arrays, the first two left out."""
    seconds = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds[2:])


def plain_step(shape: StepShape, pages: int, cached: int, page_size: int) -> HostBatch:
    """A token for each of the shape's sequences, behind `cached` others in pages of their own."""
    packed = batch_layout(shape, pages).new()
    batch: Any = packed.arrays
    numbers = np.arange(shape.sequences)
    batch.cu_q_lens[:] = np.arange(shape.sequences + 1)
    batch.kv_lens[:] = cached + 1
    batch.positions[:] = cached
    own = -(-(cached + 1) // page_size)
    batch.page_table[:, :own] = numbers[:, None] * own + np.arange(own)
    batch.num_seqs[0] = shape.sequences
    batch.row_tokens[:] = batch.rows.sequences[:] = numbers
    return packed


def parts(engine: RolloutEngine, requests: int, settings: Settings) -> dict[str, float]:
    """Milliseconds of each part of a plain step of `requests` requests."""
    executor, config = engine._core.executor, engine.model_config
    shape = StepShape(requests, requests, requests)
    layout = batch_layout(shape, executor.pages_per_sequence)
    packed = plain_step(shape, executor.pages_per_sequence, settings.cached, engine.config.page_size)
    batch = layout.unpack(jnp.asarray(packed.buffer))
    whole = [executor.run(shape, packed).seconds for _ in range(settings.repeats + 2)]
    params, state = engine.params, executor.state

    @jax.jit
    def matmuls(params: dict, batch: StepBatch) -> jax.Array:
        model = nnx.merge(build(config), params)
        hidden = model.hidden_states(batch.token_ids, batch.positions, lambda layer, q, k, v: q)
        return model.unembed(hidden[batch.row_tokens])

    def attend(
        pages: list[jax.Array], q: jax.Array, k: jax.Array, batch: StepBatch
    ) -> tuple[jax.Array, list]:
        out = jnp.zeros(())
        written: list[jax.Array] = []
        for layer in pages:
            one, after = tree_paged_attention(
                q,
                k,
                k,
                layer,
                batch.kv_lens,
                batch.page_table,
                batch.cu_q_lens,
                batch.ancestors,
                batch.num_seqs,
                scale=config.attention_scale,
            )
            out, written = out + jnp.sum(one), [*written, after]
        return out, written

    attention = jax.jit(attend, donate_argnums=0)
    sampling = jax.jit(lambda logits, batch, tables: tree_sample(logits, batch.rows, batch.sequences, tables))
    pages = [jnp.zeros_like(layer) for layer in state.kv_pages]
    q = jnp.ones((requests, config.num_heads, config.head_dim))
    k = jnp.ones((requests, config.num_kv_heads, config.head_dim))
    logits = jnp.ones((requests, config.vocab_size))

    def run_attention() -> jax.Array:
        nonlocal pages
        out, pages = attention(pages, q, k, batch)
        return out

    return {
        "whole step": 1e3 * statistics.median(whole[2:]),
        "matmuls and norms": median_ms(lambda: matmuls(params, batch), settings.repeats),
        "attention": median_ms(run_attention, settings.repeats),
        "sampling": median_ms(lambda: sampling(logits, batch, state.tables), settings.repeats),
        "host": host_ms(engine, requests),
    }


def host_ms(engine: RolloutEngine, requests: int) -> float:
    """Milliseconds a step outside the device call, generating for so many requests."""
    engine.reset_stats()
    prompts = np.random.default_rng(0).integers(0, engine.model_config.vocab_size, (requests, 32))
    engine.generate(list(prompts), SamplingParams(max_tokens=32, ignore_eos=True))
    stats = engine.stats()
    return 1e3 * stats.host_s / stats.steps


def measure(settings: Settings) -> dict[str, dict[str, float]]:
    """The parts for each number of requests, with drafting off."""
    model = load_model(fetch())
    results = {}
    for requests in settings.requests:
        config = EngineConfig(max_seqs=requests, max_seq_len=512, draft=DraftConfig(kind="none"))
        results[str(requests)] = parts(
            RolloutEngine(model.config, model.params, config=config), requests, settings
        )
    return results


def print_table(results: dict[str, dict[str, float]], console: Console) -> None:
    """A row for each part, a column for each number of requests."""
    table = Table("ms", *[f"{requests} request(s)" for requests in results])
    for part in next(iter(results.values())):
        table.add_row(part, *[f"{found[part]:.2f}" for found in results.values()])
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cached", type=int, default=Settings.cached, help=f"default: {Settings.cached}")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parsed = parser.parse_args(arguments)
    settings = Settings(cached=parsed.cached)
    described = machine.describe()
    results = measure(settings)
    print_table(results, Console())
    machine.write_results(parsed.output, described, settings, results)


if __name__ == "__main__":
    main()

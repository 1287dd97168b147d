"""What a weight update costs, beside the least that it could: a copy, or reading the file.

    python -m benchmarks.weights [--rounds N]

SmolLM2-135M in float32. An update and what it is compared with take turns, and figures are medians over the rounds.
A stall is what a stream sees: by how much the longest time between two tokens of a request is longer with an update
than the median without. Writes benchmarks/results/weights.json and the table in docs/weights.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.huggingface_folder import save_huggingface
from benchmarks.weights_tables import replace_tables
from examples.smollm2 import fetch
from rollout_spec import DraftConfig, EngineConfig, RolloutEngine, SamplingParams
from rollout_spec.loading import load_model
from rollout_spec.requests import Request
from rollout_spec.weights import to_hf
from rollout_spec.weights.report import UPDATE_MODES

RESULTS = Path(__file__).parent / "results" / "weights.json"

TURNS = (
    ("device copy", "pytree"),
    ("pytree, taken over",),
    ("read_bytes", "fromfile", "safetensors"),
    ("named numpy arrays", "checksum"),
)
"""What takes turns: each finds memory as the others of its line left it, which decides about a third of the time."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """rounds: turns of every update. requests: that run while the modes are measured. tokens: of each."""

    rounds: int = 9
    requests: int = 8
    tokens: int = 48


@contextmanager
def counting_compilations() -> Iterator[list[str]]:
    """Names of what JAX traces, lowers or compiles while the block runs."""
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def seconds_of(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - started


def swaps(engine: RolloutEngine, folder: Path, settings: Settings) -> dict[str, Any]:
    """Seconds of an idle engine's updates and of their counterparts, in turns."""
    mine = jax.tree.map(jnp.copy, engine.params)
    copy_tree = jax.jit(lambda tree: jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), tree))
    held = jax.block_until_ready(copy_tree(mine))

    def copied() -> float:
        """A copy that takes the place of another, as an update's does: both are in memory for a while."""
        nonlocal held
        started = time.perf_counter()
        held = jax.block_until_ready(copy_tree(mine))
        return time.perf_counter() - started

    file = folder / "model.safetensors"
    named = {name: np.array(array) for name, array in to_hf(engine.model_config, engine.params)}

    def donated() -> float:
        nonlocal mine
        given = jax.block_until_ready(copy_tree(mine))
        places = memory_places(given)
        seconds = seconds_of(lambda: engine.update_weights(given, donate=True))
        assert memory_places(engine.params) == places, "the arrays were copied"
        return seconds

    calls: dict[str, Callable[[], float]] = {
        "device copy": copied,
        "pytree": lambda: seconds_of(lambda: engine.update_weights(mine)),
        "pytree, taken over": donated,
        "read_bytes": lambda: seconds_of(file.read_bytes),
        "fromfile": lambda: seconds_of(lambda: np.fromfile(file, np.uint8)),
        "safetensors": lambda: seconds_of(lambda: engine.update_weights(folder)),
        "named numpy arrays": lambda: seconds_of(lambda: engine.update_weights(named)),
        "checksum": lambda: seconds_of(engine.checksum),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()  # nothing is cold afterwards
    with counting_compilations() as compilations:
        for names in TURNS:
            for _ in range(settings.rounds):
                for name in names:
                    seconds[name].append(calls[name]())
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "seconds": medians,
        "beyond the copy": paired(seconds, "pytree", "device copy", lambda ours, least: ours - least),
        "share of read_bytes": paired(seconds, "safetensors", "read_bytes", lambda ours, least: least / ours),
        "share of fromfile": paired(seconds, "safetensors", "fromfile", lambda ours, least: least / ours),
        "compilations": len(compilations),
    }


def paired(
    seconds: dict[str, list[float]], ours: str, least: str, compare: Callable[[float, float], float]
) -> float:
    """Median of a comparison within each round."""
    return statistics.median(map(compare, seconds[ours], seconds[least]))


def memory_places(tree: Any) -> list[int]:
    """Addresses of the arrays of a tree that lies on one device."""
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


def stalls(engine: RolloutEngine, settings: Settings) -> dict[str, Any]:
    """How long running requests wait for an update in each mode, by how the weights are given."""
    mine = jax.tree.map(jnp.copy, engine.params)
    found: dict[str, Any] = {}
    for mode in UPDATE_MODES:  # compiles the sizes of step that occur
        stall(engine, mine, mode, False, dataclasses.replace(settings, rounds=1))
    with counting_compilations() as compilations:
        for mode in UPDATE_MODES:
            for donate in (False, True):
                found[f"{mode}, taken over" if donate else mode] = stall(engine, mine, mode, donate, settings)
    return {"modes": found, "compilations": len(compilations)}


@contextmanager
def token_times(engine: RolloutEngine, requests: list[Request]) -> Iterator[list[list[float]]]:
    """When each request got tokens while the block runs, those from steps inside of `update_weights` too."""
    times: list[list[float]] = [[] for _ in requests]
    core: Any = engine._core
    advance = core.advance

    def timed(**options: Any) -> None:
        before = [request.sequences[0].num_generated for request in requests]
        advance(**options)
        now = time.perf_counter()
        for request, count, own in zip(requests, before, times, strict=True):
            if request.sequences[0].num_generated > count:
                own.append(now)

    core.advance = timed
    try:
        yield times
    finally:
        core.advance = advance


def stall(engine: RolloutEngine, mine: Any, mode: Any, donate: bool, settings: Settings) -> dict[str, float]:
    """Medians over the rounds, in seconds. step: between a request's tokens without an update. stall: how much longer
    than that the longest time between two tokens of a request is with one. update: until `update_weights` returns."""
    steps, waits, updates = [], [], []
    for seed in range(settings.rounds):
        given = jax.block_until_ready(jax.tree.map(jnp.copy, mine)) if donate else mine
        sampling = SamplingParams(max_tokens=settings.tokens, ignore_eos=True, seed=seed)
        requests = [
            engine.submit(list(range(17 + place, 49 + place)), sampling) for place in range(settings.requests)
        ]
        while any(not request.begun or request.sequences[0].num_generated < 4 for request in requests):
            engine.step()
        with token_times(engine, requests) as times:
            for _ in range(9):
                engine.step()
            steps += np.diff(times[0]).tolist()
            first = len(times[0]) - 1
            updates.append(seconds_of(lambda: engine.update_weights(given, mode=mode, donate=donate)))  # noqa: B023
            updated = time.perf_counter()
            while any(
                not request.ended and own[-1] < updated for request, own in zip(requests, times, strict=True)
            ):
                engine.step()
        waits.append(max((np.diff(own[first:]).max() for own in times if len(own) > first + 1), default=0.0))
        engine.abort()
        engine.step()
    step = statistics.median(steps)
    return {
        "step_s": step,
        "stall_s": max(0.0, statistics.median(waits) - step),
        "update_s": statistics.median(updates),
    }


def print_results(results: dict[str, Any], console: Console) -> None:
    """Times, and what was wanted of them."""
    swap, table = results["swaps"], Table("update or counterpart", "ms", title="Idle", title_justify="left")
    for name, seconds in swap["seconds"].items():
        table.add_row(name, f"{1e3 * seconds:.1f}")
    modes = Table(
        "mode", "step, ms", "stall, ms", "in steps", "update, ms", title="Running", title_justify="left"
    )
    for mode, found in results["stalls"]["modes"].items():
        ratio = found["stall_s"] / found["step_s"]
        times = (f"{1e3 * found[name]:.1f}" for name in ("step_s", "stall_s"))
        modes.add_row(mode, *times, f"{ratio:.2f}", f"{1e3 * found['update_s']:.1f}")
    console.print(table, modes)
    console.print(
        f"pytree beyond the device copy: {1e3 * swap['beyond the copy']:+.1f} ms (wanted: at most 5)\n"
        f"safetensors, share of the speed of read_bytes: {swap['share of read_bytes']:.2f} (wanted: 0.7), of fromfile: "
        f"{swap['share of fromfile']:.2f}\n"
        f"compilations: {swap['compilations'] + results['stalls']['compilations']} (wanted: none)",
        highlight=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=Settings.rounds, help="turns of every update")
    settings = Settings(rounds=parser.parse_args().rounds)
    console, described = Console(), machine.describe()
    model = load_model(fetch())
    config = EngineConfig(max_seqs=settings.requests, max_seq_len=512, draft=DraftConfig(kind="none"))
    engine = RolloutEngine(model.config, model.params, config=config)
    with tempfile.TemporaryDirectory() as folder:
        save_huggingface(model.config, model.params, Path(folder))
        del model
        results = {"swaps": swaps(engine, Path(folder), settings), "stalls": stalls(engine, settings)}
    machine.write_results(RESULTS, described, settings, results)
    replace_tables()
    print_results(results, console)


if __name__ == "__main__":
    main()

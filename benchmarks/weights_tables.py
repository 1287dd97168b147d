"""The tables of docs/weights.md, from stored results of benchmarks.weights and benchmarks.weights_tpu."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.tables import replace_between

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "weights.md"
_GIB = 2**30


def replace_tables() -> None:
    """Rewrites the tables of which there are results."""
    contents: dict[str, Callable[[dict[str, Any]], str]] = {
        "weights.json": update_times_markdown,
        "weights_tpu.json": update_memory_markdown,
    }
    page = PAGE.read_text(encoding="utf-8")
    for name, markdown in contents.items():
        if (RESULTS / name).exists():
            stored = json.loads((RESULTS / name).read_text(encoding="utf-8"))
            page = replace_between(page, PAGE.name, name, lambda: markdown(stored))  # noqa: B023
    PAGE.write_text(page, encoding="utf-8")


def update_times_markdown(stored: dict[str, Any]) -> str:
    """What updates cost, and how long running requests wait for them."""
    results, described, settings = stored["results"], stored["machine"], stored["settings"]
    swaps, stalls = results["swaps"], results["stalls"]
    milliseconds = {name: 1e3 * seconds for name, seconds in swaps["seconds"].items()}
    lines = [
        "| update of an idle engine | ms | beside | ms |",
        "|---|---|---|---|",
        f"| pytree of jax arrays | {milliseconds['pytree']:.0f} | copying them on the device "
        f"| {milliseconds['device copy']:.0f} |",
        f"| the same, `donate=True` (nothing is copied) | {milliseconds['pytree, taken over']:.1f} | | |",
        f"| folder of safetensors | {milliseconds['safetensors']:.0f} | `Path.read_bytes` of the file "
        f"| {milliseconds['read_bytes']:.0f} |",
        f"| | | `numpy.fromfile`, which has large pages | {milliseconds['fromfile']:.0f} |",
        f"| (name, numpy array) pairs | {milliseconds['named numpy arrays']:.0f} | | |",
        f"| reading `engine.checksum()` | {milliseconds['checksum']:.0f} | | |",
        "",
        f"A pytree takes {1e3 * swaps['beyond the copy']:+.1f} ms against the copy alone; safetensors are read at "
        f"{swaps['share of read_bytes']:.1f} times the speed of `read_bytes` and {swaps['share of fromfile']:.2f} "
        f"times that of `fromfile` (the file is in the page cache); "
        f"{swaps['compilations'] + stalls['compilations']} compilations.",
        "",
        f"| {settings['requests']} running requests | a token takes, ms | one takes longer by, ms | in steps "
        "| the update, ms | donated: longer by, ms | the update, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    modes = stalls["modes"]
    for mode, found in modes.items():
        if mode.endswith(", taken over"):
            continue
        donated = modes[f"{mode}, taken over"]
        lines.append(
            f"| `{mode}` | {1e3 * found['step_s']:.0f} | {1e3 * found['stall_s']:.0f} "
            f"| {found['stall_s'] / found['step_s']:.1f} | {1e3 * found['update_s']:.0f} "
            f"| {1e3 * donated['stall_s']:.0f} | {1e3 * donated['update_s']:.0f} |"
        )
    lines += [
        "",
        f"SmolLM2-135M in float32 (538 MB), {described['cores']} cores ({described['processor']}), jax "
        f"{described['versions']['jax']}; medians of {settings['rounds']} rounds in turns "
        "(`python -m benchmarks.weights`).",
    ]
    return "\n".join(lines)


def update_memory_markdown(stored: dict[str, Any]) -> str:
    """Memory of a chip that an update takes."""
    settings = stored["settings"]
    lines = [
        "| trainer's layout | weights, GiB a chip | staging copy | largest temporaries | peak extra | programs |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in stored["results"].items():
        lines.append(
            f"| {name} | {one['weights'] / _GIB:.2f} | {one['staged'] / _GIB:.2f} "
            f"| {one['temporary'] / _GIB:.2f} | {one['extra'] / _GIB:.2f} | {one['programs']} |"
        )
    lines += [
        "",
        f"{settings['model']} in bfloat16, compiled for {settings['chip']} (`python -m benchmarks.weights_tpu`).",
    ]
    return "\n".join(lines)

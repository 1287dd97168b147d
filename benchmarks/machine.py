"""What a benchmark ran on: versions, cores, memory bandwidth."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("rollout-spec", "jax", "jaxlib", "flax", "numpy", "numba", "torch", "transformers")


def cores() -> int:
    """Cores that this process may use; rivals get as many threads."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe() -> dict[str, Any]:
    """Processor, cores and versions, to stand beside results."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cores": cores(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
    }


def write_results(path: Path, described: dict[str, Any], settings: Any, results: dict[str, Any]) -> None:
    """A JSON file of `describe()`, the settings (a dataclass) and what was measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": described, "settings": dataclasses.asdict(settings), "results": results}
    path.write_text(json.dumps(content, indent=2) + "\n")


def _processor() -> str:
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.is_file():
        for line in cpu_info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def copy_bandwidth(threads: int, *, megabytes: int = 512, repeats: int = 7) -> float:
    """Bytes per second that `threads` threads move in copying a large array: read and written both count."""
    source = np.ones(megabytes * 2**20, np.uint8)
    target = np.zeros_like(source)
    parts = list(zip(np.array_split(source, threads), np.array_split(target, threads), strict=True))
    seconds = []
    with ThreadPoolExecutor(threads) as executor:
        for _ in range(repeats):
            started = time.perf_counter()
            list(executor.map(lambda part: np.copyto(part[1], part[0]), parts))  # releases the GIL
            seconds.append(time.perf_counter() - started)
    return 2 * source.nbytes / statistics.median(seconds)

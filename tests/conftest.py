"""Fixtures of all tests, and a compilation cache that outlives a run."""

from __future__ import annotations

import gc
from pathlib import Path

import hypothesis
import jax
import pytest

from examples import smollm2

_ROOT = Path(__file__).resolve().parent.parent

# Tests compile many tiny programs; kept between runs, the second run spends its time on what is tested.
jax.config.update("jax_compilation_cache_dir", str(_ROOT / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


# The same examples in every run, so that a failure is the change's; `--hypothesis-profile=explore` looks for others.
hypothesis.settings.register_profile("fixed", derandomize=True)
hypothesis.settings.register_profile("explore", print_blob=True)
hypothesis.settings.load_profile("fixed")


_MAPPINGS = Path("/proc/self/maps")
_MOST_MAPPINGS = 25_000
"""Memory mappings of a process, of which Linux allows 65,530; every compiled program has several."""


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_are_dropped_in_time() -> None:
    """Drops what earlier modules compiled before the process has no room for more, and aborts."""
    if _MAPPINGS.exists() and _MAPPINGS.read_bytes().count(b"\n") > _MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kill-seeds",
        type=int,
        default=2,
        help="batches of the pool during which engines are killed; 20 for all that issue 7 asks for",
    )


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, downloaded once."""
    return smollm2.fetch()

"""Fixtures of all tests, and a compilation cache that outlives a run."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from examples import smollm2

_ROOT = Path(__file__).resolve().parent.parent

# Tests compile many tiny programs; kept between runs, the second run spends its time on what is tested.
jax.config.update("jax_compilation_cache_dir", str(_ROOT / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


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

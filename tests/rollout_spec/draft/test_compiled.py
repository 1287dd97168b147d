"""Compiled code works where no folder can hold it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import pytest

from rollout_spec.draft import compiled as module


def test_without_a_folder_for_machine_code_it_compiles_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def njit(*, cache: bool = False, **options: Any) -> Callable[..., Any]:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return numba.njit(**options)

    monkeypatch.setattr(module, "njit", njit)

    @module.compiled
    def double(x: int) -> int:
        return 2 * x

    assert double(4) == 8

"""Compiled code works where no folder can hold it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import pytest

from rollout_spec.draft import compiled as module

ROOT = Path(__file__).parents[3]


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


TWICE = """
from rollout_spec.draft.compiled import compiled

@compiled
def twice(x):
    return 2 * x
"""


@pytest.mark.parametrize("writable", [True, False])
def test_machine_code_is_kept_where_it_can_be(tmp_path: Path, writable: bool) -> None:
    (tmp_path / "module.py").write_text(TWICE)
    if not writable:
        (tmp_path / "__pycache__").write_bytes(b"")  # a file stands where the folder would
    environment = {**os.environ, "HOME": os.devnull, "PYTHONPATH": str(ROOT)}
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    result = subprocess.run(
        [sys.executable, "-B", "-c", "import module; print(module.twice(4))"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert result.stdout == "8\n"
    assert bool(list(tmp_path.glob("__pycache__/*.nbi"))) == writable


def test_machine_code_of_other_sources_is_never_used(tmp_path: Path) -> None:
    """Each function inlines those of other files, whose changes numba does not look for."""
    package = tmp_path / "draft"
    shutil.copytree(Path(module.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        "import importlib.util as util\n"
        f"spec = util.spec_from_file_location('compiled', {str(package / 'compiled.py')!r})\n"
        "module = util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(module.compiled(lambda x: x).py_func.__qualname__)"
    )

    def name() -> str:
        command = [sys.executable, "-B", "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout

    before = name()
    assert name() == before
    with open(package / "evidence.py", "a") as file:
        file.write("# changed\n")
    assert name() != before

"""`make` targets find a fitting Python, or say clearly that there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "make_venv.sh"


def make_venv(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), str(folder), *arguments],
        cwd=folder.parent,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def fake_python(path: Path, version: str) -> Path:
    """A program that answers like a Python of that version, and fails to make an environment."""
    path.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo {version} && exit 0\nexit 3\n')
    path.chmod(0o755)
    return path


def test_unfit_python_is_refused_with_what_to_do(tmp_path: Path) -> None:
    python = fake_python(tmp_path / "python", "3.9")
    done = make_venv(tmp_path / "environment", "demo", PYTHON=str(python))
    assert done.returncode == 1
    assert "no Python of version 3.12 3.13 3.11 found" in done.stderr
    assert "make PYTHON=" in done.stderr
    assert not (tmp_path / "environment").exists()


def test_python_without_venv_is_explained(tmp_path: Path) -> None:
    python = fake_python(tmp_path / "python", "3.12")
    done = make_venv(tmp_path / "environment", "demo", PYTHON=str(python))
    assert done.returncode == 1
    assert "python3-venv" in done.stderr


def test_launcher_without_a_python_behind_it_is_passed_over(tmp_path: Path) -> None:
    # As pyenv's shims are: on the PATH, but failing when started.
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for name in ("python3", "python", f"python{version}"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 127\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), "PYENV_ROOT": str(tmp_path)}
    done = make_venv(tmp_path / "environment", "demo", "9.9", **environment)
    assert done.returncode == 1
    assert "no Python of version 9.9 found (python3 here is '')" in done.stderr


def test_ci_script_can_be_run() -> None:
    assert os.access(REPOSITORY / ".ci" / "run", os.X_OK)

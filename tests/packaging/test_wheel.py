"""What a built wheel and an editable install hold, and what importing the package costs.

Each install goes into a bare environment of its own, which finds the dependencies in the test environment's
site-packages through a .pth file. The .pth files over there are not read then, so that the editable install
which the tests run from can neither help nor hide.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
# Folder in the repository -> package it installs as.
FOLDERS = {
    "rollout_spec": "rollout_spec",
    "kernels": "rollout_spec/kernels",
    "integrations": "rollout_spec/integrations",
}
IMPORT_LIMIT_S = 1.0


def python_files(folder: str) -> list[Path]:
    """All .py files below a folder of the repository, relative to that folder."""
    root = REPOSITORY / folder
    return sorted(path.relative_to(root) for path in root.rglob("*.py") if "__pycache__" not in path.parts)


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command away from the repository; returns its standard output, fails with both streams."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pip(*arguments: str | Path, python: Path | str = sys.executable, cwd: Path) -> None:
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "--disable-pip-version-check",
        "-q",
        *arguments,
        cwd=cwd,
    )


def bare_environment(folder: Path) -> Path:
    """Interpreter of a new environment in `folder` with the test environment's packages behind its own."""
    venv.create(folder, symlinks=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a wheel is built from, so that building leaves no traces in the working tree."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, copy / name)
    for folder in FOLDERS:
        if (REPOSITORY / folder).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(REPOSITORY / folder, copy / folder, ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", out, source, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of an environment that the wheel is installed into."""
    python = bare_environment(tmp_path_factory.mktemp("wheel-environment"))
    pip("install", "--no-deps", "--no-index", wheel, python=python, cwd=wheel.parent)
    return python


@pytest.fixture(scope="module")
def editable_python(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of an environment with an editable install of the copied source."""
    python = bare_environment(tmp_path_factory.mktemp("editable-environment"))
    options = ("--no-deps", "--no-build-isolation", "--no-index")
    pip("install", *options, "--editable", source, python=python, cwd=source.parent)
    return python


def test_wheel_holds_every_module_on_disk_and_no_other(wheel: Path) -> None:
    expected = {f"{FOLDERS[folder]}/{file}" for folder in FOLDERS for file in python_files(folder)}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.endswith(".py")}
    assert held == expected, "the package list in pyproject.toml and the folders differ"


def test_wheel_installs_one_top_level_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        top_level = {name.split("/")[0] for name in archive.namelist()}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"rollout_spec"}


def test_wheel_says_that_it_is_typed_and_carries_its_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "rollout_spec/py.typed" in names
    assert any(name.endswith("/LICENSE") for name in names)


LOCATE = """
import importlib.util, rollout_spec, rollout_spec.kernels
print(rollout_spec.__file__)
print(rollout_spec.kernels.__file__)
print([name for name in ("kernels", "integrations") if importlib.util.find_spec(name)])
"""


def test_wheel_install_imports_as_one_package(wheel_python: Path, tmp_path: Path) -> None:
    package, kernels, stray = run(wheel_python, "-c", LOCATE, cwd=tmp_path).splitlines()
    assert Path(package).is_relative_to(wheel_python.parents[1])
    assert Path(kernels).parent == Path(package).parent / "kernels"
    assert stray == "[]"


def test_editable_install_imports_kernels_from_their_own_folder(
    source: Path, editable_python: Path, tmp_path: Path
) -> None:
    package, kernels, stray = run(editable_python, "-c", LOCATE, cwd=tmp_path).splitlines()
    assert Path(package).parent == source / "rollout_spec"
    assert Path(kernels).parent == source / "kernels"
    assert stray == "[]"


def test_importing_needs_no_optional_package(wheel_python: Path, tmp_path: Path) -> None:
    watch = """
import sys
class Watch:
    asked = set()
    def find_spec(self, name, path=None, target=None):
        self.asked.add(name.partition(".")[0])
sys.meta_path.insert(0, Watch())
import rollout_spec
print(" ".join(Watch.asked))
"""
    asked = set(run(wheel_python, "-c", watch, cwd=tmp_path).split())
    assert "rollout_spec" in asked
    assert not asked & {"ray", "torch", "transformers", "matplotlib", "optax", "pytest", "hypothesis"}


def test_importing_takes_under_a_second_beyond_jax(wheel_python: Path, tmp_path: Path) -> None:
    measure = """
import time, jax
start = time.process_time()
import rollout_spec
print(time.process_time() - start)
"""
    seconds = min(float(run(wheel_python, "-c", measure, cwd=tmp_path)) for _ in range(3))
    assert seconds < IMPORT_LIMIT_S

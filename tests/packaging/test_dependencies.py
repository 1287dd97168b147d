"""Every package that the code imports is one that pyproject.toml asks for, as a range."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
# Import name -> distribution name, where they differ.
DISTRIBUTIONS = {"orbax": "orbax-checkpoint", "google": "protobuf", "tunix": "google-tunix"}
OUR_OWN = {"rollout_spec", "kernels", "integrations", "examples", "benchmarks", "tests"}


def names(requirements: list[str]) -> set[str]:
    """Distribution names of requirement strings, without extras and ranges."""
    return {re.split(r"[^A-Za-z0-9_.-]", requirement)[0].lower() for requirement in requirements}


def extras(*wanted: str) -> set[str]:
    return set().union(*(names(PROJECT["optional-dependencies"][extra]) for extra in wanted))


def third_party_imports(folder: str) -> dict[str, str]:
    """Distribution -> a file that imports it, over all import statements below a folder, nested ones too.

    Scripts that list their own dependencies (PEP 723) are left out.
    """
    found: dict[str, str] = {}
    for path in sorted((REPOSITORY / folder).rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if not text.startswith("# /// script\n") else ():
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                modules = [node.module]
            else:
                continue
            for module in modules:
                top = module.partition(".")[0]
                if top not in sys.stdlib_module_names and top not in OUR_OWN:
                    found[DISTRIBUTIONS.get(top, top)] = str(path.relative_to(REPOSITORY))
    return found


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("rollout_spec", names(PROJECT["dependencies"]) | extras("ray", "server")),
        ("integrations", names(PROJECT["dependencies"]) | extras("server", "tunix")),
        ("kernels", names(PROJECT["dependencies"])),
        ("examples", names(PROJECT["dependencies"]) | extras("demo", "trl", "tunix", "compare")),
        ("benchmarks", names(PROJECT["dependencies"]) | extras("demo", "ray", "compare")),
        (
            "tests",
            names(PROJECT["dependencies"])
            | extras("dev", "demo", "ray", "server", "trl", "tunix", "compare"),
        ),
    ],
)
def test_imports_are_declared(folder: str, allowed: set[str]) -> None:
    allowed = {name.replace("-", "_") for name in allowed} | allowed
    # numpy's companion types and jax's compiled half come with them.
    allowed |= {"jaxlib"} if "jax" in allowed else set()
    missing = {name: file for name, file in third_party_imports(folder).items() if name not in allowed}
    assert not missing, f"imported but not asked for in pyproject.toml: {missing}"


def test_requirements_are_ranges() -> None:
    everything = PROJECT["dependencies"] + [
        requirement for extra in PROJECT["optional-dependencies"].values() for requirement in extra
    ]
    for requirement in everything:
        if not requirement.startswith("rollout-spec["):
            assert ">=" in requirement, requirement
            assert "==" not in requirement, requirement

"""docs/drafting.md names the constants that the code has."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from rollout_spec.draft import DraftConfig

PAGE = (Path(__file__).parents[3] / "docs" / "drafting.md").read_text()
ROWS = re.findall(r"^\| `(\w+)\.([A-Z_]+)` \| ([\d.]+) \| ", PAGE, re.MULTILINE)


def test_there_are_constants_to_check() -> None:
    assert len(ROWS) > 20


@pytest.mark.parametrize(("module", "name", "value"), ROWS)
def test_a_documented_constant_is_the_codes(module: str, name: str, value: str) -> None:
    constant = getattr(importlib.import_module(f"rollout_spec.draft.{module}"), name)
    assert float(constant) == pytest.approx(float(value), rel=1e-6)


@pytest.mark.parametrize("name", ["min_prob", "version_decay", "max_match", "capacity_tokens"])
def test_a_documented_default_is_the_configs(name: str) -> None:
    found = re.search(rf"`{name}` ([\d,.]*\d)", PAGE)
    assert found is not None
    assert float(found[1].replace(",", "")) == getattr(DraftConfig(), name)

"""Without ray the package works, and RolloutPool says what to install."""

from __future__ import annotations

import sys

import pytest

from rollout_spec import RolloutPool
from rollout_spec.errors import MissingExtraError


def test_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it raises ImportError
    with pytest.raises(MissingExtraError, match=r"pip install 'rollout-spec\[ray\]'"):
        RolloutPool("path")

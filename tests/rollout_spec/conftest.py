"""The engine of the tests of the API."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollout_spec import RolloutEngine
from tests.rollout_spec.watched_engine import watched_engine


@pytest.fixture
def engine() -> Iterator[RolloutEngine]:
    made = watched_engine()
    yield made
    made.close()

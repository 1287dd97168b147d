"""A pool over two machines, played by two raylets on this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_node_that_goes_away_loses_nothing() -> None:
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-m", "tests.rollout_spec.pool.two_nodes"], cwd=root, capture_output=True, text=True
    )
    assert "two nodes: ok" in done.stdout, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"

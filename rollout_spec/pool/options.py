"""How patient a pool is, and what its engines tell each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """How patient the pool is.

    max_retries: how often a sample runs again after its engine was lost or its step failed. max_start_tries: engines in
    a row that may be lost at a place before they serve. health_deadline_s: for one step or update; start_deadline_s:
    for building an engine.
    """

    max_retries: int = 3
    max_start_tries: int = 3
    health_deadline_s: float = 600.0
    start_deadline_s: float = 1800.0


@dataclass(frozen=True)
class Sharing:
    """How engines share history. every_s: seconds between rounds; budget_bytes: of one round, 4 a token."""

    on: bool = True
    every_s: float = 2.0
    budget_bytes: int = 1 << 20

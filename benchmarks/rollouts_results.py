"""The rollouts benchmark's JSON file: parts, their cells, and goals with whether they are met."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent / "results" / "rollouts.json"


def goal(name: str, value: float, wanted: float, *, at_least: bool = True) -> dict[str, Any]:
    """A measured number beside what it should be at least, or at most."""
    met = value >= wanted if at_least else value <= wanted
    return {"name": name, "value": value, "goal": wanted, "at_least": at_least, "met": bool(met)}


def goal_text(one: dict[str, Any]) -> str:
    """As "1.47 (at least 1.45)", with a word when it is missed."""
    word = "at least" if one["at_least"] else "at most"
    missed = "" if one["met"] else ", missed"
    return f"{one['value']:.3g} ({word} {one['goal']:g}{missed})"


class Results:
    """What is stored, by part and cell. Measuring a cell anew replaces that cell alone, at once on the disk."""

    def __init__(self, path: Path, machine: dict[str, Any]) -> None:
        self.path = path
        self.machine = machine
        self.parts: dict[str, Any] = json.loads(path.read_text())["parts"] if path.exists() else {}

    def put(
        self, part: str, title: str, cell: str, settings: dict[str, Any], measured: dict[str, Any]
    ) -> None:
        """Stores a cell with when, on what, and by which settings it was measured."""
        entry = self.parts.setdefault(part, {"title": title, "cells": {}})
        entry["title"] = title
        when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        entry["cells"][cell] = {"measured_at": when, "machine": self.machine, "settings": settings} | measured
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"parts": dict(sorted(self.parts.items()))}
        self.path.write_text(json.dumps(content, indent=1) + "\n")

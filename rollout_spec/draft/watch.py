"""Notices when drafts, which were accepted as often as expected, suddenly are not."""

from __future__ import annotations

from dataclasses import dataclass

_KEPT_USUAL = 0.999  # of what was counted before, from a step to the next
_KEPT_RECENT = 0.97
_ENOUGH_USUAL, _ENOUGH_RECENT = 200.0, 25.0  # draft tokens expected to be accepted, before anything is said
_LONG_AFTER = 200  # steps with drafts after an update, in which it is named as a cause
_COLLAPSED, _RECOVERED = 0.4, 0.8  # of what is usual


@dataclass
class _Count:
    kept: float
    drafted: float = 0.0
    expected: float = 0.0
    accepted: float = 0.0

    def add(self, drafted: int, expected: float, accepted: int) -> None:
        self.drafted = self.kept * self.drafted + drafted
        self.expected = self.kept * self.expected + expected
        self.accepted = self.kept * self.accepted + accepted

    @property
    def ratio(self) -> float:
        """Accepted over expected."""
        return self.accepted / self.expected if self.expected else 1.0

    @property
    def share(self) -> float:
        """Accepted over drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0


class AcceptanceWatch:
    """Compares what was accepted lately, and what was expected to be, with what is usual."""

    def __init__(self) -> None:
        self._usual, self._recent = _Count(_KEPT_USUAL), _Count(_KEPT_RECENT)
        self._collapsed = False
        self._version = self._version_before = 0
        self._noted = _LONG_AFTER  # steps since the last update

    def new_version(self, version: int) -> None:
        """The policy's weights were replaced; a collapse is told with the versions before and after."""
        self._version_before, self._version = self._version, version
        self._noted = 0

    def note(self, drafted: int, expected: float, accepted: int) -> str | None:
        """A step verified so many draft nodes. A text with numbers if acceptance has just collapsed."""
        usual, recent = self._usual, self._recent
        self._noted += 1
        recent.add(drafted, expected, accepted)
        known = usual.expected >= _ENOUGH_USUAL and recent.expected >= _ENOUGH_RECENT
        if self._collapsed:
            self._collapsed = recent.ratio < _RECOVERED * usual.ratio
        elif known and recent.ratio < _COLLAPSED * usual.ratio:
            self._collapsed = True
            return (
                f"drafts are accepted far less often than before: {recent.share:.0%} of the last draft nodes, "
                f"where {recent.expected / recent.drafted:.0%} were expected; before it was {usual.share:.0%}"
                + self._since()
            )
        if not self._collapsed:
            usual.add(drafted, expected, accepted)
        return None

    def _since(self) -> str:
        if self._noted > _LONG_AFTER:
            return ""
        return (
            f" under weights of version {self._version_before}, and they are of version {self._version} now; heads "
            "that were not in the update are a usual cause"
        )

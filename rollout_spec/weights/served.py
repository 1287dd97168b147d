"""The weights that serve, and their checksum, which is computed when somebody wants it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from ..errors import EngineStateError

Sums = list[jax.Array]


class Fingerprint:
    """Checksum of one set of weights: read from them while they serve, and kept once known.

    It holds no weights. When they are replaced before anybody has read the checksum, while somebody still holds
    this, its few numbers are computed on the device before the weights go.
    """

    def __init__(self, value: str | None = None) -> None:
        self._value = value
        self._weights: weakref.ref[ServedWeights] | None = None
        self._finish: Callable[[], str] | None = None

    def read(self) -> str:
        """The checksum, a hexadecimal text."""
        if self._value is None:
            self.start()
            assert self._finish is not None
            self._value, self._finish = self._finish(), None
        return self._value

    def start(self) -> None:
        """Computes it without waiting for the result."""
        if self._value is not None or self._finish is not None:
            return
        weights = self._weights() if self._weights is not None else None
        if weights is None or weights.params is None:
            raise EngineStateError(
                "these weights are gone and their checksum was never computed; it can be read while they serve"
            )
        self._finish = weights.begin_checksum(weights.params)

    def of(self, weights: ServedWeights) -> Fingerprint:
        self._weights = weakref.ref(weights)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Fingerprint, (self.read(),)


@dataclass(eq=False)
class ServedWeights:
    """One version's weights.

    params: the tree that steps compute with; of numpy arrays while it lies on the host, None once dropped.
    unmerged: by leaf number, weights as they are without the adapter that was merged into them.
    begin_checksum: starts computing the checksum of a tree and returns what waits for it.
    """

    params: dict | None
    begin_checksum: Callable[[dict], Callable[[], str]]
    unmerged: dict[int, Any] = field(default_factory=dict)
    _fingerprint: weakref.ref[Fingerprint] | None = None

    @property
    def fingerprint(self) -> Fingerprint:
        """The same one as long as somebody holds it."""
        found = self._fingerprint() if self._fingerprint is not None else None
        if found is None:
            found = Fingerprint().of(self)
            self._fingerprint = weakref.ref(found)
        return found

    def retire(self) -> None:
        """Before the weights go: makes sure of a checksum that somebody may still read."""
        held = self._fingerprint() if self._fingerprint is not None else None
        if held is not None and self.params is not None:
            held.start()

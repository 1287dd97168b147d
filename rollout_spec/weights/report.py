"""What a weight update did, for the trainer's log."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

from .served import Fingerprint

UpdateMode = Literal["drain", "interrupt", "inflight", "inflight_keep"]
UPDATE_MODES: tuple[UpdateMode, ...] = ("drain", "interrupt", "inflight", "inflight_keep")


@dataclass(frozen=True)
class TokenSpan:
    """Tokens [start, stop) of sample `sample` of a request, produced by weights of `version`."""

    request_id: Hashable
    sample: int
    version: int
    start: int
    stop: int


@dataclass(frozen=True)
class WeightUpdateReport:
    """What a weight update did.

    version, previous_version: of the weights. applied: False if the engine had this version already and
    nothing was done. deferred: True for a drain of an engine that sleeps on unfinished requests: `wake_up()`
    finishes those on the old weights and then swaps.
    tensors, bytes: replaced. skipped: names of weights that strict=False left as they were. merged: names of
    weights that an adapter was merged into.
    ended: ids of the requests that mode "interrupt" ended or that "drain" saw through.
    recomputed: running sequences whose cache mode "inflight" dropped.
    spans: of every sample that goes on, which of its tokens so far came from which weights.
    seconds: by stage: "stage" (reading, checking, copying), "wait" (draining), "swap".
    """

    version: int
    previous_version: int
    mode: UpdateMode
    applied: bool = True
    deferred: bool = False
    tensors: int = 0
    bytes: int = 0
    skipped: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()
    ended: tuple[Hashable, ...] = ()
    recomputed: int = 0
    spans: tuple[TokenSpan, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    fingerprint: Fingerprint = field(default_factory=Fingerprint, repr=False, compare=False)

    @property
    def checksum(self) -> str:
        """Checksum of the weights that served after this update (`rollout_spec.weights.checksum`).

        It reads all weights once, when first asked for, so that an update whose checksum nobody wants does not
        pay for it.
        """
        return self.fingerprint.read()

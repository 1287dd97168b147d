"""Every error the package raises on purpose.

Each is a `RolloutError` and also the built-in that fits, so callers may catch either. Messages say what was
expected, what came and what to do.
"""

from __future__ import annotations


class RolloutError(Exception):
    """Base of all errors raised by rollout_spec."""


class ConfigError(RolloutError, ValueError):
    """A configuration or sampling value is out of range, or values contradict each other."""


class ModelLoadError(RolloutError, ValueError):
    """A checkpoint can't be loaded: unknown architecture or option, missing tensors, wrong shapes."""


class PromptError(RolloutError, ValueError):
    """A prompt can't be run: empty, too long, or with token ids outside the vocabulary."""


class WeightUpdateError(RolloutError, ValueError):
    """A weight update was refused as a whole; the old weights keep serving. Lists every fault."""


class DraftError(RolloutError, ValueError):
    """A drafter was called with what it can't take, or returned a malformed tree."""


class HistoryError(RolloutError, ValueError):
    """A history file is truncated, foreign, or of an unsupported format version."""


class UnknownRequestError(RolloutError, KeyError):
    """A request id that is not known (never submitted, or already ended)."""

    def __str__(self) -> str:  # KeyError shows the repr of its argument, which hides line breaks
        return str(self.args[0]) if self.args else ""


class RequestFailedError(RolloutError, RuntimeError):
    """Requests of a `generate` failed. `requests`: those; `outputs`: the others' outputs, None for the failed."""

    def __init__(self, requests: list, outputs: list) -> None:
        lines = [f"request {request.request_id!r}: {request.error!r}"[:300] for request in requests[:10]]
        super().__init__(f"{len(requests)} request(s) failed:\n  " + "\n  ".join(lines))
        self.requests = requests
        self.outputs = outputs


class EngineStateError(RolloutError, RuntimeError):
    """The engine can't do this in its present state: closed, asleep, or paused."""


class CapacityError(RolloutError, MemoryError):
    """The cache is too small for even one request of the size asked for."""


class EngineLostError(RolloutError, RuntimeError):
    """An engine of a pool died, hung or could not be started; the message says why."""


class MissingExtraError(RolloutError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class KernelLimitError(RolloutError, ValueError):
    """A Pallas kernel was asked for what it doesn't support; the message names the limit."""

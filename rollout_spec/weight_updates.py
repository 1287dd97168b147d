"""Updating the weights of an engine that runs, is paused, or sleeps; and its sleep."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from .core import EngineCore
from .errors import ConfigError, EngineStateError
from .outputs import version_spans
from .weights.report import UPDATE_MODES, TokenSpan, UpdateMode, WeightUpdateReport
from .weights.served import ServedWeights
from .weights.staging import StagedWeights, StagingOptions, stage

SleepLevel = Literal[1, 2]


@dataclass(frozen=True)
class SleepReport:
    """What `sleep` gave back. level: how deep the engine sleeps now.

    cache_bytes, weight_bytes: freed on the devices, over all of them. in_use_before, in_use_after: bytes that the
    devices themselves said were in use; None where they don't say (CPU).
    """

    level: int
    cache_bytes: int = 0
    weight_bytes: int = 0
    in_use_before: int | None = None
    in_use_after: int | None = None

    @property
    def freed_bytes(self) -> int:
        return self.cache_bytes + self.weight_bytes


@dataclass
class _Deferred:
    """A drain of an engine that sleeps on unfinished requests."""

    staged: StagedWeights
    served: ServedWeights
    """What will serve; also what a later update that is not whole goes by."""
    version: int


class WeightUpdates:
    """Takes new weights for one engine's core, and puts it to sleep."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.asleep = 0
        """Level of sleep; 0 is awake."""
        self._deferred: _Deferred | None = None

    def update(
        self, weights: Any, *, version: int | None, mode: UpdateMode, options: StagingOptions, steps: bool
    ) -> WeightUpdateReport:
        """`RolloutEngine.update_weights`. steps: running requests may go on while weights are staged."""
        core, executor = self.core, self.core.executor
        version, previous = _checked(mode, version, options), core.weight_version
        serving = self._deferred.version if self._deferred is not None else previous
        if version == serving and executor.weights.params is not None:
            return WeightUpdateReport(
                serving, previous, mode, applied=False, fingerprint=executor.weights.fingerprint
            )
        version = serving + 1 if version is None else version
        if mode == "drain" and core.begun and executor.weights.params is None:
            raise EngineStateError(
                f"{len(core.begun)} requests have begun on weights that sleep dropped, so they can't be drained; "
                'use mode "interrupt" or "inflight"'
            )
        started = time.perf_counter()
        base = self._deferred.served if self._deferred is not None else executor.weights
        between = None
        if steps and not self.asleep and mode != "interrupt" and core.begun:
            between = functools.partial(core.advance, only_begun=mode == "drain")
        staged = stage(
            executor.model_config, executor.layout, base, weights, options, executor.quantizer, between
        )
        seconds = {"stage": time.perf_counter() - started, "wait": 0.0, "swap": 0.0}
        deferred = mode == "drain" and bool(self.asleep) and bool(core.begun)
        ended: tuple = ()
        recomputed = 0
        spans: tuple[TokenSpan, ...] = ()
        if deferred:
            served = ServedWeights(staged.params, executor.weights.begin_checksum, staged.unmerged)
            fingerprint = served.fingerprint
            fingerprint.read()
            self._deferred = _Deferred(staged, served, version)
        else:
            waited = time.perf_counter()
            try:
                to_end = core.begun if mode in ("drain", "interrupt") else []
                if mode == "drain":
                    self._drain()
                swapped = time.perf_counter()
                staged.take_over()
            except BaseException:
                staged.discard()
                raise
            # From here on nothing can fail: an update is whole or not at all.
            recomputed = self._settle(mode)
            spans = self._spans()
            self._deferred = None
            kept = mode == "inflight_keep" and bool(core.scheduler.running)
            core.swap_weights(staged.params, staged.unmerged, version, keeps_cache=kept)
            ended = tuple(request.request_id for request in to_end)
            fingerprint = executor.weights.fingerprint
            seconds |= {"wait": swapped - waited, "swap": time.perf_counter() - swapped}
        return WeightUpdateReport(
            version=version,
            previous_version=previous,
            mode=mode,
            deferred=deferred,
            tensors=staged.tensors,
            bytes=staged.bytes,
            skipped=staged.skipped,
            merged=staged.merged,
            ended=ended,
            recomputed=recomputed,
            spans=spans,
            seconds=seconds,
            fingerprint=fingerprint,
        )

    def _drain(self) -> None:
        """Finishes requests that have begun; others are not admitted meanwhile."""
        while self.core.begun:
            self.core.advance(only_begun=True)

    def _settle(self, mode: UpdateMode) -> int:
        """Prepares running sequences for new weights; how many will be recomputed."""
        core = self.core
        if mode == "interrupt":
            for request in core.begun:
                core.abort(request)
        elif mode == "inflight":
            return core.requeue_running()
        elif mode == "inflight_keep":
            for sequence in core.scheduler.running:
                sequence.keeps_old_cache = True
        return 0

    def _spans(self) -> tuple[TokenSpan, ...]:
        return tuple(
            TokenSpan(request.request_id, sequence.sample, version, start, stop)
            for request in self.core.begun
            for sequence in request.sequences
            for version, start, stop in version_spans(sequence.weight_versions[: sequence.num_generated])
        )

    # Sleep

    def sleep(self, level: SleepLevel, keep_weights: bool) -> SleepReport:
        """`RolloutEngine.sleep`."""
        if isinstance(level, bool) or level not in (1, 2):
            raise ConfigError(f"level must be 1 or 2, got {level!r}")
        if not keep_weights and level == 1:
            raise ConfigError("keep_weights=False is for level=2: level 1 leaves the weights where they are")
        executor = self.core.executor
        before = executor.in_use_bytes()
        cache_bytes = weight_bytes = 0
        if not self.asleep:
            self.core.requeue_running()
            self.core.scheduler.pool.forget_contents()
            cache_bytes = executor.free_cache()
        if level == 2 and (self.asleep < 2 or not keep_weights):
            weight_bytes = executor.offload(keep=keep_weights)
            if self._deferred is not None:
                self._deferred.staged.to_host()
        self.asleep = max(self.asleep, level)
        return SleepReport(self.asleep, cache_bytes, weight_bytes, before, executor.in_use_bytes())

    def wake_up(self) -> None:
        """`RolloutEngine.wake_up`."""
        if self.asleep:
            self.core.executor.restore()
            self.core.executor.new_cache()
            self.asleep = 0
        if self._deferred is not None:
            if self.core.executor.weights.params is not None:
                self._drain()
            deferred = self._deferred
            deferred.staged.take_over()
            self.core.swap_weights(deferred.staged.params, deferred.staged.unmerged, deferred.version)
            self.core.executor.restore()
            self._deferred = None


def _checked(mode: UpdateMode, version: Any, options: StagingOptions) -> int | None:
    """The version as an int, or None."""
    if mode not in UPDATE_MODES:
        raise ConfigError(f"mode must be one of {', '.join(UPDATE_MODES)}, got {mode!r}")
    if options.checksum is not None and not isinstance(options.checksum, str):
        raise ConfigError(f"checksum must be None or a text, got {options.checksum!r}")
    if version is None:
        return None
    index: Callable[[Any], int] = operator.index
    if isinstance(version, bool) or not hasattr(version, "__index__"):
        raise ConfigError(f"version must be None or an int, got {version!r}")
    if not -(2**31) <= index(version) < 2**31:
        raise ConfigError(f"version must fit 32 bits, as weight_versions are int32; got {version!r}")
    return index(version)

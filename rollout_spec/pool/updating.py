"""A weight update of all engines of a pool."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import ray

from ..errors import ConfigError, EngineLostError, EngineStateError
from ..weights.report import UPDATE_MODES, UpdateMode, WeightUpdateReport
from .actor import WeightStep
from .driver import Driver
from .fleet import Handle
from .stats import PoolUpdateReport
from .weights import ChunkedWeights, DeviceWeights, StoredWeights, WeightsAtPath, entries_of

_LARGEST_SHARE_OF_STORE = 0.4
_CHUNK_SHARE_OF_STORE = 0.05
_MOST_ROUNDS = 3
_POLL_S = 0.005


def update(
    driver: Driver,
    weights: Any,
    *,
    version: int | None,
    mode: UpdateMode,
    strict: bool,
    check_finite: bool,
    overlap: bool,
    chunk_bytes: int | None,
) -> PoolUpdateReport:
    """See RolloutPool.update_weights. One at a time."""
    if mode not in UPDATE_MODES:
        raise ConfigError(f"mode must be one of {', '.join(UPDATE_MODES)}, got {mode!r}")
    if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
        raise ConfigError(f"version must be None or an int, got {version!r}")
    if driver.paused and mode == "drain" and driver.call(lambda: driver.scheduler.running):
        raise EngineStateError(
            'mode "drain" has to finish running requests, but the pool is paused; resume() first, or use mode '
            '"interrupt", "inflight" or "inflight_keep"'
        )
    previous = driver.version
    if version == previous:
        return PoolUpdateReport(previous, previous, mode, applied=False)
    new = previous + 1 if version is None else version
    started = time.perf_counter()
    source = _source(weights, chunk_bytes)
    put_s = time.perf_counter() - started
    if not isinstance(source, WeightsAtPath):
        driver.counts.weight_objects += 1
    options = {
        "version": new,
        "mode": mode,
        "strict": strict,
        "check_finite": check_finite,
        "overlap": overlap,
    }
    driver.call(lambda: setattr(driver, "updating", True))
    try:
        while driver.call(lambda: driver.leaving_works):  # a drain ends what has begun where it runs
            time.sleep(_POLL_S)
        reports, lost = _tell_all(driver, source, options)
        later = source.stored() if isinstance(source, DeviceWeights) else source
        step = WeightStep(later, new, strict)
        driver.call(lambda: _commit(driver, step))
    finally:
        driver.call(lambda: setattr(driver, "updating", False))
    one = next(iter(reports.values()))
    return PoolUpdateReport(
        version=new,
        previous_version=previous,
        mode=mode,
        tensors=one.tensors,
        bytes=one.bytes,
        skipped=one.skipped,
        merged=one.merged,
        ended=tuple(request for report in reports.values() for request in report.ended),
        recomputed=sum(report.recomputed for report in reports.values()),
        seconds={
            stage: max(report.seconds.get(stage, 0.0) for report in reports.values()) for stage in one.seconds
        },
        put_s=put_s,
        engines=reports,
        lost=lost,
    )


def _source(weights: Any, chunk_bytes: int | None) -> Any:
    if isinstance(weights, str | os.PathLike):
        return WeightsAtPath(os.path.abspath(weights))
    if isinstance(weights, DeviceWeights):
        return weights
    kind, entries = entries_of(weights)
    size = sum(getattr(value, "nbytes", 0) for _, value in entries)
    whole = entries if kind == "pairs" else weights
    if kind == "pairs":
        whole = [(path[0], value) for path, value in entries]
    store = ray.cluster_resources().get("object_store_memory", float("inf"))
    if chunk_bytes is None and size > _LARGEST_SHARE_OF_STORE * store:
        chunk_bytes = int(_CHUNK_SHARE_OF_STORE * store)
    return StoredWeights(whole) if chunk_bytes is None else ChunkedWeights(whole, chunk_bytes)


def _tell_all(
    driver: Driver, source: Any, options: dict[str, Any]
) -> tuple[dict[int, WeightUpdateReport], tuple[int, ...]]:
    """Each engine's report, and those that were lost. Raises what they all raised, with nothing changed."""
    lost: list[int] = []
    for _ in range(_MOST_ROUNDS):
        futures = driver.call(lambda: _send(driver, source, options))
        if not futures:
            _wait_for_an_engine(driver)
            continue
        wait(future for _, future in futures)
        reports: dict[int, WeightUpdateReport] = {}
        errors: list[tuple[Handle, BaseException]] = []
        for handle, future in futures:
            error = future.exception()
            if error is None:
                reports[handle.number] = future.result()
            elif isinstance(error, EngineLostError):
                lost.append(handle.number)
            else:
                errors.append((handle, error))
        if reports:
            # The same weights suited others, so these engines are at fault; they start again on the new weights.
            for handle, error in errors:
                lost.append(handle.number)
                driver.call(partial(driver.fleet.lose, handle, error))
            return reports, tuple(lost)
        if errors:
            refusing = [handle for handle, _ in errors]
            driver.call(partial(_undo, driver, refusing))
            raise errors[0][1]
    raise EngineLostError(
        f"no engine lived through the update in {_MOST_ROUNDS} attempts; the old weights stay"
    )


def _send(driver: Driver, source: Any, options: dict[str, Any]) -> list[tuple[Handle, Future]]:
    told = []
    for handle in driver.fleet.serving:
        weights = source.offer() if isinstance(source, DeviceWeights) else source
        handle.target_version = options["version"]
        told.append((handle, handle.call("update", weights=weights, **options)))
    return told


def _undo(driver: Driver, handles: list[Handle]) -> None:
    for handle in handles:
        handle.target_version = driver.version


def _wait_for_an_engine(driver: Driver) -> None:
    while driver.call(lambda: not driver.fleet.serving):
        if driver.broken is not None:
            raise driver.broken
        time.sleep(0.05)


def _commit(driver: Driver, step: WeightStep) -> None:
    """Engines that start from now on take the new weights, and so do those that started meanwhile."""
    driver.version = step.version
    driver.weights = [step] if step.strict else [*driver.weights, step]
    for handle in driver.fleet.serving:
        driver.catch_up_here(handle)

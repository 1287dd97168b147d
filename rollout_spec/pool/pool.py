"""RolloutPool: engines as Ray actors, driven like one engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Hashable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

from ..config import EngineConfig
from ..errors import ConfigError, MissingExtraError, RequestFailedError
from ..intake import Intake, Prompt
from ..outputs import Completion, RolloutOutput
from ..sampling import SamplingParams
from ..tokenizer import Tokenizer
from ..weights.report import UpdateMode

if TYPE_CHECKING:
    from .driver import Driver
    from .requests import PartialRollout, PoolRequest
    from .sources import Model
    from .stats import PoolStats, PoolUpdateReport

_DEFAULT_SAMPLING = SamplingParams()
_DEFAULT_CONFIG = EngineConfig()


class RolloutPool:
    """Engines in Ray actors, driven like one engine. Threads may share it.

    Args:
        model: a Hugging Face folder or .gguf file, which every engine reads itself; (model_config, params), which go
            into the object store once; or a function without arguments that builds the engine, called in the actor.
        config: of every engine. Ignored for a function.
        num_engines: how many.
        tokenizer, dtype: as RolloutEngine and RolloutEngine.from_pretrained take them.
        resources_per_engine: amounts by Ray's names ("CPU", "GPU", "TPU", ...); default one CPU. With fewer CPUs than
            the machine has, an engine keeps to that many cores.
        placement: "pack" puts engines onto few machines, "spread" onto many.
        placement_group: an existing one instead, such as that of a TPU slice; every engine takes a bundle of it.
        warm_up: compile every size of step at the start.
        share_history: tell every engine's drafter what the others generate, every `history_every_s` seconds, at most
            `history_bytes` a round.
        move_running: at the end of a batch, running samples may go on on another engine. No token changes.
        max_unfinished: requests taken from a generator of prompts at a time; None is four for each slot.
        max_retries: how often a sample runs again after it was lost with its engine, or its step failed.
        health_deadline_s: longest step or update; an engine that takes longer is replaced. Compilation counts too.
        start_deadline_s: longest time for building an engine.

    Raises:
        MissingExtraError: ray isn't installed.
        ConfigError: a value is out of range, or the cluster too small.
        EngineLostError: the engines can't be built.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig = _DEFAULT_CONFIG,
        num_engines: int = 2,
        *,
        tokenizer: Tokenizer | None = None,
        dtype: Any = None,
        resources_per_engine: Mapping[str, float] | None = None,
        placement: str = "pack",
        placement_group: Any = None,
        warm_up: bool = False,
        share_history: bool = True,
        history_every_s: float = 2.0,
        history_bytes: int = 1 << 20,
        move_running: bool = True,
        max_unfinished: int | None = None,
        max_retries: int = 3,
        health_deadline_s: float = 600.0,
        start_deadline_s: float = 1800.0,
    ) -> None:
        _check_count("num_engines", num_engines)
        try:
            import ray
        except ImportError as error:
            raise MissingExtraError(
                "RolloutPool runs engines as Ray actors and ray isn't installed: pip install 'rollout-spec[ray]'"
            ) from error
        from .driver import Driver
        from .options import Limits, Sharing
        from .placement import Places
        from .sources import maker

        resources = dict(resources_per_engine or {"CPU": 1})
        self._started_ray = not ray.is_initialized()
        if self._started_ray:
            ray.init(log_to_driver=False, include_dashboard=False)
        try:
            places = Places(resources, placement, placement_group)  # type: ignore[arg-type]
            self._driver: Driver = Driver(
                maker(model, config, tokenizer=tokenizer, dtype=dtype),
                places,
                cpus=resources.get("CPU", 0.0),
                limits=Limits(
                    max_retries=max_retries,
                    health_deadline_s=health_deadline_s,
                    start_deadline_s=start_deadline_s,
                ),
                sharing=Sharing(share_history, history_every_s, history_bytes),
                moving=move_running,
            )
        except BaseException:
            self._stop_ray()
            raise
        self._updates = threading.Lock()
        self._max_unfinished = max_unfinished
        try:
            self._start(num_engines)
            if warm_up:
                self._on_all("warm_up")
        except BaseException:
            self.shutdown()
            raise

    def _start(self, count: int) -> None:
        driver = self._driver
        places = driver.fleet.new_places(count)
        driver.call(lambda: driver.start_here(places))
        pause = threading.Event()
        while driver.broken is None and driver.call(
            lambda: (
                any(handle.facts is None for handle in driver.fleet.handles.values())
                or not driver.fleet.handles
            )
        ):
            pause.wait(0.02)
        if driver.broken is not None:
            raise driver.broken
        facts = driver.call(lambda: driver.fleet.serving[0].facts)
        assert facts is not None
        if not hasattr(self, "_batches"):
            from .batches import Batches

            intake = Intake(
                facts.model_config,
                facts.tokenizer,
                max_seq_len=facts.max_seq_len,
                cache_tokens=facts.cache_tokens,
                seed=facts.seed,
            )
            self._batches = Batches(driver, intake, self._max_unfinished)

    # Generating

    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling: SamplingParams | SequenceOf[SamplingParams] = _DEFAULT_SAMPLING,
        *,
        group_ids: SequenceOf[Hashable] | None = None,
        continue_from: Completion | SequenceOf[Completion | None] | None = None,
        progress: bool = False,
    ) -> list[RolloutOutput]:
        """As RolloutEngine.generate: completions of all prompts, in their order.

        prompts: may be a generator, which is read only so far as engines have use for it; then `sampling` is one for
        all, and a prompt that can't be run is found when it is reached.

        Raises:
            PromptError, ConfigError, CapacityError: before anything runs.
            RequestFailedError: some requests failed, each with its reason; it carries the outputs of the others.
        """
        outputs: dict[int, RolloutOutput] = {}
        failed = []
        for request in self._batches.run(prompts, sampling, group_ids, continue_from, progress):
            if request.error is not None:
                failed.append(request)
            else:
                outputs[request.index] = request.result()
        if failed:
            failed.sort(key=lambda request: request.index)
            ordered = [outputs.get(index) for index in range(len(outputs) + len(failed))]
            raise RequestFailedError(failed, ordered) from failed[0].error
        return [outputs[index] for index in sorted(outputs)]

    def stream(
        self,
        prompts: Iterable[Prompt],
        sampling: SamplingParams | SequenceOf[SamplingParams] = _DEFAULT_SAMPLING,
        *,
        group_ids: SequenceOf[Hashable] | None = None,
        continue_from: Completion | SequenceOf[Completion | None] | None = None,
        progress: bool = False,
    ) -> Iterator[RolloutOutput]:
        """As `generate`, but yields each output as its prompt ends; `RolloutOutput.index` is its place.

        Closing the iterator early aborts what still runs. Raises RequestFailedError at the first failed request.
        """
        running = self._batches.run(prompts, sampling, group_ids, continue_from, progress)
        return self._outputs(running)

    @staticmethod
    def _outputs(running: Iterator[PoolRequest]) -> Iterator[RolloutOutput]:
        for request in running:
            if request.error is not None:
                raise RequestFailedError([request], []) from request.error
            yield request.result()

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams = _DEFAULT_SAMPLING,
        *,
        request_id: Hashable = None,
        group_id: Hashable = None,
        continue_from: Completion | None = None,
    ) -> PoolRequest:
        """Queues a prompt; returns a future of its RolloutOutput, which can also be awaited.

        request_id: unique among unfinished ones; None makes one.
        """
        request = self._batches.request(prompt, sampling, 0, request_id, group_id, continue_from, "prompt")
        self._driver.submit([request])
        return request

    def generate_enough(
        self,
        prompts: SequenceOf[Prompt],
        sampling: SamplingParams | SequenceOf[SamplingParams] = _DEFAULT_SAMPLING,
        *,
        enough: int,
        carried: SequenceOf[PartialRollout] = (),
        group_ids: SequenceOf[Hashable] | None = None,
    ) -> tuple[list[RolloutOutput], list[PartialRollout]]:
        """Over-provisioning: begins more groups than are needed and stops when enough have ended.

        Args:
            enough: prompts to wait for, those of `carried` counted too.
            carried: what an earlier call returned as unfinished. It is begun first and goes on where it was: tokens,
                log-probabilities and versions that were there stay as they are.

        Returns the outputs that ended, and what is unfinished, for the next call. `RolloutOutput.index` counts the
        carried ones first.
        """
        from .batches import is_cut_short

        _check_count("enough", enough)
        requests = [self._batches.carried(rollout, index) for index, rollout in enumerate(carried)]
        fresh = self._batches.check_all(prompts, sampling, group_ids, None)
        for index, request in enumerate(fresh, start=len(requests)):
            request.index = index
        requests += fresh
        ended: list[PoolRequest] = []
        stopped = False
        for request in self._batches.run_all(requests, progress=False):
            ended.append(request)
            if len(ended) >= enough and not stopped:
                stopped = True
                self._driver.call(lambda: self._driver.abort_here(requests))
        failed = [request for request in ended if request.error is not None]
        if failed:
            outputs = [None if request.error is not None else request.result() for request in ended]
            raise RequestFailedError(failed, outputs) from failed[0].error
        done = [request for request in ended if not is_cut_short(request)]
        return (
            [request.result() for request in sorted(done, key=lambda request: request.index)],
            [
                request.partial()
                for request in sorted(ended, key=lambda request: request.index)
                if is_cut_short(request)
            ],
        )

    async def generate_async(
        self,
        prompts: Iterable[Prompt],
        sampling: SamplingParams | SequenceOf[SamplingParams] = _DEFAULT_SAMPLING,
        *,
        group_ids: SequenceOf[Hashable] | None = None,
        continue_from: Completion | SequenceOf[Completion | None] | None = None,
    ) -> list[RolloutOutput]:
        """`generate` for asyncio. Cancelling it aborts what still runs."""
        running = self.stream_async(prompts, sampling, group_ids=group_ids, continue_from=continue_from)
        outputs = [output async for output in running]
        return sorted(outputs, key=lambda output: output.index)

    async def stream_async(
        self,
        prompts: Iterable[Prompt],
        sampling: SamplingParams | SequenceOf[SamplingParams] = _DEFAULT_SAMPLING,
        *,
        group_ids: SequenceOf[Hashable] | None = None,
        continue_from: Completion | SequenceOf[Completion | None] | None = None,
    ) -> AsyncIterator[RolloutOutput]:
        """`stream` for asyncio."""
        requests = self._batches.check_all(prompts, sampling, group_ids, continue_from)
        loop = asyncio.get_running_loop()
        ended: asyncio.Queue[Any] = asyncio.Queue()
        for request in requests:
            request.add_done_callback(lambda one: loop.call_soon_threadsafe(ended.put_nowait, one))
        self._driver.submit(requests)
        try:
            for _ in requests:
                request = await ended.get()
                if request.error is not None:
                    raise RequestFailedError([request], []) from request.error
                yield request.result()
        finally:
            self._batches.abort_unfinished(requests)

    # Weights

    @property
    def weight_version(self) -> int:
        """Of the weights that serve; 0 for those the pool was made with."""
        return self._driver.version

    @property
    def weight_versions(self) -> dict[int, int]:
        """Of every engine, by its number. They differ only while an update is under way."""
        return self._driver.call(
            lambda: {handle.number: handle.weight_version for handle in self._driver.fleet.serving}
        )

    def update_weights(
        self,
        weights: Any,
        *,
        version: int | None = None,
        mode: UpdateMode = "drain",
        strict: bool = True,
        check_finite: bool = False,
        overlap: bool = False,
        chunk_bytes: int | None = None,
    ) -> PoolUpdateReport:
        """Replaces the weights of all engines, as RolloutEngine.update_weights does; returns when all have them.

        Args:
            weights: as RolloutEngine takes them. Arrays go into the object store once, whatever the number of engines;
                a path is read by every engine itself; `DeviceWeights` are pulled from the sender's devices.
            version, mode, strict, check_finite: as RolloutEngine takes them. "interrupt" ends samples that have begun.
            overlap: bring the weights to the devices while requests run on the old ones; takes the memory of a copy.
            chunk_bytes: send them in parts of at most so much, for weights that the object store can't hold; None
                decides by its size.

        Raises:
            WeightUpdateError: with every fault; the old weights keep serving everywhere.
        """
        from .updating import update

        with self._updates:
            return update(
                self._driver,
                weights,
                version=version,
                mode=mode,
                strict=strict,
                check_finite=check_finite,
                overlap=overlap,
                chunk_bytes=chunk_bytes,
            )

    async def update_weights_async(self, weights: Any, **keywords: Any) -> PoolUpdateReport:
        """`update_weights` for asyncio."""
        return await asyncio.to_thread(lambda: self.update_weights(weights, **keywords))

    # State

    @property
    def num_engines(self) -> int:
        """Engines that serve or are being started, those that leave not counted."""
        return self._driver.call(
            lambda: sum(not handle.leaving for handle in self._driver.fleet.handles.values())
        )

    def abort(self, request_ids: Iterable[Hashable] | None = None) -> None:
        """Ends requests with finish_reason "abort" and what they have; None: all."""
        wanted = None if request_ids is None else set(request_ids)
        driver = self._driver
        driver.call(
            lambda: driver.abort_here(
                request
                for request in driver.unfinished_here()
                if wanted is None or request.request_id in wanted
            )
        )

    def pause(self) -> None:
        """Engines compute nothing until `resume()`; requests keep their place."""
        self._driver.paused = True
        self._on_all("pause")

    def resume(self) -> None:
        """Undoes `pause`."""
        self._on_all("resume")
        self._driver.paused = False

    def sleep(self, **options: Any) -> None:
        """Gives device memory back until `wake_up()`; options as RolloutEngine.sleep. Requests wait meanwhile."""
        self._driver.asleep = options
        self._on_all("sleep", **options)

    def wake_up(self) -> None:
        """Undoes `sleep`."""
        self._on_all("wake_up")
        self._driver.asleep = None

    def stats(self) -> PoolStats:
        """Counts of the pool and of its engines."""
        counts, engines = self._driver.call(self._driver.stats_here)
        for number, future in engines.items():
            if future.exception() is None:  # an engine that was lost meanwhile has none
                counts.engines[number] = future.result()
        return counts

    def reset_stats(self) -> None:
        """The engines start counting anew."""
        self._on_all("reset_stats")

    def scale(self, num_engines: int) -> None:
        """More or fewer engines. New ones serve when this returns; what ran on removed ones goes on elsewhere."""
        _check_count("num_engines", num_engines)
        with self._updates:
            more = num_engines - self.num_engines
            if more > 0:
                self._start(more)
            elif more < 0:
                self._driver.call(lambda: self._driver.shrink_here(-more))

    def shutdown(self) -> None:
        """Fails unfinished requests and ends all actors; Ray too, if this pool started it."""
        self._driver.stop()
        self._stop_ray()

    def __enter__(self) -> RolloutPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _stop_ray(self) -> None:
        if self._started_ray:
            import ray

            self._started_ray = False
            ray.shutdown()

    def _on_all(self, verb: str, **arguments: Any) -> None:
        driver = self._driver
        futures = driver.call(lambda: [handle.call(verb, **arguments) for handle in driver.fleet.serving])
        from ..errors import EngineLostError

        for future in futures:
            error = future.exception()
            if error is not None and not isinstance(error, EngineLostError):  # its successor is told
                raise error


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be an int of at least 1, got {value!r}")

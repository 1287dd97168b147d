"""The rollout engine: the verbs of the public API."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Hashable, Iterable, Iterator, Sized
from collections.abc import Sequence as SequenceOf
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from .config import EngineConfig
from .core import EngineCore
from .draft.drafter import Drafter, make_drafter
from .errors import ConfigError, EngineStateError, PromptError, RequestFailedError, UnknownRequestError
from .intake import Intake, Prompt, check_hashable
from .models import ModelConfig
from .outputs import Completion, RolloutOutput
from .progress import Progress
from .requests import Request
from .sampling import SamplingParams
from .sharding import MeshLayout
from .stats import EngineStats
from .tokenizer import Tokenizer
from .warm_up import warm_up
from .weight_updates import SleepLevel, SleepReport, WeightUpdates
from .weights.report import UpdateMode, WeightUpdateReport
from .weights.staging import StagingOptions
from .weights.watch import CheckpointWatch

_DEFAULT_SAMPLING = SamplingParams()
_DEFAULT_CONFIG = EngineConfig()


class RolloutEngine:
    """Generates rollouts of one policy, speculatively, and takes new weights while it runs.

    Not thread-safe: call it from one thread.

    Args:
        model_config: the policy's sizes and options.
        params: its weights, a pytree as `models.init_params` makes. jax arrays are kept, not copied: hand over
            copies if your trainer donates them.
        tokenizer: for text prompts, chat prompts, stop strings and `Completion.text`.
        config: sizes and options of the engine.
        mesh: the devices to run on, with any of the axes "data", "model" and "expert" (docs/meshes.md); None is
            where `params` are.
        drafter: a Drafter to use instead of the one that config.draft names.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        params: Any,
        *,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig = _DEFAULT_CONFIG,
        mesh: jax.sharding.Mesh | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        mesh_layout = None if mesh is None else MeshLayout(mesh, model_config)
        self.config = config
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.max_seq_len = config.max_seq_len or model_config.max_length
        if self.max_seq_len > model_config.max_length:
            raise ConfigError(
                f"EngineConfig.max_seq_len is {self.max_seq_len}, but the model takes at most "
                f"{model_config.max_length} tokens (rope kind {model_config.rope.kind!r})"
            )
        self.drafter = drafter if drafter is not None else make_drafter(config.draft)
        self._core = EngineCore(
            model_config,
            params,
            config,
            max_seq_len=self.max_seq_len,
            tokenizer=tokenizer,
            drafter=self.drafter,
            mesh_layout=mesh_layout,
        )
        self._intake = Intake(
            model_config,
            tokenizer,
            max_seq_len=self.max_seq_len,
            cache_tokens=self._core.scheduler.longest or self.max_seq_len,
            seed=config.seed,
        )
        self._ids = itertools.count()
        self._updates = WeightUpdates(self._core)
        self._watch: CheckpointWatch | None = None
        self._paused = self._closed = False

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        config: EngineConfig = _DEFAULT_CONFIG,
        *,
        dtype: Any = None,
        mesh: jax.sharding.Mesh | None = None,
    ) -> RolloutEngine:
        """An engine for a Hugging Face folder or a .gguf file.

        dtype: of weights and cache; None is float32 on CPU, where others are slow, and bfloat16 elsewhere.
        """
        from .loading import load_model

        loaded = load_model(path, dtype, mesh)
        return cls(loaded.config, loaded.params, tokenizer=loaded.tokenizer, config=config, mesh=mesh)

    # Generating

    def generate(
        self,
        prompts: SequenceOf[Prompt],
        sampling: SamplingParams | SequenceOf[SamplingParams] = _DEFAULT_SAMPLING,
        *,
        group_ids: SequenceOf[Hashable] | None = None,
        continue_from: Completion | SequenceOf[Completion | None] | None = None,
        progress: bool = False,
    ) -> list[RolloutOutput]:
        """Completions of all prompts, in their order.

        Args:
            prompts: texts, token id sequences or chat message lists.
            sampling: one for all, or one a prompt.
            group_ids: prompts with equal ids share draft history; by default equal prompts do.
            continue_from: partial completions to resume, one a prompt or None for a fresh start (for a single
                prompt, also the completion itself); `max_tokens` counts their tokens.
            progress: show a progress bar.

        Raises:
            PromptError, ConfigError, CapacityError: before anything runs.
            RequestFailedError: some requests failed; it carries the outputs of the others.
        """
        requests = self._check_all(prompts, sampling, group_ids, continue_from)
        for _ in self._run(requests, progress):
            pass
        failed = [request for request in requests if request.error is not None]
        if failed:
            raise RequestFailedError(failed, [request.output for request in requests]) from failed[0].error
        return [request.output for request in requests if request.output is not None]

    def stream(
        self,
        prompts: SequenceOf[Prompt],
        sampling: SamplingParams | SequenceOf[SamplingParams] = _DEFAULT_SAMPLING,
        *,
        group_ids: SequenceOf[Hashable] | None = None,
        continue_from: Completion | SequenceOf[Completion | None] | None = None,
        progress: bool = False,
    ) -> Iterator[RolloutOutput]:
        """As `generate`, but yields each output as its prompt ends; `RolloutOutput.index` is its place.

        Closing the iterator early aborts what still runs.
        """
        requests = self._check_all(prompts, sampling, group_ids, continue_from)
        return self._stream(requests, progress)

    def _stream(self, requests: list[Request], progress: bool) -> Iterator[RolloutOutput]:
        for request in self._run(requests, progress):
            if request.error is not None:
                raise RequestFailedError([request], []) from request.error
            assert request.output is not None
            yield request.output

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams = _DEFAULT_SAMPLING,
        *,
        request_id: Hashable = None,
        group_id: Hashable = None,
        continue_from: Completion | None = None,
    ) -> Request:
        """Queues a prompt; `step()` runs it. request_id: unique among unfinished ones; None makes one."""
        self._check_open()
        request = self._intake.request(
            prompt,
            sampling,
            request_id=self._new_id(request_id),
            group_id=group_id,
            continue_from=continue_from,
        )
        self._core.enqueue(request)
        return request

    def step(self) -> list[Request]:
        """Runs one step; returns the requests that ended since the last call, finished or failed.

        Does nothing but that while paused, or when there is nothing to run. An exception inside a step fails
        the requests that were running in it, with the exception as their `error`; the engine serves on.
        """
        self._check_awake()
        self._look_for_weights()
        if not self._paused and self._core.scheduler.has_work:
            self._check_weights()
            self._core.advance()
        ended, self._core.ended = self._core.ended, []
        return ended

    def score(
        self, prompts: SequenceOf[Prompt], completions: SequenceOf[Completion | ArrayLike]
    ) -> list[NDArray[np.float32]]:
        """Log-probabilities float32[T] of given completions behind their prompts, as `Completion.logprobs`.

        completions: Completions or token id sequences, one a prompt.
        """
        self._check_running()
        if len(prompts) != len(completions):
            raise PromptError(f"score got {len(prompts)} prompts and {len(completions)} completions")
        requests = []
        for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            given = completion.token_ids if isinstance(completion, Completion) else completion
            request_id = ("score", next(self._ids))
            requests.append(self._intake.scoring_request(prompt, given, request_id=request_id, index=index))
        for _ in self._run(requests, progress=False):
            pass
        failed = [request for request in requests if request.error is not None]
        if failed:
            raise RequestFailedError(failed, []) from failed[0].error
        return [request.sequences[0].logprobs for request in requests]

    def abort(self, request_ids: Iterable[Hashable] | None = None) -> None:
        """Ends requests with finish_reason "abort" and what they have; None: all. `step()` hands them out."""
        self._check_open()
        ids = list(self._core.requests) if request_ids is None else list(dict.fromkeys(request_ids))
        unknown = [request_id for request_id in ids if request_id not in self._core.requests]
        if unknown:
            raise UnknownRequestError(f"no unfinished request has the id(s) {unknown}")
        for request_id in ids:
            self._core.abort(self._core.requests[request_id])

    def pause(self) -> None:
        """`step()` computes nothing until `resume()`; requests keep their place and their cache."""
        self._check_open()
        self._paused = True

    def resume(self) -> None:
        """Undoes `pause`."""
        self._check_open()
        self._paused = False

    def sleep(self, level: SleepLevel = 1, *, keep_weights: bool = True) -> SleepReport:
        """Gives device memory back until `wake_up()`; the report says how much.

        Unfinished requests stay and are computed again afterwards, with the same tokens. New weights may be
        pushed meanwhile. A second call may deepen the sleep.

        Args:
            level: 1 frees the cache; 2 also takes the weights off the devices.
            keep_weights: at level 2, keep them in host memory; False drops them, and the engine generates only
                once `update_weights` has pushed others, before or after `wake_up()`.
        """
        self._check_open()
        return self._updates.sleep(level, keep_weights)

    def wake_up(self) -> None:
        """Undoes `sleep`. Finishes a drain that was asked for while asleep, if requests had begun by then."""
        self._check_open()
        self._updates.wake_up()

    # Weights

    @property
    def weight_version(self) -> int:
        """Version of the weights that serve; 0 for those the engine was made with."""
        return self._core.weight_version

    @property
    def params(self) -> dict:
        """The weights that serve; numpy arrays while the host keeps them for a sleeping engine. Don't donate them.

        Quantised weights are multiplied out, anew each time: a copy in the dtype of the weights that were given.
        """
        return self._core.executor.dense_params

    def checksum(self) -> str:
        """Checksum of what the engine serves now; compare it with `rollout_spec.weights.checksum` of yours."""
        return self._core.executor.weights.fingerprint.read()

    def update_weights(
        self,
        weights: Any,
        *,
        version: int | None = None,
        mode: UpdateMode = "drain",
        strict: bool = True,
        check_finite: bool = False,
        checksum: str | None = None,
        donate: bool = False,
    ) -> WeightUpdateReport:
        """Replaces the weights, as a whole or not at all. Works on a paused and on a sleeping engine too.

        Args:
            weights: a pytree shaped like `engine.params` (nnx.State and nnx.Module too); a mapping or an iterable of
                (Hugging Face name, array), which may be of jax, numpy, torch or anything with dlpack; a folder of
                safetensors, an Orbax checkpoint or its manager's folder (`weights.OrbaxCheckpoint` names a step),
                or a folder of a PEFT adapter. In place of an array, (A, B, scale) is an adapter merged into the base,
                which the next update finds unmerged. Floats are converted to the engine's dtype.
            version: a number for these weights; None counts on. The present one again is a no-op.
            mode: what becomes of running requests. "drain" finishes them on the old weights first, "interrupt"
                ends them with finish_reason "abort", "inflight" goes on with a cache recomputed under the new
                weights, "inflight_keep" goes on with the cache as it is. While weights are read and copied, requests
                that have begun go on by a step on the old ones every 64 MiB, except with "interrupt".
            strict: refuse weights that lack some; otherwise those stay, and the report lists them.
            check_finite: refuse NaN and infinity.
            checksum: the sender's `weights.checksum`; refuse what arrives as anything else.
            donate: take the sender's jax arrays over instead of copying them, which ends the sender's use of them.

        Raises:
            WeightUpdateError: with every fault; the old weights keep serving.
            EngineStateError: a drain of requests whose weights `sleep` dropped.
        """
        self._check_open()
        options = StagingOptions(strict, check_finite, checksum, donate, to_host=self._updates.asleep == 2)
        return self._updates.update(
            weights, version=version, mode=mode, options=options, steps=not self._paused
        )

    def watch(
        self, path: str | os.PathLike[str], *, mode: UpdateMode = "drain", settle_s: float = 0.1
    ) -> CheckpointWatch:
        """Takes each new complete checkpoint in a folder from now on, looked for before every step.

        Args:
            path: a folder of checkpoints, or one checkpoint that is written anew each time.
            mode: as of `update_weights`. settle_s: how long a checkpoint must lie unchanged, in seconds.
        """
        self._check_open()
        if self._watch is not None and not self._watch.stopped:
            raise EngineStateError(f"the engine watches {self._watch.path} already; stop() that watch first")
        self._watch = CheckpointWatch(path, self, mode=mode, settle_s=settle_s)
        return self._watch

    def _look_for_weights(self) -> None:
        if self._watch is not None:
            self._watch.look()

    # Running

    def _check_all(
        self,
        prompts: SequenceOf[Prompt],
        sampling: SamplingParams | SequenceOf[SamplingParams],
        group_ids: SequenceOf[Hashable] | None,
        continue_from: Completion | SequenceOf[Completion | None] | None,
    ) -> list[Request]:
        """Requests for all prompts, nothing queued yet."""
        self._check_running()
        if isinstance(prompts, str):
            raise PromptError("prompts must be a list of prompts, got one text; put it into a list")
        if not isinstance(prompts, Iterable):
            raise PromptError(f"prompts must be a list of prompts, got {type(prompts).__name__}")
        prompts = list(prompts)
        options: dict[str, Any] = {
            "sampling": sampling,
            "group_ids": group_ids,
            "continue_from": continue_from,
        }
        count = len(prompts)
        for name, values in options.items():
            if values is None or isinstance(values, SamplingParams):
                options[name] = [values] * count
            elif not isinstance(values, Sized) or len(values) != count:
                given = len(values) if isinstance(values, Sized) else type(values).__name__
                raise ConfigError(f"{name} must have one entry a prompt: {count} prompts, got {given}")
        for index, group_id in enumerate(options["group_ids"]):
            check_hashable(f"group_ids[{index}]", group_id)
        requests = [
            self._intake.request(
                prompt,
                one_sampling,
                request_id=self._new_id(None),
                group_id=group_id,
                index=index,
                continue_from=partial,
                name=f"prompts[{index}]",
            )
            for index, (prompt, one_sampling, group_id, partial) in enumerate(
                zip(prompts, *options.values(), strict=True)
            )
        ]
        return requests

    def _run(self, requests: SequenceOf[Request], progress: bool) -> Iterator[Request]:
        """Queues `requests` and steps until they ended; yields each as it does, aborts the rest if abandoned.

        Other requests advance too; those that end are left for `step()`.
        """
        mine: list[Request] = []  # ended, not yet yielded
        pending = len(requests)
        for request in requests:
            request.ended_list = mine
            self._core.enqueue(request)
        stats = self._core.stats
        tokens, steps = stats.generated_tokens, stats.decode_steps
        try:
            with Progress(progress, "prompts", len(requests)) as bar:
                while pending:
                    while mine:
                        pending -= 1
                        bar.advance(1)
                        yield mine.pop(0)
                    stats = self._core.stats
                    bar.report(stats.generated_tokens - tokens, stats.decode_steps - steps)
                    if pending:
                        self._look_for_weights()
                        self._check_running()
                        self._core.advance()
        finally:
            for request in requests:
                if not request.ended:
                    self._core.abort(request)

    def _new_id(self, request_id: Hashable) -> Hashable:
        check_hashable("request_id", request_id)
        if request_id is None:
            request_id = next(self._ids)
            while request_id in self._core.requests:
                request_id = next(self._ids)
        elif request_id in self._core.requests:
            raise ConfigError(f"request_id {request_id!r} belongs to an unfinished request; choose another")
        return request_id

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStateError("the engine is closed; make a new one")

    def _check_awake(self) -> None:
        self._check_open()
        if self._updates.asleep:
            raise EngineStateError("the engine is asleep; call wake_up() first")

    def _check_weights(self) -> None:
        if self._core.executor.weights.params is None:
            raise EngineStateError("sleep dropped the weights; push new ones with update_weights() first")

    def _check_running(self) -> None:
        self._check_awake()
        if self._paused:
            raise EngineStateError("the engine is paused; call resume() first")
        self._check_weights()

    # State

    def warm_up(self, progress: bool = False) -> None:
        """Compiles every size of step, and measures it for the draft budget; nothing compiles afterwards.

        Optional: otherwise each size is compiled when it is first needed.
        """
        self._check_running()
        warm_up(self._core, progress)

    def stats(self) -> EngineStats:
        """Counts since the start or `reset_stats()`."""
        stats = copy.deepcopy(self._core.stats)
        stats.running, stats.waiting = len(self._core.scheduler.running), len(self._core.scheduler.waiting)
        stats.pages, stats.pages_held = self._core.executor.num_pages, self._core.scheduler.pool.num_held
        stats.preemptions = self._core.scheduler.preemptions
        stats.prompt_tokens_cached = self._core.scheduler.cached_prompt_tokens
        stats.prompt_tokens_from_host = self._core.scheduler.host_cached_tokens
        host_cache = self._core.scheduler.host_cache
        stats.host_cache_bytes = 0 if host_cache is None else host_cache.bytes
        stats.step_shapes = self._core.executor.shapes_run
        stats.drafter_bytes = self.drafter.memory_bytes if self.drafter is not None else 0
        return stats

    def reset_stats(self) -> None:
        """Starts counting anew."""
        self._core.stats = EngineStats()
        scheduler = self._core.scheduler
        scheduler.preemptions = scheduler.cached_prompt_tokens = scheduler.host_cached_tokens = 0

    def clear_prefix_cache(self) -> None:
        """Forgets what is cached of prompts that don't run; those that do keep theirs, and share it no more."""
        self._check_open()
        self._core.scheduler.new_version(self.weight_version)

    def save_history(self, path: str | os.PathLike[str]) -> None:
        """Writes the drafter's history to one file."""
        self._drafter_with_history().save(path)

    def load_history(self, path: str | os.PathLike[str]) -> None:
        """Replaces the drafter's history by what `save_history` wrote."""
        self._drafter_with_history().load(path)

    def _drafter_with_history(self) -> Drafter:
        if self.drafter is None:
            raise EngineStateError('drafting is off (DraftConfig(kind="none")), so there is no history')
        self._core.planner.catch_up()
        return self.drafter

    def close(self) -> None:
        """Fails unfinished requests and frees device memory. A closed engine only says that it is."""
        if self._closed:
            return
        for request in list(self._core.requests.values()):
            self._core.fail(request, EngineStateError("the engine was closed"))
        self._core.executor.free_cache()
        self._closed = True

    def __enter__(self) -> RolloutEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

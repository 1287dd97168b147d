"""The Ray actor around an engine."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from .placement import cores_for

if TYPE_CHECKING:
    from ..engine import RolloutEngine
    from .messages import EngineFacts, LearntText, Message, Report

_log = logging.getLogger(__name__)

GROUPS = {"mail": 1, "reports": 2, "bulk": 1}


_JAX_OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_default_matmul_precision",
)


def jax_options() -> dict[str, Any]:
    """This process's options that engines shall have too: where compiled programs are kept, and how products round."""
    import jax

    return {name: getattr(jax.config, name) for name in _JAX_OPTIONS}


@dataclass(frozen=True, eq=False)
class WeightStep:
    """Weights that an engine which starts later takes, to be where the others are. weights: gives them when called."""

    weights: Callable[[], Any]
    version: int
    strict: bool


@dataclass(frozen=True, eq=False)
class BuildPlan:
    """How an engine comes to be.

    make: builds it. cpus: CPU cores of its own, the `place`-th so many; 0 for all. steps: weights to take after that.
    history: a reference to a saved history, in a list. jax_options: jax.config's, which the driver has too.
    """

    number: int
    make: Callable[[], RolloutEngine]
    place: int = 0
    cpus: float = 0.0
    steps: list[WeightStep] = field(default_factory=list)
    history: list[Any] = field(default_factory=list)
    jax_options: dict[str, Any] = field(default_factory=dict)


class EngineActor:
    """One engine. Every method answers at once, or, `report`, after a time the caller sets."""

    def __init__(self, plan: BuildPlan) -> None:
        cores = cores_for(plan.place, plan.cpus, sorted(os.sched_getaffinity(0)))
        if cores:
            # Before JAX makes its threads, whose number and place follow from it.
            os.sched_setaffinity(0, cores)
        from .runner import EngineRunner

        self._number = plan.number
        self._runner = EngineRunner(lambda: self._build(plan), _facts)

    @ray.method(concurrency_group="mail")
    def post(self, number: int, messages: list[Message]) -> None:
        """See EngineRunner.post."""
        self._runner.post(number, messages)

    @ray.method(concurrency_group="reports")
    def report(self, timeout_s: float) -> Report:
        """See EngineRunner.report."""
        return self._runner.report(timeout_s)

    @ray.method(concurrency_group="bulk")
    def learn(self, texts: list[list[Any]]) -> None:
        """References to lists of completions, for the drafter; its own are left out."""
        for ref in texts:
            batch: list[LearntText] = ray.get(ref[0])
            self._runner.learn([text for text in batch if text.engine != self._number])

    def _build(self, plan: BuildPlan) -> RolloutEngine:
        import jax

        for name, value in plan.jax_options.items():
            jax.config.update(name, value)
        engine = plan.make()
        for step in plan.steps:
            engine.update_weights(step.weights(), version=step.version, strict=step.strict)
        if plan.history and engine.drafter is not None:
            try:
                load_history(engine.drafter, ray.get(plan.history[0]))
            except Exception:  # drafts are worse for a while, and no token is another
                _log.exception("the engine starts without a history")
        return engine


def load_history(drafter: Any, content: bytes | None) -> None:
    """Gives a drafter what `save` wrote."""
    if content is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "history")
        with open(path, "wb") as file:
            file.write(content)
        drafter.load(path)


def saved_history(drafter: Any) -> bytes:
    """What a drafter's `save` writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "history")
        drafter.save(path)
        with open(path, "rb") as file:
            return file.read()


def _facts(engine: Any) -> EngineFacts:
    from .messages import EngineFacts

    devices: tuple[str, ...] = ()
    with contextlib.suppress(Exception):
        import jax

        devices = tuple(str(device) for device in jax.devices())
    return EngineFacts(
        model_config=engine.model_config,
        tokenizer=engine.tokenizer,
        max_seq_len=engine.max_seq_len,
        cache_tokens=engine.stats().pages * engine.config.page_size,
        slots=engine.config.max_seqs,
        pid=os.getpid(),
        node_id=ray.get_runtime_context().get_node_id(),
        cpu_cores=tuple(sorted(os.sched_getaffinity(0))),
        devices=devices,
        draft_config=engine.config.draft if engine.drafter is not None else None,
        weight_version=engine.weight_version,
        seed=engine.config.seed,
    )


class HistoryKeeper:
    """A drafter that learns what all engines generate, so that an engine which starts later can be given it.

    An actor of its own: saving a history would make an engine's steps wait.
    """

    def __init__(self, draft_config: Any) -> None:
        from ..draft.drafter import make_drafter
        from .learning import TextLearner

        self._drafter = make_drafter(draft_config)
        self._learner = TextLearner(self._drafter)

    def learn(self, texts: list[list[Any]]) -> None:
        """As EngineActor.learn."""
        for ref in texts:
            self._learner.put(ray.get(ref[0]))

    def snapshot(self) -> bytes | None:
        """The history as a file's content; None without a drafter."""
        self._learner.flush()
        return None if self._drafter is None else saved_history(self._drafter)

"""Engines with drafting off and on, measured in turns on the same requests."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..config import EngineConfig
from ..draft.config import DraftConfig
from ..engine import RolloutEngine
from ..loading.load import LoadedModel
from ..sampling import SamplingParams
from ..stats import EngineStats

PLAIN = 0
"""Key of the engine with drafting off, beside the others' `max_nodes`."""
_SEQUENCES_A_SLOT = 2
"""In a play, unless the file or the limit has fewer: a batch that fills, runs full and drains."""
_LEAST_PROMPTS = 2


@dataclass(frozen=True)
class Settings:
    """What is compared.

    slots: `EngineConfig.max_seqs` of the engines, one after another. nodes: `DraftConfig.max_nodes` of those that
    draft, the first being the one that others are compared with. samples: completions of a prompt. epochs: how often
    a round asks the same prompts, with other seeds, and with a weight update in between as in training. rounds: each
    begins with an empty history. limit: most prompts in a round; None takes about twice as many completions as slots.
    """

    slots: tuple[int, ...] = (1, 4, 16)
    nodes: tuple[int, ...] = (DraftConfig.max_nodes,)
    temperature: float = 1.0
    samples: int = 4
    max_tokens: int = 128
    epochs: int = 2
    rounds: int = 3
    limit: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Figures:
    """One engine in one epoch, over all rounds. Speeds in tokens a second, by round; see EngineStats for the rest."""

    speeds: tuple[float, ...]
    acceptance_length: float
    nodes_per_step: float
    host_share: float

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)


@dataclass(frozen=True)
class Comparison:
    """All engines of a number of slots. epochs: figures by PLAIN and by max_nodes, an entry an epoch.

    completions: how many each engine made; identical: those that all made with the same tokens.
    """

    slots: int
    epochs: tuple[dict[int, Figures], ...]
    completions: int
    identical: int
    warm_up_s: float

    def ratios(self, nodes: int, epoch: int = -1) -> list[float]:
        """Speed with drafts by that without, by round."""
        figures = self.epochs[epoch]
        return [one / plain for one, plain in zip(figures[nodes].speeds, figures[PLAIN].speeds, strict=True)]

    def ratio(self, nodes: int, epoch: int = -1) -> float:
        """Their median."""
        return statistics.median(self.ratios(nodes, epoch))


@dataclass(frozen=True)
class _Play:
    seconds: float
    tokens: list[list[int]]
    stats: EngineStats


def compare(
    settings: Settings, model: LoadedModel, prompts: Sequence[NDArray[np.int32]], say: Callable[[str], None]
) -> Iterator[Comparison]:
    """Measures one number of slots after another. say: told what is going on."""
    for slots in settings.slots:
        with _engines(settings, model, prompts, slots) as engines:
            say(f"{slots} slots: compiling and warming up {len(engines)} engines ...")
            started = time.perf_counter()
            for engine in engines.values():
                engine.warm_up()
                engine.generate(prompts[:1], SamplingParams(max_tokens=2))
            warm_up_s = time.perf_counter() - started
            yield _compare(settings, engines, prompts, slots, warm_up_s, say)


@contextmanager
def _engines(
    settings: Settings, model: LoadedModel, prompts: Sequence[NDArray[np.int32]], slots: int
) -> Iterator[dict[int, RolloutEngine]]:
    """Engines by PLAIN and by max_nodes. Caches of one size share what is compiled."""
    widest = max(settings.nodes)
    engines = {}
    for nodes in (PLAIN, *settings.nodes):
        draft = DraftConfig(kind="none", max_nodes=widest) if nodes == PLAIN else DraftConfig(max_nodes=nodes)
        config = EngineConfig(
            max_seqs=slots,
            max_seq_len=max(map(len, prompts)) + settings.max_tokens,
            max_batch_tokens=max(EngineConfig.max_batch_tokens, slots),
            draft=draft,
        )
        engines[nodes] = RolloutEngine(model.config, model.params, tokenizer=model.tokenizer, config=config)
    try:
        yield engines
    finally:
        for engine in engines.values():
            engine.close()


def _compare(
    settings: Settings,
    engines: dict[int, RolloutEngine],
    prompts: Sequence[NDArray[np.int32]],
    slots: int,
    warm_up_s: float,
    say: Callable[[str], None],
) -> Comparison:
    count = _prompts_in_a_round(settings, len(prompts), slots)
    plays: list[dict[int, list[_Play]]] = [{nodes: [] for nodes in engines} for _ in range(settings.epochs)]
    seeds = itertools.count(settings.seed)
    with tempfile.TemporaryDirectory() as folder:
        empty = {nodes: Path(folder) / str(nodes) for nodes in settings.nodes}
        for nodes, path in empty.items():
            engines[nodes].save_history(path)
        for number in range(settings.rounds):
            chosen = [prompts[(number * count + index) % len(prompts)] for index in range(count)]
            for nodes, path in empty.items():
                engines[nodes].load_history(path)
            for epoch, played in enumerate(plays):
                say(f"{slots} slots: round {number + 1} of {settings.rounds}, epoch {epoch + 1} ...")
                sampling = [_sampling(settings, next(seeds)) for _ in chosen]
                order = list(engines)[:: 1 if (number + epoch) % 2 == 0 else -1]
                for nodes in order:
                    engines[nodes].update_weights(engines[nodes].params)
                    played[nodes].append(_play(engines[nodes], chosen, sampling))
    tokens = [
        [completion for played in plays for play in played[nodes] for completion in play.tokens]
        for nodes in engines
    ]
    return Comparison(
        slots=slots,
        epochs=tuple({nodes: _figures(those) for nodes, those in played.items()} for played in plays),
        completions=len(tokens[0]),
        identical=sum(all(other == one[0] for other in one) for one in zip(*tokens, strict=True)),
        warm_up_s=warm_up_s,
    )


def _prompts_in_a_round(settings: Settings, available: int, slots: int) -> int:
    wanted = settings.limit or max(_LEAST_PROMPTS, -(-_SEQUENCES_A_SLOT * slots // settings.samples))
    return min(wanted, available)


def _sampling(settings: Settings, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=settings.temperature, max_tokens=settings.max_tokens, n=settings.samples, seed=seed
    )


def _play(
    engine: RolloutEngine, prompts: Sequence[NDArray[np.int32]], sampling: Sequence[SamplingParams]
) -> _Play:
    engine.reset_stats()
    started = time.perf_counter()
    outputs = engine.generate(prompts, sampling)
    seconds = time.perf_counter() - started
    tokens = [completion.token_ids.tolist() for output in outputs for completion in output.completions]
    return _Play(seconds, tokens, dataclasses.replace(engine.stats()))


def _figures(plays: Sequence[_Play]) -> Figures:
    steps = sum(play.stats.decode_steps for play in plays)
    return Figures(
        speeds=tuple(sum(map(len, play.tokens)) / play.seconds for play in plays),
        acceptance_length=sum(play.stats.generated_tokens for play in plays) / steps,
        nodes_per_step=sum(play.stats.drafted for play in plays) / steps,
        host_share=statistics.median(play.stats.host_share for play in plays),
    )

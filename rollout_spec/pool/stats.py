"""What a pool did, counted."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..stats import EngineStats
from ..weights.report import WeightUpdateReport


@dataclass
class PoolStats:
    """Counts since the pool was made. engines: of each living one since it was made or `reset_stats`, by its number."""

    requests_finished: int = 0
    requests_failed: int = 0
    samples_moved: int = 0
    """To another engine while they ran."""
    samples_retried: int = 0
    """Run again after their engine was lost or a step of theirs failed."""
    engines_lost: int = 0
    engines_started: int = 0
    weight_objects: int = 0
    """Put into the object store for weight updates."""
    history_objects: int = 0
    history_bytes: int = 0
    history_bytes_left_out: int = 0
    """Of completions that were not shared because of the byte budget."""
    waiting: int = 0
    running: int = 0
    """Samples that no engine has, and that one has."""
    lost_because: list[str] = field(default_factory=list)
    """Of the last engines lost, the reasons."""
    engines: dict[int, EngineStats] = field(default_factory=dict)

    @property
    def generated_tokens(self) -> int:
        """Of all living engines."""
        return sum(stats.generated_tokens for stats in self.engines.values())

    @property
    def decode_steps(self) -> int:
        """Of all living engines."""
        return sum(stats.decode_steps for stats in self.engines.values())

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per sequence and verify step, over all living engines."""
        return self.generated_tokens / self.decode_steps if self.decode_steps else 0.0


@dataclass(frozen=True)
class PoolUpdateReport(WeightUpdateReport):
    """What a weight update of a pool did: totals, and each engine's own report by its number.

    put_s: seconds of putting the weights into the object store. lost: engines that were lost during the update and
    start again on the new weights.
    """

    put_s: float = 0.0
    engines: dict[int, WeightUpdateReport] = field(default_factory=dict)
    lost: tuple[int, ...] = ()

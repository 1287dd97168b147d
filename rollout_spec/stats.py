"""What an engine did, counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EngineStats:
    """Counts since the engine was made or `reset_stats` was called. Times in seconds."""

    requests_finished: int = 0
    requests_failed: int = 0
    generated_tokens: int = 0
    """Tokens of completions, finished or not."""
    prompt_tokens_computed: int = 0
    """Prompt tokens (and, after a preemption, output tokens) run through the model."""
    prompt_tokens_cached: int = 0
    """Those taken from the prefix cache instead."""
    steps: int = 0
    steps_with_drafts: int = 0
    decode_steps: int = 0
    """Steps of a sequence that emitted at least one token: the forward passes plain decoding would count."""
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    step_shapes: int = 0
    """Sizes that steps have been compiled for in this engine's life."""
    device_s: float = 0.0
    """From the call of a step to the arrival of its results."""
    host_s: float = 0.0
    """The rest of the step: scheduling, drafting, packing, learning, bookkeeping."""
    pages_held: int = 0
    pages: int = 0
    running: int = 0
    waiting: int = 0
    drafter_bytes: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per sequence and verify step, the bonus token included."""
        return self.generated_tokens / self.decode_steps if self.decode_steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of stepping."""
        total = self.device_s + self.host_s
        return self.generated_tokens / total if total else 0.0

    @property
    def host_share(self) -> float:
        """Share of the steps' time spent outside the device call."""
        total = self.device_s + self.host_s
        return self.host_s / total if total else 0.0

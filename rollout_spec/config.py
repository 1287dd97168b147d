"""Configuration of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from .draft.config import DraftConfig
from .errors import ConfigError

KERNELS = ("auto", "pallas", "reference")
QUANTIZED_TYPES = ("int8", "fp8")


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and options of a RolloutEngine. Raises ConfigError at once, listing every value out of range.

    None of them changes a token, but for `weight_dtype` and `cache_dtype`, which change the policy that is sampled
    from (docs/quantisation.md says by how much).

    max_seqs: completions that run at the same time (slots).
    max_seq_len: longest prompt + completion, in tokens; None is the model's.
    page_size: tokens in a page of the key/value cache.
    kv_pages: pages of the cache; None takes what `max_seqs` sequences of `max_seq_len` need, but at most 1 GiB
        on CPU and 40% of the free device memory elsewhere. When pages run out, the latest request is preempted
        and recomputed later.
    max_batch_tokens: most tokens in a step: prompt chunks, last tokens and draft nodes together.
    prefix_cache: share pages between requests with a common prefix.
    draft: what is drafted; `DraftConfig(kind="none")` switches drafting off.
    seed: where the seeds of requests without one are drawn from.
    kernel: "auto" (Pallas kernels on TPU, the XLA reference elsewhere), "pallas" (on a CPU interpreted, for tests)
        or "reference". What the Pallas kernels don't support is refused when the engine is made.
    host_cache_bytes: host memory for pages of the prefix cache that the device has no room for; they come back when
        their prefix is asked for. 0 keeps none.
    weight_dtype: "int8" or "fp8" (e4m3) stores projections and experts in 8 bits, quantised on the device when the
        engine is made and at every update; None stores them as they come.
    cache_dtype: "int8" or "fp8" for 8-bit keys and values; None is the weights' dtype.
    """

    max_seqs: int = 16
    max_seq_len: int | None = None
    page_size: int = 16
    kv_pages: int | None = None
    max_batch_tokens: int = 256
    prefix_cache: bool = True
    draft: DraftConfig = field(default_factory=DraftConfig)
    seed: int = 0
    kernel: str = "auto"
    host_cache_bytes: int = 0
    weight_dtype: str | None = None
    cache_dtype: str | None = None

    def __post_init__(self) -> None:
        faults = []
        for name, optional, low in (
            ("max_seqs", False, 1),
            ("max_seq_len", True, 2),
            ("page_size", False, 1),
            ("kv_pages", True, 1),
            ("max_batch_tokens", False, 1),
            ("seed", False, 0),
            ("host_cache_bytes", False, 0),
        ):
            value = getattr(self, name)
            if optional and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                faults.append(f"{name} must be an int{' or None' if optional else ''}, got {value!r}")
            elif value < low:
                faults.append(f"{name} must be at least {low}, got {value}")
        if not isinstance(self.prefix_cache, bool):
            faults.append(f"prefix_cache must be True or False, got {self.prefix_cache!r}")
        if not isinstance(self.draft, DraftConfig):
            faults.append(f"draft must be a DraftConfig, got {self.draft!r}")
        if self.kernel not in KERNELS:
            faults.append(f"kernel must be one of {', '.join(KERNELS)}, got {self.kernel!r}")
        for name in ("weight_dtype", "cache_dtype"):
            value = getattr(self, name)
            if value is not None and value not in QUANTIZED_TYPES:
                faults.append(f"{name} must be one of {', '.join(QUANTIZED_TYPES)} or None, got {value!r}")
        if not faults and self.host_cache_bytes and not self.prefix_cache:
            faults.append(
                "host_cache_bytes is for prefix_cache=True: without one nothing is cached to be kept"
            )
        if not faults and self.max_batch_tokens < self.max_seqs:
            faults.append(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_seqs ({self.max_seqs}), "
                "so that every running request can advance in every step"
            )
        if faults:
            raise ConfigError("EngineConfig: " + "; ".join(faults))

"""The engine's counts as Prometheus reads them."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest
from rollout_spec.integrations.server.host import EngineHost

_COUNTERS = {
    "generated_tokens": "Tokens of completions.",
    "prompt_tokens_computed": "Prompt tokens run through the model.",
    "prompt_tokens_cached": "Prompt tokens taken from the prefix cache.",
    "requests_finished": "Requests that finished.",
    "requests_failed": "Requests that failed.",
    "steps": "Steps of the engine.",
    "steps_with_drafts": "Steps that verified drafts.",
    "drafted": "Draft tokens verified.",
    "accepted": "Draft tokens accepted.",
    "preemptions": "Requests that gave up their place and were computed again.",
    "device_s": "Seconds of the device.",
    "host_s": "Seconds of the host besides.",
}
_GAUGES = {
    "running": "Samples that run.",
    "waiting": "Samples that wait for a slot.",
    "pages_held": "Pages of the cache in use.",
    "pages": "Pages of the cache.",
    "drafter_bytes": "Memory of the drafter.",
    "acceptance_length": "Tokens a sequence emits in a step.",
    "estimated_speedup": "Over the same engine without drafts, as it estimates.",
}


def exposition(host: EngineHost) -> tuple[bytes, str]:
    """The text, and its media type. For the engine's thread."""
    registry, stats = CollectorRegistry(), host.engine.stats()
    for name, text in _COUNTERS.items():
        Counter(f"rollout_spec_{name}", text, registry=registry).inc(getattr(stats, name))
    for name, text in _GAUGES.items():
        Gauge(f"rollout_spec_{name}", text, registry=registry).set(getattr(stats, name))
    Gauge("rollout_spec_weight_version", "Version of the weights.", registry=registry).set(
        host.engine.weight_version
    )
    Gauge("rollout_spec_paused", "1 while generation is paused.", registry=registry).set(host.paused)
    return generate_latest(registry), CONTENT_TYPE_LATEST

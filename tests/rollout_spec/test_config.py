"""EngineConfig and DraftConfig are checked at once and as a whole."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from rollout_spec import DraftConfig, EngineConfig, RolloutError
from rollout_spec.draft.config import LONGEST_MATCH
from rollout_spec.errors import ConfigError

NOT_COUNTS: list[Any] = [-1, 1.0, "4", True]

ENGINE_FAULTS: dict[str, list[Any]] = {
    "max_seqs": [0, None, *NOT_COUNTS],
    "max_seq_len": [0, 1, *NOT_COUNTS],
    "page_size": [0, None, *NOT_COUNTS],
    "kv_pages": [0, *NOT_COUNTS],
    "max_batch_tokens": [0, None, *NOT_COUNTS],
    "prefix_cache": [1, None, "yes"],
    "draft": [None, "trie", {"kind": "trie"}],
    "seed": [None, *NOT_COUNTS],
    "host_cache_bytes": [None, *NOT_COUNTS],
    "kernel": ["mosaic", None, 1],
    "weight_dtype": ["int4", "bfloat16", 8],
    "cache_dtype": ["int4", "bfloat16", 8],
}
DRAFT_FAULTS: dict[str, list[Any]] = {
    "kind": ["Trie", None, 1],
    "max_nodes": [64, None, *NOT_COUNTS],
    "branching": [1, None],
    "gate": [0, None],
    "capacity_tokens": [0, None, *NOT_COUNTS],
    "max_match": [0, LONGEST_MATCH + 1, None, *NOT_COUNTS],
    "min_prob": [0, 0.0, 1.0, -0.1, float("nan"), None, "0.1", True],
    "version_decay": [0, 0.0, 1.1, -0.1, float("nan"), None, True],
}


def cases(faults: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in faults.items() for value in values]


@pytest.mark.parametrize(("name", "value"), cases(ENGINE_FAULTS), ids=repr)
def test_engine_values_out_of_range_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"EngineConfig.*{name}") as raised:
        EngineConfig(**{name: value})
    assert isinstance(raised.value, ConfigError)
    assert isinstance(raised.value, RolloutError)


@pytest.mark.parametrize(("name", "value"), cases(DRAFT_FAULTS), ids=repr)
def test_draft_values_out_of_range_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"DraftConfig.*{name}") as raised:
        DraftConfig(**{name: value})
    assert isinstance(raised.value, ConfigError)


def test_all_faults_are_listed() -> None:
    with pytest.raises(ConfigError) as raised:
        EngineConfig(max_seqs=0, page_size=-3, kernel="cuda", prefix_cache=None)  # type: ignore[arg-type]
    for part in ("max_seqs", "page_size", "-3", "kernel", "cuda", "prefix_cache"):
        assert part in str(raised.value)
    with pytest.raises(ConfigError) as raised:
        DraftConfig(kind="none at all", max_nodes=99, min_prob=7)  # type: ignore[arg-type]
    for part in ("kind", "none at all", "max_nodes", "99", "min_prob", "7"):
        assert part in str(raised.value)


def test_every_running_request_must_have_a_token_in_every_step() -> None:
    with pytest.raises(ConfigError, match=r"max_batch_tokens \(7\).*max_seqs \(8\)"):
        EngineConfig(max_seqs=8, max_batch_tokens=7)
    EngineConfig(max_seqs=8, max_batch_tokens=8)


def test_bounds_themselves_are_in_range() -> None:
    EngineConfig(max_seqs=1, max_seq_len=2, page_size=1, kv_pages=1, max_batch_tokens=1, seed=0)
    DraftConfig(max_nodes=0, capacity_tokens=1, max_match=1, min_prob=1e-9, version_decay=1)
    DraftConfig(max_nodes=63, max_match=LONGEST_MATCH)


def test_both_are_frozen_hashable_and_travel() -> None:
    for config in (EngineConfig(max_seqs=3), DraftConfig(max_nodes=3)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.seed = 1  # type: ignore[misc, union-attr]
        assert pickle.loads(pickle.dumps(config)) == config
        assert hash(config) == hash(dataclasses.replace(config))


def test_the_defaults_are_those_of_the_design() -> None:
    config = EngineConfig()
    assert (config.max_seqs, config.max_seq_len, config.page_size, config.kv_pages) == (16, None, 16, None)
    assert (config.prefix_cache, config.seed, config.kernel) == (True, 0, "auto")
    draft = config.draft
    assert (draft.kind, draft.max_nodes, draft.branching, draft.gate) == ("trie", 16, True, True)
    assert draft.capacity_tokens == 4_000_000

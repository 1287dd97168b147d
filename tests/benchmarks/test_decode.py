"""The decode benchmark: rivals take turns, medians are medians, nothing is carried over between calls."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import decode, machine
from benchmarks.huggingface_folder import save_huggingface
from benchmarks.rival_process import Run, transformers_process
from rollout_spec import DraftConfig, EngineConfig, RolloutEngine
from tests.helpers.tiny_models import tiny_model


def run(seconds: float, *tokens: list[int]) -> Run:
    return Run(seconds, list(tokens))


def test_rounds_alternate_who_goes_first() -> None:
    order: list[str] = []

    def rival(name: str) -> list[Run]:
        order.append(name)
        return [run(1.0, [1])]

    runs = decode.in_turns(3, {name: lambda name=name: rival(name) for name in ("one", "two", "three")})
    assert order == ["one", "two", "three", "three", "two", "one", "one", "two", "three"]
    assert {name: len(rounds) for name, rounds in runs.items()} == {"one": 3, "two": 3, "three": 3}


def test_speed_is_the_median_over_rounds_of_all_tokens_by_all_seconds() -> None:
    rounds = [[run(1.0, [1, 2]), run(3.0, [3, 4])], [run(1.0, [1, 2]), run(0.0, [3, 4])], [run(9.0, [1, 2])]]
    other = [[run(1.0, [1, 2]), run(1.0, [3, 5])]] * 3
    summary = decode.summarise({"one": rounds, "two": other})
    assert summary["one"]["tokens_per_s_of_rounds"] == [1.0, 4.0, pytest.approx(2 / 9)]
    assert summary["one"]["tokens_per_s"] == 1.0
    assert summary["two"]["completions_as_first_rival"] == 1
    assert summary["two"]["tokens"] == 4


def test_every_call_starts_with_an_empty_history(tmp_path: Path) -> None:
    model = tiny_model("llama")
    config = EngineConfig(
        max_seqs=1, max_batch_tokens=32, prefix_cache=False, draft=DraftConfig(max_nodes=4, gate=False)
    )
    subject = decode.Subject(RolloutEngine(model.config, model.params, config=config), tmp_path)
    for _ in range(2):
        subject.generate("part", [[1, 2, 4]], 24, stop_at_eos=False)
    first, second = subject.stats["part"]
    assert (first.drafted, first.accepted, first.steps) == (second.drafted, second.accepted, second.steps)
    assert first.generated_tokens == 24


def test_compilations_are_counted() -> None:
    counter = decode.CompileCounter()
    jax.jit(lambda x: x * 2.5 + len("a function that nothing else compiles"))(jnp.ones(7)).block_until_ready()
    assert counter.count > 0


def test_prompts_are_those_of_the_issue() -> None:
    entries = [
        json.loads(line) for line in (decode.FOLDER / "data" / "prompts.jsonl").read_text().splitlines()
    ]
    kinds = [entry["kind"] for entry in entries]
    assert (kinds.count("math"), kinds.count("grounded")) == (56, 7)


def test_copy_bandwidth_counts_both_directions() -> None:
    assert 1e8 < machine.copy_bandwidth(2, megabytes=8, repeats=3) < 1e13


@pytest.mark.torch
def test_transformers_generates_from_the_same_weights(tmp_path: Path) -> None:
    model = tiny_model("llama-tied")
    save_huggingface(model.config, model.params, tmp_path / "model")
    config = EngineConfig(max_seqs=2, max_batch_tokens=16, draft=DraftConfig(kind="none"))
    subject = decode.Subject(RolloutEngine(model.config, model.params, config=config), tmp_path)
    prompts = [[1, 2, 4, 1, 2, 4], [5, 6]]
    with transformers_process(tmp_path / "model", threads=1) as rival:
        for stop_at_eos in (False, True):
            ours = subject.generate("part", prompts, 20, stop_at_eos=stop_at_eos)
            theirs = rival.generate(prompts, 20, stop_at_eos=stop_at_eos)
            assert theirs.tokens == ours.tokens
        looked_up = rival.generate(prompts[:1], 20, stop_at_eos=False, prompt_lookup=4)
        assert looked_up.tokens == rival.generate(prompts[:1], 20, stop_at_eos=False).tokens

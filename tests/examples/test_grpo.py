"""The demo itself, shortened: on a tiny model of random weights, and on SmolLM2."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from examples import grpo
from examples.tasks import Task
from rollout_spec import DraftConfig, EngineConfig, RolloutEngine
from tests.helpers.tiny_models import tiny_model
from tests.helpers.tiny_tokenizer import tiny_tokenizer


class ParityTask(Task):
    """Rewards texts of even length: a random model is right about half of the time."""

    @property
    def prompt(self) -> str:
        return "ab" * len(self.words) + self.letter

    def reward(self, text: str) -> float:
        return float(len(text) % 2 == 0)


def test_every_step_trains_swaps_weights_and_keeps_tokens() -> None:
    settings = grpo.Settings(
        epochs=2,
        prompts=4,
        prompts_per_step=2,
        group_size=4,
        max_tokens=12,
        steps=3,
        learning_rate=1e-2,
        train_rows=4,
    )
    model = tiny_model("llama-tied")
    tokenizer = tiny_tokenizer(model.config.vocab_size, model.config.eos_token_ids)
    config = EngineConfig(max_seqs=4, max_batch_tokens=32, draft=DraftConfig(max_nodes=4))
    engine = RolloutEngine(model.config, model.params, tokenizer=tokenizer, config=config)
    tasks = [ParityTask(("a",) * count, "x", 0) for count in range(1, 5)]

    records = grpo.train(engine, tasks, settings, Console(file=io.StringIO()))

    assert [(record.step, record.epoch) for record in records] == [(0, 0), (1, 0), (2, 1)]
    assert engine.weight_version == 3
    assert all(record.tokens_identical for record in records)
    assert all(0 < record.mean_reward < 1 for record in records)
    # The weights have moved a lot by then, and the trainer still recomputes what the engine reported.
    assert 0 < max(record.logprob_gap for record in records) < 1e-3
    assert any((engine.params["norm"]["scale"] != model.params["norm"]["scale"]).tolist())


def test_a_difference_in_tokens_is_seen() -> None:
    model = tiny_model("llama")
    tokenizer = tiny_tokenizer(model.config.vocab_size, model.config.eos_token_ids)
    engine = RolloutEngine(model.config, model.params, tokenizer=tokenizer, config=EngineConfig(max_seqs=1))
    sampling = [grpo.SamplingParams(max_tokens=6, seed=seed) for seed in (1, 2)]
    one, _ = grpo.timed_generate(engine, ["ab"], sampling[:1])
    again, _ = grpo.timed_generate(engine, ["ab"], sampling[:1])
    other, _ = grpo.timed_generate(engine, ["ab"], sampling[1:])
    assert grpo.same_tokens(one, again)
    assert not grpo.same_tokens(one, other)


def test_quick_changes_what_options_start_from() -> None:
    assert grpo.parse_arguments([]) == (grpo.Settings(), Path("outputs"))
    settings, output = grpo.parse_arguments(["--quick", "--max-tokens", "9", "--learning-rate", "0.5"])
    assert settings == dataclasses.replace(grpo.QUICK, max_tokens=9, learning_rate=0.5)
    assert output == Path("outputs")


@pytest.mark.model
def test_the_demo_on_smollm2(smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--quick", "--steps", "2", "--max-tokens", "16", "--output", str(tmp_path)]
    assert grpo.main(options) == 0
    assert "tokens identical" in capsys.readouterr().out
    assert (tmp_path / "grpo.png").is_file()
    steps = json.loads((tmp_path / "grpo.json").read_text())["steps"]
    assert len(steps) == 2
    assert all(step["tokens_identical"] and step["logprob_gap"] < 1e-3 for step in steps)
    assert steps[1]["acceptance_length"] >= 1.0  # by how much the budget decides, by times

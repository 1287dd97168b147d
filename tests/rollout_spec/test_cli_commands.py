"""`rollout-spec generate`, `inspect` and `serve`: what they print, and what they refuse in one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.huggingface_folder import save_huggingface
from rollout_spec import DraftConfig, EngineConfig, RolloutEngine, SamplingParams
from rollout_spec.cli.main import SUBCOMMANDS, main
from rollout_spec.draft import TrieDrafter
from rollout_spec.recorded import load_workload
from tests.helpers.engines import tokenizer_of
from tests.helpers.tiny_models import tiny_model

LLAMA = tiny_model("llama")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save_huggingface(LLAMA.config, LLAMA.params, made)
    tokenizer_of(LLAMA).backend.save(str(made / "tokenizer.json"))
    return made


def test_generate_prints_what_an_engine_generates_and_project_reads_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": [5, 6, 7]}\n{"prompt": "ab"}\n')
    given = ["--prompts", str(prompts), "-n", "2", "--max-tokens", "6", "--seed", "3", "--max-seqs", "2"]
    assert main(["generate", "--model", str(folder), *given, "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    engine = RolloutEngine(
        LLAMA.config,
        LLAMA.params,
        tokenizer=tokenizer_of(LLAMA),
        config=EngineConfig(max_seqs=2, draft=DraftConfig(kind="none")),
    )
    sampling = [SamplingParams(n=2, max_tokens=6, seed=3 + index) for index in range(2)]
    for line, output in zip(lines, engine.generate([[5, 6, 7], "ab"], sampling), strict=True):
        found = json.loads(line)
        assert found["prompt_token_ids"] == output.prompt_token_ids.tolist()
        for one, wanted in zip(found["completions"], output.completions, strict=True):
            assert one["token_ids"] == wanted.token_ids.tolist()
            np.testing.assert_allclose(one["logprobs"], wanted.logprobs, atol=1e-4)
    engine.close()
    history = tmp_path / "rollouts.jsonl"
    history.write_text("\n".join(lines))
    assert len(load_workload(history).completions) == 4
    assert main(["inspect", str(history), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["completions"] == 4


def test_generate_shows_text(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["generate", "--model", str(folder), "ab", "--max-tokens", "3", "--max-seqs", "2"]) == 0
    out = capsys.readouterr().out
    assert "prompt 0, completion 0" in out
    assert "tokens" in out


def test_inspect_tells_models_and_histories_apart(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["inspect", str(folder), "--json"]) == 0
    model = json.loads(capsys.readouterr().out)
    assert (model["kind"], model["architecture"], model["vocab_size"]) == ("model", "llama", 41)
    assert model["parameters"] == sum(np.size(leaf) for leaf in _leaves(LLAMA.params))
    drafter = TrieDrafter()
    drafter.start(0, [1, 2])
    drafter.extend(0, [3, 4, 5])
    drafter.finish(0)
    drafter.save(tmp_path / "history")
    assert main(["inspect", str(tmp_path / "history")]) == 0
    assert "history" in capsys.readouterr().out


def _leaves(tree: object) -> list:
    if isinstance(tree, dict):
        return [leaf for branch in tree.values() for leaf in _leaves(branch)]
    return [tree]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "--model", "nowhere", "a"], "nowhere"),
        (["inspect", "nowhere"], "nowhere"),
        (["serve", "--model", "nowhere", "--host", "0.0.0.0"], "open to others"),
        (["serve", "--model", "nowhere", "--weights-dir", "no-folder"], "is no folder"),
        (["serve", "--model", "nowhere"], "nowhere"),
    ],
)
def test_errors_are_told_in_words(arguments: list[str], named: str, capsys: pytest.CaptureFixture) -> None:
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert named in error
    assert "Traceback" not in error


def test_generate_needs_prompts(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["generate", "--model", str(folder)]) == 1
    assert "expected prompts" in capsys.readouterr().err


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"rollout-spec {name}" in capsys.readouterr().out

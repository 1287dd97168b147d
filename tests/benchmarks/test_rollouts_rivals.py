"""The benchmark against others: interpreters are checked, rivals answer for themselves, and losses are shown."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rivals_tables
from benchmarks import rollouts_rivals as rivals
from benchmarks.huggingface_folder import save_huggingface
from benchmarks.rival_process import RivalProcess, Run, transformers_process
from benchmarks.rollouts_play import TINY, Bench, Subject, untrained
from rollout_spec import DraftConfig, EngineConfig, RolloutEngine
from tests.helpers.tiny_models import tiny_model

TUNIX_PYTHON = Path(rivals.Interpreters.tunix)

# Answers each request with tokens that say what it was, in as many seconds as it was asked for tokens.
WORKER = """
import json, sys
print(json.dumps({"versions": {"worker": "1.0"}, "arguments": sys.argv[1:]}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["seed"] == 13:
        sys.exit("a superstitious worker")
    tokens = [[*prompt, request["seed"], request["max_tokens"]] for prompt in request["prompts"]]
    print(json.dumps({"seconds": request["max_tokens"], "tokens": tokens}), flush=True)
"""


def run(seconds: float, *tokens: list[int]) -> Run:
    return Run(seconds, list(tokens))


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


def test_a_rival_says_what_it_is_and_answers_requests(worker: Path, tmp_path: Path) -> None:
    with RivalProcess("one", worker, tmp_path, "--threads", "2") as rival:
        answer = rival.generate([[1, 2], [3]], 5, stop_at_eos=True, seed=7)
        assert rival.described == {
            "versions": {"worker": "1.0"},
            "arguments": [str(tmp_path), "--threads", "2"],
        }
        assert answer == Run(5, [[1, 2, 7, 5], [3, 7, 5]])


def test_a_rival_that_ends_is_told_apart_from_a_slow_one(worker: Path, tmp_path: Path) -> None:
    with RivalProcess("one", worker, tmp_path) as rival:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="process of one ended with status 1"):
                rival.generate([[1]], 5, stop_at_eos=True, seed=13)


def test_missing_interpreters_and_packages_are_listed_with_what_to_run(tmp_path: Path) -> None:
    without_packages = tmp_path / "python"
    without_packages.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    without_packages.chmod(0o755)
    with pytest.raises(RuntimeError) as raised:
        rivals.check_interpreters(rivals.Interpreters(str(tmp_path / "nowhere"), str(without_packages)))
    message = str(raised.value)
    assert (
        f"{tmp_path}/nowhere can't be run (No such file or directory): run `make rivals`, which makes .venv-tunix"
        in message
    )
    assert "--tunix-python PATH" in message
    assert (
        f"{without_packages} has no package transformers: run `make rivals`, which makes .venv-torch"
        in message
    )


def test_the_command_ends_with_that_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "smollm2", lambda: untrained(TINY))
    arguments = ["--tunix-python", str(tmp_path / "nowhere"), "--output", str(tmp_path / "rivals.json")]
    with pytest.raises(SystemExit, match="make rivals"):
        rivals.main(arguments)
    assert not (tmp_path / "rivals.json").exists()


def test_our_engine_starts_every_call_with_an_empty_history(tmp_path: Path) -> None:
    model = tiny_model("llama")
    draft = DraftConfig(max_nodes=4, gate=False)
    config = EngineConfig(max_seqs=2, max_batch_tokens=32, prefix_cache=False, draft=draft)
    subject = Subject("speculative", RolloutEngine(model.config, model.params, config=config), tmp_path)
    drafted = []
    for _ in range(2):
        rivals.generate(subject, [[1, 2, 4]], 24, stop_at_eos=False)
        drafted.append(subject.engine.stats().drafted)
    assert drafted[0] == drafted[1]
    sampled = [
        rivals.generate(subject, [[1, 2, 4]] * 2, 24, stop_at_eos=False, temperature=1.0, seed=s)
        for s in (0, 1)
    ]
    assert sampled[0].tokens[0] != sampled[0].tokens[1] == sampled[1].tokens[0]


def test_ratios_are_medians_within_rounds_and_losses_are_told() -> None:
    played = {
        "speculative": [[run(1.0, [1] * 30)], [run(1.0, [1] * 60)], [run(1.0, [1] * 10)]],
        "transformers": [[run(1.0, [1] * 10)], [run(1.0, [1] * 10)], [run(1.0, [1] * 10)]],
        "Tunix": [[run(1.0, [1] * 60)], [run(1.0, [1] * 60)], [run(1.0, [1] * 20)]],
    }
    cell = rivals.cell(played, {"transformers": 2.0, "Tunix": 1.8}, {"Tunix": {"versions": {}}})
    assert [entry["value"] for entry in cell["goals"]] == [3.0, 0.5]
    assert [entry["met"] for entry in cell["goals"]] == [True, False]
    assert cell["subjects"]["speculative"]["tokens_per_s"] == 30
    told = {row.title: (row.ratio, row.wanted, row.verdict) for row in rivals_tables.rows(cell)}
    assert told["ours"] == ("", "", "")
    assert told["transformers `generate`"] == ("3.00x", "2x", "met")
    assert told["Tunix `Sampler`"] == ("0.50x", "1.8x", "we lose")


def test_stored_results_become_markdown_with_versions_and_settings() -> None:
    played = {
        "plain": [[run(1.0, [1] * 12)]],
        "speculative": [[run(1.0, [1] * 10)]],
        "Tunix": [[run(1.0, [1] * 8)]],
    }
    tunix = {"python": "3.12.1", "versions": {"google-tunix": "0.1.7", "jax": "0.12.0"}}
    cell = rivals.cell(played, {"Tunix": 1.8}, {"Tunix": tunix}) | {
        "settings": {"max_tokens": 128},
        "machine": {
            "cores": 2,
            "processor": "a processor",
            "python": "3.11.7",
            "versions": {"jax": "0.10.2"},
        },
    }
    lines = rivals_tables.markdown({"one request": cell}).splitlines()
    assert lines[2:5] == [
        "| ours, drafting off | 12.0 | 0.83x |  | we lose |",
        "| ours | 10.0 |  |  |  |",
        "| Tunix `Sampler` | 8.0 | 1.25x | 1.8x | missed |",
    ]
    assert "medians of 1 rounds" in lines[-1]
    assert "Tunix: google-tunix 0.1.7, jax 0.12.0 on Python 3.12.1." in lines[-1]


def test_rounds_of_another_run_are_added_only_if_the_rivals_are_the_same() -> None:
    def cell(speed: int, version: str = "1") -> dict[str, Any]:
        played = {"speculative": [[run(1.0, [1] * speed)]], "Tunix": [[run(1.0, [1] * 10)]]}
        return rivals.cell(played, {"Tunix": 1.8}, {"Tunix": {"versions": version}})

    both = rivals.with_rounds_of(cell(10), cell(30))
    assert both["subjects"]["speculative"]["tokens_per_s_of_rounds"] == [10, 30]
    assert both["goals"][0]["value"] == 2.0
    with pytest.raises(ValueError, match="measure all anew"):
        rivals.with_rounds_of(cell(10, "0"), cell(30))


def test_greedy_tokens_show_whether_all_run_the_same_model() -> None:
    ours = list(range(20))
    rounding = [*range(15), 99]
    played = {"speculative": [[run(1.0, ours)]], "Tunix": [[run(1.0, rounding)]]}
    assert rivals.same_tokens(played)["Tunix"] == {
        "completions": 1,
        "identical": 0,
        "least_tokens_that_agree": 15,
    }
    played["Tunix"] = [[run(1.0, [0, 1, 99, 3])]]
    with pytest.raises(RuntimeError, match="Tunix doesn't run the same model"):
        rivals.same_tokens(played)


@pytest.mark.torch
def test_transformers_samples_from_the_whole_vocabulary(tmp_path: Path) -> None:
    model = tiny_model("llama-tied")
    save_huggingface(model.config, model.params, tmp_path)
    with transformers_process(tmp_path, threads=1) as rival:
        prompts = [[1, 2, 4, 1, 2, 4], [5, 6]]
        calls = [
            rival.generate(prompts, 60, stop_at_eos=False, temperature=5.0, seed=seed).tokens
            for seed in (1, 1, 2)
        ]
        greedy = rival.generate(prompts, 20, stop_at_eos=False)
    assert calls[0] == calls[1] != calls[2]
    assert len({token for row in calls[0] for token in row}) > 80  # 50 is what top_k is by default
    assert greedy.tokens == rivals_of(model, tmp_path).tokens


def rivals_of(model: Any, scratch: Path) -> Run:
    config = EngineConfig(max_seqs=2, max_batch_tokens=16, draft=DraftConfig(kind="none"))
    subject = Subject("plain", RolloutEngine(model.config, model.params, config=config), scratch)
    return rivals.generate(subject, [[1, 2, 4, 1, 2, 4], [5, 6]], 20, stop_at_eos=False)


@pytest.mark.skipif(not TUNIX_PYTHON.exists(), reason="needs Tunix: run `make rivals`")
def test_the_whole_measurement_with_a_tiny_model(tmp_path: Path) -> None:
    cells: dict[str, dict[str, Any]] = {}
    bench = Bench(untrained(TINY), tmp_path, print)
    rivals.measure(rivals.SMOKE, bench, cells.__setitem__)
    assert list(cells) == [rivals.ONE, rivals.MANY.format(2)]
    same = cells[rivals.ONE]["same_tokens"]
    assert all(one["identical"] == one["completions"] for one in same.values())
    assert cells[rivals.ONE]["rivals"]["Tunix"]["versions"]["google-tunix"] == "0.1.7"
    json.dumps(cells)

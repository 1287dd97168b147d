"""`rollout-spec bench`: prompts are read or refused with every fault, the comparison is fair, the advice follows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.huggingface_folder import save_huggingface
from rollout_spec.cli import comparison
from rollout_spec.cli.advice import advise
from rollout_spec.cli.bench import identity
from rollout_spec.cli.comparison import PLAIN, Comparison, Figures, Settings, compare
from rollout_spec.cli.main import main
from rollout_spec.cli.prompts import read_prompts, token_ids
from rollout_spec.errors import PromptError
from rollout_spec.loading.load import LoadedModel
from tests.helpers.engines import tokenizer_of
from tests.helpers.tiny_models import tiny_model

LLAMA = tiny_model("llama")


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_huggingface(LLAMA.config, LLAMA.params, folder)
    tokenizer_of(LLAMA).backend.save(str(folder / "tokenizer.json"))
    return folder


# Prompts


def test_text_files_have_a_prompt_a_line(tmp_path: Path) -> None:
    path = written(tmp_path / "prompts.txt", "a b", "", "  c")
    assert read_prompts(path) == {"prompts.txt:1": "a b", "prompts.txt:3": "  c"}


def test_json_lines_hold_texts_chats_or_token_ids(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "b"}]
    path = written(tmp_path / "p.jsonl", {"prompt": "a", "id": 7}, {"messages": chat}, {"prompt": [1, 2]})
    assert list(read_prompts(path).values()) == ["a", chat, [1, 2]]
    assert list(read_prompts(path, as_chat=True).values()) == [
        [{"role": "user", "content": "a"}],
        chat,
        [1, 2],
    ]


def test_json_lines_are_known_by_their_first_line_too(tmp_path: Path) -> None:
    assert list(read_prompts(written(tmp_path / "prompts", {"prompt": "a"})).values()) == ["a"]


def test_all_faulty_lines_are_listed(tmp_path: Path) -> None:
    path = written(
        tmp_path / "p.jsonl", {"prompt": "a"}, "{broken", {"text": "b", "id": 1}, {"prompt": ""}, [1, 2]
    )
    with pytest.raises(PromptError) as raised:
        read_prompts(path)
    message = str(raised.value)
    assert message.startswith("4 prompts can't be used:")
    assert "p.jsonl:2: expected a JSON object" in message
    assert "p.jsonl:3: expected a key \"prompt\" or \"messages\", found 'text', 'id'" in message
    assert "p.jsonl:4: the prompt is empty" in message
    assert "p.jsonl:5: expected a JSON object, got '[1, 2]'" in message


@pytest.mark.parametrize(("content", "reason"), [(b"\n \n", "empty file"), (b"\xff\xfe", "UTF-8")])
def test_files_without_text_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    with pytest.raises(PromptError, match=reason):
        read_prompts(path)


def test_prompts_too_long_for_the_model_are_listed() -> None:
    prompts = {"p:1": [1] * 20, "p:2": [1] * 90, "p:3": [1, 41]}
    with pytest.raises(PromptError) as raised:
        token_ids(prompts, LLAMA.config, None, max_tokens=8)
    message = str(raised.value)
    assert "p:2 has 90 tokens, which with 8 generated ones exceed the model's 96" in message
    assert "--max-tokens" in message
    assert "p:3 has token ids outside the vocabulary of 41" in message
    assert "p:1" not in message


# The comparison


def test_every_engine_gets_the_same_requests_and_makes_the_same_tokens() -> None:
    prompts = [np.asarray(prompt, np.int32) for prompt in ([1, 2, 4], [5, 6], [7, 8, 9])]
    settings = Settings(
        slots=(2,), nodes=(4, 8), samples=2, max_tokens=12, temperature=0.5, epochs=2, rounds=2
    )
    said: list[str] = []
    model = LoadedModel(LLAMA.config, LLAMA.params, None)
    (one,) = compare(settings, model, prompts, said.append)
    assert (one.slots, one.completions, one.identical) == (2, 2 * 2 * 2 * 2, 2 * 2 * 2 * 2)
    assert len(one.epochs) == 2
    for figures in one.epochs:
        assert list(figures) == [PLAIN, 4, 8]
        assert all(len(those.speeds) == 2 and min(those.speeds) > 0 for those in figures.values())
        assert figures[PLAIN].nodes_per_step == 0
        assert figures[PLAIN].acceptance_length == 1
    assert any("round 2 of 2, epoch 1" in line for line in said)


@pytest.mark.parametrize(
    ("slots", "samples", "limit", "available", "expected"),
    [(1, 4, None, 50, 2), (16, 4, None, 50, 8), (16, 4, None, 5, 5), (16, 4, 3, 50, 3), (5, 3, None, 50, 4)],
)
def test_a_round_asks_enough_prompts_to_fill_the_slots_twice(
    slots: int, samples: int, limit: int | None, available: int, expected: int
) -> None:
    settings = Settings(samples=samples, limit=limit)
    assert comparison._prompts_in_a_round(settings, available, slots) == expected


# The advice


def figures(*speeds: float, nodes_per_step: float = 2.0) -> Figures:
    return Figures(speeds, acceptance_length=1.5, nodes_per_step=nodes_per_step, host_share=0.02)


def compared(slots: int, *ratios: float, first: float | None = None, **options: Any) -> Comparison:
    """ratios: in the last epoch, by 16, 32, ... nodes. first: of all, in the first."""
    sizes = [16 << index for index in range(len(ratios))]

    def epoch(*those: float) -> dict[int, Figures]:
        drafting = {size: figures(100 * ratio, **options) for size, ratio in zip(sizes, those, strict=True)}
        return {PLAIN: figures(100.0, nodes_per_step=0.0), **drafting}

    epochs = (epoch(*[first if first is not None else ratios[0]] * len(ratios)), epoch(*ratios))
    return Comparison(slots, epochs, completions=10, identical=10, warm_up_s=1.0)


def test_defaults_are_left_where_drafting_pays_or_does_nothing() -> None:
    advice = advise([compared(1, 1.42), compared(4, 1.1), compared(16, 1.0)], [16])
    assert advice.draft == {}
    assert advice.sentences == (
        "Drafting pays 1.42x at 1 slot and 1.10x at 4 slots, changes nothing at 16 slots.",
        "Leave the defaults: where drafts would not pay, the engine makes none.",
    )


def test_drafting_is_switched_off_where_it_never_pays() -> None:
    advice = advise([compared(1, 1.0), compared(4, 0.99)], [16])
    assert advice.draft == {"kind": "none"}
    assert advice.sentences[0] == "Drafting changes nothing at 1 and 4 slots."
    assert 'DraftConfig(kind="none")' in advice.sentences[1]


def test_slots_at_which_it_costs_are_named() -> None:
    advice = advise([compared(1, 1.2), compared(16, 0.9)], [16])
    assert advice.draft == {}
    assert advice.sentences == (
        "Drafting pays 1.20x at 1 slot, slows down to 0.90x at 16 slots.",
        "Leave the defaults where it pays.",
        'With 16 slots set DraftConfig(kind="none").',
    )
    assert advise([compared(4, 0.9)], [16]).draft == {"kind": "none"}


def test_other_nodes_are_recommended_only_if_clearly_better() -> None:
    clearly = advise([compared(1, 1.4, 1.6), compared(4, 1.2, 1.25)], [16, 32])
    assert clearly.draft == {"max_nodes": 32}
    assert (
        "Set DraftConfig(max_nodes=32): over all slots 1.09x the speed of max_nodes=16." in clearly.sentences
    )
    assert advise([compared(1, 1.4, 1.41), compared(4, 1.2, 1.22)], [16, 32]).draft == {}


def test_remarks_say_what_else_the_figures_show() -> None:
    advice = advise([compared(1, 1.3, first=1.0, nodes_per_step=14.0)], [16])
    assert any(
        sentence.startswith("At 1 slot it pays for prompts that were asked before")
        for sentence in advice.sentences
    )
    assert any("--nodes 16,32" in sentence for sentence in advice.sentences)
    rounds = {PLAIN: figures(100.0, 100.0), 16: figures(100.0, 140.0)}
    unsteady = Comparison(4, (rounds,), completions=10, identical=10, warm_up_s=1.0)
    assert any(
        "At 4 slots the rounds differ much" in sentence for sentence in advise([unsteady], [16]).sentences
    )


def test_differing_tokens_are_told() -> None:
    assert identity([compared(1, 1.0), compared(2, 1.0)]) == (
        "Tokens: all 20 completions are identical with drafting on and off."
    )
    differing = Comparison(1, compared(1, 1.0).epochs, completions=10, identical=7, warm_up_s=1.0)
    assert identity([differing]).startswith("Tokens: 3 of 10 completions differ")


# The command


def test_bench_prints_a_table_and_advice_and_writes_json(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = written(tmp_path / "p.jsonl", {"prompt": "abc cab"}, {"prompt": [1, 2, 4]})
    output = tmp_path / "figures.json"
    arguments = ["bench", "--model", model_folder, "--prompts", prompts, "--slots", "1", "--samples", 2]
    arguments += ["--max-tokens", 8, "--rounds", 1, "--nodes", 4, "--output", output]
    assert main([str(argument) for argument in arguments]) == 0
    printed = capsys.readouterr()
    assert "Tokens per second" in printed.out
    assert "all 8 completions are identical" in printed.out
    assert "Drafting " in printed.out
    stored = json.loads(output.read_text())
    assert stored["settings"]["slots"] == [1]
    assert set(stored["slots"][0]["epochs"][1]) == {"plain", "max_nodes=4"}
    assert stored["recommended"]["in_words"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"--model": "nowhere"}, "nowhere does not exist"),
        ({"--prompts": "nothing.jsonl"}, "nothing.jsonl: No such file"),
        ({"--output": "no/folder/figures.json"}, "its folder does not exist"),
        ({"--temperature": "-1"}, "temperature"),
        ({"--chat": None}, "p.txt:1: chat messages need a chat template"),
        ({"--max-tokens": "95"}, "exceed the model's 96"),
    ],
)
def test_what_is_wrong_is_told_without_a_traceback(
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str | None],
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "p.txt", "abc cab")
    options = {"--model": str(model_folder), "--prompts": "p.txt"} | changes
    arguments = [part for option, value in options.items() for part in (option, value) if part is not None]
    assert main(["bench", *arguments]) == 1
    told = capsys.readouterr().err
    assert "rollout-spec bench: " in told
    assert reason in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    "arguments", [["--slots", "0"], ["--slots", "1,x"], ["--nodes", "64"], ["--rounds", "0"]]
)
def test_numbers_out_of_range_are_refused_with_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--model", "m", "--prompts", "p", *arguments])
    assert "expected" in capsys.readouterr().err

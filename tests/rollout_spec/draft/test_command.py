"""`python -m rollout_spec.draft` says what histories hold, drafts from them, merges them, and refuses plainly."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rollout_spec.draft import DraftConfig, TrieDrafter
from rollout_spec.draft.__main__ import draft_lines, main
from rollout_spec.tree import DraftTree

PROMPT = [11, 12]
IN_GROUP_7 = [21, 22, 23]
IN_GROUP_A = [31, 32, 33]


def saved(path: Path, *taught: tuple[int | str, list[int]], version: int = 0) -> Path:
    """A history that saw each output twice after PROMPT."""
    drafter = TrieDrafter(DraftConfig(capacity_tokens=1000))
    for group, output in taught * 2:
        drafter.start("request", PROMPT, group_id=group)
        drafter.extend("request", output)
        drafter.finish("request")
    if version:
        drafter.new_version(version)
    drafter.save(path)
    return path


@pytest.fixture
def history(tmp_path: Path) -> Path:
    return saved(tmp_path / "history", (7, IN_GROUP_7), ("a", IN_GROUP_A), version=5)


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def fact(text: str, name: str) -> str:
    return re.search(rf"^{name} +(.*)$", text, re.MULTILINE).group(1)  # type: ignore[union-attr]


def likeliest(text: str) -> int:
    """The first token of a printed draft."""
    return int(re.search(r"^  0\.\d+  (\d+)$", text, re.MULTILINE).group(1))  # type: ignore[union-attr]


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("python -m rollout_spec.draft: ")
    return err


def test_inspect_says_what_a_history_holds(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "inspect", history)
    facts = TrieDrafter()
    facts.load(history)
    assert fact(text, "tokens learnt").startswith("12 ")
    assert fact(text, "pairs held").startswith(f"{facts.facts().pairs} ")
    assert fact(text, "prompts").startswith("2 ")
    assert fact(text, "weight version") == "5"
    assert fact(text, "weight updates") == "1"
    assert f"{history.stat().st_size:,} bytes" in fact(text, "file")
    assert f"{facts.facts().table_bytes:,} bytes" in fact(text, "table")
    assert "Draft" not in text


def test_a_draft_is_printed_a_node_a_line_indented_by_depth() -> None:
    tree = DraftTree(*map(np.array, ([5, 6, 7, 8], [-1, 0, 0, -1], [0.5, 0.25, 0.125, 0.1])))
    assert list(draft_lines(tree)) == ["  0.500  5", "  0.250    6", "  0.125    7", "  0.100  8"]


def test_the_draft_is_that_of_the_group_whose_id_is_given_as_a_number_or_a_string(
    history: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for group, expected in (("7", IN_GROUP_7), ("a", IN_GROUP_A)):
        text = printed(capsys, "inspect", history, "--context", "11 12", "--group", group)
        assert likeliest(text) == expected[0]
        drafter = TrieDrafter()
        drafter.load(history)
        drafter.start("request", PROMPT, group_id=int(group) if group == "7" else group)
        assert "\n".join(draft_lines(drafter.propose(["request"], [16])[0])) in text


def test_without_a_group_the_context_counts_as_a_prompt_without_a_group_id(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = TrieDrafter()
    for prompt, output in (([11, 12], IN_GROUP_7), ([10, 11, 12], IN_GROUP_A)):
        for _ in range(3):
            drafter.start("request", prompt)
            drafter.extend("request", output)
            drafter.finish("request")
    drafter.save(tmp_path / "history")
    for context, expected in (("11 12", IN_GROUP_7), ("10 11 12", IN_GROUP_A)):
        assert (
            likeliest(printed(capsys, "inspect", tmp_path / "history", "--context", context)) == expected[0]
        )


def test_a_context_may_come_from_a_file_with_commas_and_line_breaks(
    history: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "context").write_text("11,\n 12\n")
    from_file = printed(capsys, "inspect", history, "--context-file", tmp_path / "context", "--group", 7)
    assert from_file == printed(capsys, "inspect", history, "--context", "11 12", "--group", 7)
    assert likeliest(from_file) == IN_GROUP_7[0]


def test_no_more_nodes_are_drafted_than_asked_for(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "inspect", history, "--context", "11 12", "--nodes", 2)
    assert len(re.findall(r"^  0\.\d+  ", text, re.MULTILINE)) == 2
    assert "2 nodes;" in text


def test_inspecting_a_larger_history_forgets_none_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = TrieDrafter()
    drafter.start("request", [1])
    drafter.extend("request", [(i * 7919) % 10007 for i in range(20_000)])
    drafter.save(tmp_path / "history")
    assert fact(printed(capsys, "inspect", tmp_path / "history"), "pairs held").startswith(
        f"{drafter.facts().pairs:,} "
    )


def test_a_merged_history_knows_what_each_of_its_parts_knew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [
        saved(tmp_path / "first", (7, IN_GROUP_7), version=3),
        saved(tmp_path / "second", ("a", IN_GROUP_A), version=4),
        saved(tmp_path / "third", ("b", [41, 42, 43])),
    ]
    merged = tmp_path / "merged"
    text = printed(capsys, "merge", *parts, "-o", merged)
    assert fact(text, "tokens learnt").startswith("18 ")
    assert fact(text, "prompts").startswith("3 ")
    assert fact(text, "weight version") == "3"
    assert text == printed(capsys, "inspect", merged)
    for group, first in (("7", 21), ("a", 31), ("b", 41)):
        assert likeliest(printed(capsys, "inspect", merged, "--context", "11 12", "--group", group)) == first


def test_no_pair_is_lost_in_merging_unless_the_capacity_asked_for_is_too_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, pairs = [], 0
    for n in range(2):
        drafter = TrieDrafter(DraftConfig(capacity_tokens=2000))
        drafter.start("request", [1])
        drafter.extend("request", [n * 5000 + i for i in range(2000)])
        pairs += drafter.facts().pairs
        parts.append(tmp_path / str(n))
        drafter.save(parts[-1])
    text = printed(capsys, "merge", *parts, "-o", tmp_path / "whole")
    assert fact(text, "pairs held").startswith(f"{pairs:,} ")
    text = printed(capsys, "merge", *parts, "-o", tmp_path / "cut", "--capacity-tokens", 100)
    assert fact(text, "table").startswith(f"{100 * 128:,} bytes")


def test_one_of_the_parts_can_be_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = saved(tmp_path / "first", (7, IN_GROUP_7))
    second = saved(tmp_path / "second", ("a", IN_GROUP_A))
    text = printed(capsys, "merge", first, second, "-o", first)
    assert text == printed(capsys, "inspect", first)
    assert fact(text, "tokens learnt").startswith("12 ")


@pytest.mark.parametrize("context", ["11 x", "11 -2", "1.5", "3000000000", "99999999999999999999", "", " , "])
def test_a_context_that_is_none_is_refused_in_one_line(
    history: Path, context: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "token id" in refused(capsys, "inspect", history, f"--context={context}")


def test_a_number_of_nodes_out_of_range_is_refused(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "max_nodes" in refused(capsys, "inspect", history, "--context", "11", "--nodes", "64")


def test_missing_foreign_empty_and_truncated_files_are_refused_in_one_line(
    history: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faulty = {name: tmp_path / name for name in ("missing", "foreign", "empty", "truncated", "cut header")}
    faulty["foreign"].write_bytes(b"a text of some length" * 100)
    faulty["empty"].touch()
    whole = history.read_bytes()
    faulty["truncated"].write_bytes(whole[:-100])
    faulty["cut header"].write_bytes(whole[:100])
    for path in (*faulty.values(), tmp_path):
        assert str(path) in refused(capsys, "inspect", path)
        assert str(path) in refused(capsys, "merge", path, history, "-o", tmp_path / "merged")
        assert str(path) in refused(capsys, "merge", history, path, "-o", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    assert "missing" in refused(capsys, "inspect", history, "--context-file", faulty["missing"])


def test_merging_takes_at_least_two(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["merge", str(history), "-o", "merged"])
    assert ended.value.code == 2
    assert "others" in capsys.readouterr().err


def test_it_runs_as_a_module_and_never_imports_jax(history: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-X", "importtime", "-m", "rollout_spec.draft", "inspect", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    good = run(str(history), "--context", "11 12", "--group", "7")
    assert good.returncode == 0
    assert likeliest(good.stdout) == IN_GROUP_7[0]
    imported = re.findall(r"^import time:.*\| +(\S+)$", good.stderr, re.MULTILINE)
    assert "numpy" in imported
    assert not {"jax", "jaxlib", "rollout_spec.engine"} & set(imported)
    bad = run(str(tmp_path / "missing"))
    assert bad.returncode == 1
    assert "Traceback" not in bad.stderr

"""Slices by name, and a tiny model's step compiled for one by the TPU compiler, where libtpu is installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

from rollout_spec.chips import CHIPS, parse_slice
from rollout_spec.cli.fit import read_model
from rollout_spec.cli.main import main
from rollout_spec.errors import ConfigError
from rollout_spec.fitting import _collectives, _too_small, fit

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler: pip install '.[tpu]'"
)


@pytest.mark.parametrize(
    ("name", "chips", "topology"),
    [
        ("v5e-8", 8, "v5e:2x4"),
        ("v5p-8", 4, "v5p:2x2x1"),
        ("v5p-64", 32, "v5p:2x4x4"),
        ("v6e-1", 1, "v6e:2x2"),
    ],
)
def test_slices_are_named_by_chips_or_by_cores(name: str, chips: int, topology: str) -> None:
    found = parse_slice(name)
    assert (found.num_chips, found.topology) == (chips, topology)


@pytest.mark.parametrize("name", ["v5e", "v7-8", "v5e-7", "v5p-9", "v5e-"])
def test_slices_that_do_not_exist_are_refused_with_what_does(name: str) -> None:
    with pytest.raises(ConfigError, match=r"expected one of v4, v5e|has one of "):
        parse_slice(name)


def test_too_little_memory_says_what_would_fit() -> None:
    where, gib = parse_slice("v5e-8"), 2**30
    assert "128 tokens would fit" in _too_small(where, 15 * gib, gib, 8 * 2**20, 2**20)
    assert "larger slice" in _too_small(where, 17 * gib, gib, -gib, 2**20)


def test_collectives_are_counted_by_kind_and_those_in_pieces_once() -> None:
    text = """
      %a = bf16[8,4]{1,0:T(8,128)(2,1)} all-reduce(%x), channel_id=1, replica_groups={}
      %b = (f32[8], f32[64]) all-gather-start(%y), channel_id=2, dimensions={0}
      %c = f32[64] all-gather-done(%b)
      %b.2 = (f32[8], f32[64]) all-gather-start(%y), channel_id=2, dimensions={0}
      %d = f32[8] add(%all-reduce.1, %z)
      %e = s8[16] all-gather(%q), dimensions={0}
    """
    assert _collectives(text) == ({"all-reduce": 1, "all-gather": 2}, 8 * 4 * 2 + 64 * 4 + 16)


@pytest.mark.parametrize("name", ["qwen3-8b", "llama-3.1-70b", "qwen3-30b-a3b", "deepseek-v3"])
def test_the_configurations_that_are_checked_are_read(name: str) -> None:
    assert read_model(MODELS / f"{name}.json").num_layers > 30


def test_a_missing_or_broken_configuration_is_told_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    broken = tmp_path / "config.json"
    broken.write_text("{")
    for path, named in ((broken, "not valid JSON"), (tmp_path / "none.json", "No such file")):
        assert main(["fit", "--model", str(path), "--chip", "v5e-8"]) == 1
        assert named in capsys.readouterr().err
    assert main(["fit", "--model", str(MODELS / "qwen3-8b.json"), "--chip", "v9-8"]) == 1
    assert "expected one of" in capsys.readouterr().err


@needs_compiler
def test_a_small_model_is_compiled_with_its_kernels(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    small = {"num_hidden_layers": 1, "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024}
    raw = json.loads((MODELS / "qwen3-8b.json").read_text()) | small
    (tmp_path / "config.json").write_text(json.dumps(raw))
    arguments = ["--max-seqs", "4", "--max-len", "512", "--draft-nodes", "0"]
    assert main(["fit", "--model", str(tmp_path), "--chip", "v5e-4", *arguments]) == 0
    out = capsys.readouterr().out
    assert "v5e-4: fits" in out
    assert "mesh: expert 1, model 4" in out
    assert "Pallas kernels: 4" in out  # attention, moving, sampling as it comes and behind tables


@needs_compiler
def test_no_matrix_is_gathered_for_a_step() -> None:
    """Sampling reads whole rows of logits; the head, which is far larger than they, must stay where it is."""
    model = dataclasses.replace(read_model(MODELS / "qwen3-8b.json"), num_layers=1)
    found = fit(model, parse_slice("v5e-8"), max_seqs=16, max_len=512, draft_nodes=0)
    logits, hidden = 16 * model.vocab_size * 4, 16 * model.hidden_size * 4
    assert found.steps[0].collective_bytes <= logits + 3 * hidden


@needs_compiler
def test_a_model_too_large_for_a_slice_is_refused_before_anything_is_compiled(
    capsys: pytest.CaptureFixture,
) -> None:
    arguments = ["--model", str(MODELS / "llama-3.1-70b.json"), "--chip", "v5e-4"]
    assert main(["fit", *arguments]) == 1
    assert "a larger slice would do" in capsys.readouterr().err


def test_chips_are_as_their_vendor_says() -> None:
    assert {name: chip.hbm_bytes >> 30 for name, chip in CHIPS.items()} == {
        "v4": 32,
        "v5e": 16,
        "v5p": 95,
        "v6e": 32,
    }

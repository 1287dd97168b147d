"""The lines that docs/weights_*.md give for each kind of trainer do what they say."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

from rollout_spec import RolloutEngine, SamplingParams
from tests.helpers.engines import new_engine
from tests.rollout_spec.weights.staged import NEW, OLD, assert_equal, hf_arrays
from tests.rollout_spec.weights.test_adapters import Q, adapter, peft_folder, with_adapters

DOCS = Path(__file__).parents[3] / "docs"


class Tensor:
    """Of a trainer: what the lines use of torch's, and dlpack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype, self.requires_grad = array, "torch.float32", True

    def detach(self) -> np.ndarray:
        return self.array


def run(page: str, block: int, **names: Any) -> dict[str, Any]:
    """One of a page's blocks of code, with these names; and those it leaves."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.S)
    exec(blocks[block], names)
    return names


@pytest.fixture
def engine() -> RolloutEngine:
    return new_engine(OLD, "cramped")


def trained_torch() -> Any:
    return SimpleNamespace(
        named_parameters=lambda: [(name, Tensor(array)) for name, array in hf_arrays().items()]
    )


def writing(arrays: dict[str, np.ndarray]) -> Any:
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return SimpleNamespace(save_pretrained=lambda path: save_file(contiguous, path / "model.safetensors"))


def test_jax(engine: RolloutEngine) -> None:
    run("weights_jax.md", 0, engine=engine, train=lambda params: NEW.params)
    assert_equal(engine.params, NEW.params)
    run("weights_jax.md", 1, engine=engine)
    assert engine.weight_version == 2
    assert_equal(engine.params, NEW.params)


@pytest.mark.parametrize("block", [0, 1])
def test_torch(engine: RolloutEngine, block: int) -> None:
    run("weights_torch.md", block, engine=engine, model=trained_torch())
    assert_equal(engine.params, NEW.params)


def test_folder(engine: RolloutEngine, tmp_path: Path) -> None:
    run("weights_folder.md", 0, engine=engine, model=writing(hf_arrays()), folder=tmp_path)
    assert_equal(engine.params, NEW.params)
    (tmp_path / "runs" / "step_100").mkdir(parents=True)
    writing(hf_arrays(OLD)).save_pretrained(tmp_path / "runs" / "step_100")
    found = run(
        "weights_folder.md", 1, engine=engine, runs=tmp_path / "runs", sampling=SamplingParams(max_tokens=3)
    )
    watch = found["watch"]
    watch._next_look = 0
    while not watch.reports:
        watch.poll()
    assert engine.weight_version == 100
    assert_equal(engine.params, OLD.params)


def test_orbax(engine: RolloutEngine, tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        run(
            "weights_orbax.md",
            0,
            engine=engine,
            manager=manager,
            params=NEW.params,
            folder=tmp_path,
            step=3,
            ocp=ocp,
        )
    assert_equal(engine.params, NEW.params)
    engine.update_weights(OLD.params)
    run("weights_orbax.md", 1, engine=engine, folder=tmp_path)
    assert_equal(engine.params, NEW.params)


def test_lora(engine: RolloutEngine, tmp_path: Path) -> None:
    a, b, _ = adapter(Q, 3)
    run("weights_lora.md", 0, engine=engine, a=a, b=b)
    name = "model.layers.0.self_attn.q_proj.weight"
    from rollout_spec.weights import to_hf

    merged = with_adapters(hf_arrays(OLD), {})
    merged[name] = merged[name] + 0.5 * (b.astype(np.float64) @ a.astype(np.float64))
    for found, array in to_hf(OLD.config, engine.params):
        np.testing.assert_allclose(array, merged[found], rtol=1e-6, atol=1e-6)
    saved = SimpleNamespace(save_pretrained=peft_folder)
    left = run("weights_lora.md", 1, engine=engine, model=saved, folder=tmp_path)
    assert len(left["report"].merged) == 2

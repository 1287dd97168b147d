"""The checkpoint is the one that was made, small, and right about as often as the pupil it learnt from."""

from __future__ import annotations

import hashlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from examples.reasoner.grpo import FULL, HELD_OUT_SEED, MAX_SEQ_LEN, pass_rate
from examples.reasoner.model import CHECKPOINT, CONFIG, save_checkpoint
from examples.reasoner.tasks import problems
from rollout_spec import DraftConfig, EngineConfig, RolloutEngine
from rollout_spec.loading import load_model
from rollout_spec.models import init_params

SHA256 = "458ba9765450c4d3e351430fe9eff3870eff03b2a606aa40817cfbbed4f21b35"


def test_the_checkpoint_is_the_one_that_was_made() -> None:
    content = (CHECKPOINT / "model.safetensors").read_bytes()
    assert hashlib.sha256(content).hexdigest() == SHA256
    assert len(content) < 8e6
    assert load_model(CHECKPOINT).config == CONFIG


def test_what_is_saved_loads_again(tmp_path: Path) -> None:
    params = init_params(CONFIG, 1)
    save_checkpoint(params, tmp_path)
    loaded = load_model(tmp_path, jnp.float32)
    assert loaded.config == CONFIG
    for one, other in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(one, other.astype(jnp.bfloat16).astype(jnp.float32))


def test_the_policy_has_something_to_learn() -> None:
    config = EngineConfig(max_seqs=16, max_seq_len=MAX_SEQ_LEN, draft=DraftConfig(kind="none"))
    with RolloutEngine.from_pretrained(CHECKPOINT, config) as engine:
        assert 0.5 < pass_rate(engine, problems(16, HELD_OUT_SEED), FULL, seed=0) < 0.75

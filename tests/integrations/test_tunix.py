"""Tunix's GRPO with the engine: weights arrive at every step on the device, and both find the same probabilities."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from rollout_spec.errors import MissingExtraError

HAS_TUNIX = importlib.util.find_spec("tunix") is not None


def test_without_tunix_it_says_what_to_install() -> None:
    if HAS_TUNIX:
        pytest.skip("tunix is installed")
    with pytest.raises(MissingExtraError, match=r"rollout-spec\[tunix\]"):
        importlib.import_module("rollout_spec.integrations.tunix")


@pytest.mark.tunix
def test_three_steps_of_training() -> None:
    import jax.numpy as jnp
    from flax import nnx
    from rollout_spec.integrations.tunix import params_of
    from tunix.generate import sampler
    from tunix.rl import common
    from tunix.rl.rollout import base_rollout

    from examples.grpo_tunix import PROMPTS, LetterTokenizer, train
    from rollout_spec.weights import checksum

    cluster, rollout, seen = train(3)
    assert [version for _, version in seen] == [0, 1, 2], "each rollout is of the weights of the step before"
    actor, engine = cluster.actor_trainer.model, rollout.engine
    assert engine.weight_version == 3
    state = nnx.to_pure_dict(nnx.state(actor, nnx.Param))
    assert engine.checksum() == checksum(rollout.model_config, params_of(state))

    config = base_rollout.RolloutConfig(
        max_tokens_to_generate=10, max_prompt_length=8, temperature=0.7, return_logprobs=True, seed=3
    )
    found = rollout.generate(PROMPTS, config)
    assert found.left_padded_prompt_tokens.shape == (4, 8)
    longest = max(map(len, found.tokens))
    completions = np.full((4, longest), rollout.pad_id(), np.int32)
    mask = np.arange(longest)[None] < np.array([[len(tokens)] for tokens in found.tokens])
    for row, tokens in enumerate(found.tokens):
        assert rollout.eos_id() not in tokens.tolist()
        completions[row, : len(tokens)] = tokens
    graph, params = nnx.split(actor)
    theirs = common.compute_per_token_logps(
        graph,
        params,
        prompt_tokens=jnp.asarray(found.left_padded_prompt_tokens),
        completion_tokens=jnp.asarray(completions),
        pad_id=rollout.pad_id(),
        eos_id=rollout.eos_id(),
        stop_gradient=True,
        return_logits=False,
        temperature=0.7,
    )
    mine = rollout.get_per_token_logps(
        jnp.asarray(found.left_padded_prompt_tokens),
        jnp.asarray(completions),
        completion_mask=jnp.asarray(mask),  # by length: the policy may well say the padding token
    )
    for row, tokens in enumerate(found.tokens):
        count = len(tokens)
        np.testing.assert_allclose(np.asarray(theirs)[row, :count], found.logprobs[row], atol=1e-3)
        np.testing.assert_allclose(np.asarray(mine)[row, :count], found.logprobs[row], atol=1e-4)

    own = sampler.Sampler(
        actor,
        LetterTokenizer(),
        sampler.CacheConfig(cache_size=64, num_layers=2, num_kv_heads=2, head_dim=8),
    )
    greedy = own(PROMPTS, max_generation_steps=10, max_prompt_length=8, temperature=0.0, pad_output=False)
    ours = rollout.generate(
        PROMPTS, base_rollout.RolloutConfig(max_tokens_to_generate=10, max_prompt_length=8, temperature=0.0)
    )
    assert [tokens.tolist() for tokens in ours.tokens] == [np.asarray(t).tolist() for t in greedy.tokens]
    assert ours.text == greedy.text
    np.testing.assert_array_equal(ours.left_padded_prompt_tokens, np.asarray(greedy.padded_prompt_tokens))

"""A prompt of 131,064 tokens, prefilled in chunks, and what follows it: as the float64 model says, drafts or not."""

from __future__ import annotations

import dataclasses

import numpy as np

from rollout_spec import DraftConfig, EngineConfig, RolloutEngine, SamplingParams
from rollout_spec.weights.names import to_hf
from tests.helpers.plain_model import Float64Array, PlainModel
from tests.helpers.tiny_models import CONFIGS, random_params

LENGTH, EMITTED = 131_064, 8


class LastTokenModel(PlainModel):
    """Attends from the last token only, which is all that the last logits of a single layer depend on."""

    def _attention(self, x: Float64Array, layer: int, name: str) -> Float64Array:
        config = self.config
        assert config.num_layers == 1
        assert config.num_heads == config.num_kv_heads == 1
        q, k = (
            self._rotate(self._linear(x, f"{name}.{kind}_proj")[:, None], self._theta(layer))[:, 0]
            for kind in "qk"
        )
        scores = k @ q[-1] * config.attention_scale
        weights = np.exp(scores - scores.max())
        attended = np.zeros_like(x)
        mixed = weights @ self._linear(x, f"{name}.v_proj") / weights.sum()
        attended[-1] = self._linear(mixed, f"{name}.o_proj")
        return attended


def test_a_prompt_of_128k_tokens_is_continued_as_the_float64_model_says() -> None:
    config = dataclasses.replace(
        CONFIGS["llama"], num_heads=1, num_kv_heads=1, max_position_embeddings=LENGTH + EMITTED
    )
    params = random_params(config, seed=0)
    prompt = np.random.default_rng(0).integers(4, config.vocab_size, LENGTH)
    engine = RolloutEngine(
        config,
        params,
        config=EngineConfig(
            max_seqs=1, max_batch_tokens=4096, page_size=128, draft=DraftConfig(max_nodes=7, gate=False)
        ),
    )
    sampling = SamplingParams(max_tokens=EMITTED, temperature=0.0, ignore_eos=True)
    (output,) = engine.generate([prompt], sampling)
    completion, stats = output.completions[0], engine.stats()
    engine.close()
    assert stats.prompt_tokens_computed == LENGTH
    assert stats.drafted > 0
    plain = LastTokenModel(config, to_hf(config, params), LENGTH + EMITTED)
    text = prompt.tolist()
    for token, logprob in zip(completion.token_ids.tolist(), completion.logprobs, strict=True):
        logits = plain.last_logits(text)
        expected = logits - np.logaddexp.reduce(logits)
        assert token == int(expected.argmax())
        # Rotary angles in float32, as everyone computes them, are up to 0.004 off at such positions.
        np.testing.assert_allclose(logprob, expected[token], atol=1e-3)
        text.append(token)

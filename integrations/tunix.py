"""Tunix: rollouts of its `RLCluster` by an engine, on the actor's own devices.

    ClusterConfig(..., rollout_engine=RolloutSpecRollout)
    ClusterConfig(..., rollout_engine=functools.partial(RolloutSpecRollout, engine_config=EngineConfig(...)))

For Tunix's own Qwen3 (dense) and Llama 3. Weights go from the actor's `nnx.State` to the engine without leaving the
device.
Importing this module needs google-tunix of the tested version.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray
from rollout_spec.integrations.versions import check

from rollout_spec import EngineConfig, RolloutEngine, SamplingParams
from rollout_spec.errors import ConfigError
from rollout_spec.models import ModelConfig, Params, RopeConfig, apply
from rollout_spec.sampling import derive_seed

TESTED = ("0.1.7", "0.1.8")
"""From, and below."""
check("google-tunix", *TESTED, extra="tunix")

from tunix.generate import tokenizer_adapter  # noqa: E402  behind the check, which says what to install
from tunix.rl.rollout import base_rollout  # noqa: E402

_LONGEST_DEFAULT = 512


class RolloutSpecRollout(base_rollout.BaseRollout):
    """A rollout worker around an engine."""

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: jax.sharding.Mesh | None = None,
        rollout_config: Any = None,
        *,
        engine_config: EngineConfig | None = None,
        include_end_token: bool = False,
    ) -> None:
        """engine_config: by default one that fits rollout_config. include_end_token: in tokens and log-probabilities;
        Tunix's own sampler leaves it out."""
        self.tokenizer = _adapted(tokenizer)
        self.include_end_token = include_end_token
        self.temperature = 1.0 if rollout_config is None else float(rollout_config.temperature)
        self._read = _reader(rollout_actor)
        longest = _LONGEST_DEFAULT
        if rollout_config is not None:
            longest = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate + 1
        config = engine_config or EngineConfig(max_seqs=16, max_seq_len=longest)
        eos = (int(self.tokenizer.eos_id()),)
        self.model_config = model_config_of(rollout_actor, max_position_embeddings=longest, eos_token_ids=eos)
        self.engine = RolloutEngine(
            self.model_config, self._read(nnx.state(rollout_actor, nnx.Param)), config=config
        )

    def generate(self, prompts: list[str], rollout_config: Any, **_: Any) -> Any:
        """Completions of texts, as Tunix's sampler returns them: without the end token, prompts padded at the left."""
        self.temperature = float(rollout_config.temperature)
        ids = [self._token_ids(prompt) for prompt in prompts]
        outputs = self.engine.generate(ids, [self._sampling(rollout_config, i) for i in range(len(ids))])
        tokens, logprobs = [], []
        for output in outputs:
            completion = output.completions[0]
            ended = completion.finish_reason == "stop" and not self.include_end_token
            count = len(completion.token_ids) - ended
            tokens.append(completion.token_ids[:count])
            whole = completion.sampled_logprobs + np.log(completion.kept_mass)
            logprobs.append(whole[:count].astype(np.float32))
        width, longest = rollout_config.max_prompt_length, max(map(len, ids))
        if longest > width:  # as Tunix's sampler does
            width = 1 << (longest - 1).bit_length()
        padded = np.full((len(ids), width), self.pad_id(), np.int32)
        for row, prompt in enumerate(ids):
            padded[row, width - len(prompt) :] = prompt
        return base_rollout.RolloutOutput(
            text=[self.tokenizer.decode(row.tolist()) for row in tokens],
            logits=[],
            tokens=tokens,
            left_padded_prompt_tokens=padded,
            logprobs=logprobs if rollout_config.return_logprobs else None,
        )

    def get_per_token_logps(
        self,
        prompt_tokens: jax.Array,
        completion_tokens: jax.Array,
        completion_mask: jax.Array | None = None,
        temperature: float | None = None,
    ) -> jax.Array:
        """float32[B, T] under the engine's weights, at the temperature sampled with unless another is given.

        prompt_tokens int32[B, P], padded at the left; completion_tokens int32[B, T], padded at the right. Where
        completion_mask is False the results are 0.
        """
        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        heat = self.temperature if temperature is None else temperature
        width = prompts.shape[1]
        starts = np.array([_padding(row, self.pad_id()) for row in prompts])
        rows = np.full((len(prompts), width + completions.shape[1]), self.pad_id(), np.int32)
        for row, start in enumerate(starts):  # the mask goes by place, so that padding belongs at the right
            text = np.concatenate([prompts[row, start:], completions[row]])
            rows[row, : len(text)] = text
        logits = apply(self.model_config, self.engine.params, jnp.asarray(rows)) / (heat or 1.0)
        every = jax.nn.log_softmax(logits, axis=-1)
        places = (width - starts)[:, None] - 1 + np.arange(completions.shape[1])[None]
        found = every[np.arange(len(rows))[:, None], places, completions]
        return found if completion_mask is None else jnp.where(jnp.asarray(completion_mask) != 0, found, 0.0)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Serves the actor's weights from now on. Nothing is copied to the host, nor from it."""
        if filter_types and any(issubclass(kind, nnx.LoRAParam) for kind in filter_types):
            raise ConfigError(
                "adapters alone were sent; merge them, or train all weights (LoRA isn't supported here)"
            )
        self.engine.update_weights(self._read(params), donate=True)

    def pad_id(self) -> int:
        return int(self.tokenizer.pad_id())

    def eos_id(self) -> int:
        return int(self.tokenizer.eos_id())

    def model(self) -> None:
        """None: Tunix takes a model here that shares arrays with the actor's for one that needs no weights sent."""

    def _token_ids(self, prompt: str) -> list[int]:
        """As Tunix's sampler tokenizes."""
        ids = list(self.tokenizer.encode(prompt))
        start = self.tokenizer.bos_id()
        return list(self.tokenizer.dedup_bos_ids([start, *ids] if start else ids))

    def _sampling(self, config: Any, index: int) -> SamplingParams:
        seed = config.seed
        if seed is not None:
            words = np.asarray(jax.random.key_data(seed) if _is_key(seed) else seed).ravel()
            seed = derive_seed(
                int(words[-1]), index
            )  # hashed: seed + index would repeat in a run that counts its seed
        return SamplingParams(
            temperature=float(config.temperature),
            top_p=1.0 if config.top_p is None else float(config.top_p),
            top_k=0 if config.top_k is None or config.top_k < 0 else int(config.top_k),
            max_tokens=config.max_tokens_to_generate,
            stop_token_ids=None if config.eos_tokens is None else tuple(map(int, config.eos_tokens)),
            ignore_eos=config.eos_tokens is not None,
            seed=seed,
        )


def model_config_of(
    actor: nnx.Module, *, max_position_embeddings: int, eos_token_ids: tuple[int, ...] = ()
) -> ModelConfig:
    """The configuration of Tunix's Qwen3 or Llama 3 as this package has it. Raises ConfigError for other models."""
    kind, config = type(actor).__name__, getattr(actor, "config", None)
    families = {"Qwen3": "qwen3", "Llama3": "llama"}
    if kind not in families or config is None or getattr(config, "num_experts", None):
        raise ConfigError(f"expected Tunix's dense Qwen3 or Llama3 as the rollout actor, got {kind}")
    tied = config.use_tied_embedding if kind == "Qwen3" else config.weight_tying
    return ModelConfig(
        architecture=families[kind],
        vocab_size=config.vocab_size,
        hidden_size=config.embed_dim,
        intermediate_size=config.hidden_dim,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=config.norm_eps,
        rope=RopeConfig(theta=_rope_theta(actor)),
        tie_word_embeddings=bool(tied),
        qk_norm=kind == "Qwen3",
        eos_token_ids=eos_token_ids,
    )


def _rope_theta(actor: nnx.Module) -> float:
    """The rotary base that the trainer's model computes with: that of its `apply_rope`.

    Tunix 0.1.7 doesn't hand `config.rope_theta` on, so that this is 1,000,000 whatever the configuration says.
    """
    parameter = inspect.signature(sys.modules[type(actor).__module__].apply_rope).parameters["rope_theta"]
    return float(parameter.default)


def _reader(actor: nnx.Module) -> Callable[[Any], Params]:
    """Tunix's nnx.State to this package's tree, in one program on the devices; the arrays are its own."""

    @jax.jit
    def read(tree: dict) -> Params:
        # Copies: jit hands unchanged arguments on, and the actor's next step takes its arrays' memory.
        return jax.tree.map(jnp.copy, params_of(tree))

    return lambda state: read(nnx.to_pure_dict(state))


def params_of(tree: dict) -> Params:
    """A pure dict of Tunix's Qwen3 or Llama 3 as `engine.params` is shaped."""
    params: Params = {
        "embed_tokens": {"embedding": tree["embedder"]["input_embedding"]},
        "layers": {int(number): _layer(layer) for number, layer in tree["layers"].items()},
        "norm": {"scale": tree["final_norm"]["w"]},
    }
    if "lm_head" in tree:
        params["lm_head"] = {"kernel": tree["lm_head"]["w"]}
    return params


def _layer(layer: dict) -> Params:
    attention, mlp = layer["attn"], layer["mlp"]
    projections: Params = {
        name: {"kernel": attention[name]["w"].reshape(attention[name]["w"].shape[0], -1)}
        for name in ("q_proj", "k_proj", "v_proj")
    }
    out = attention["o_proj"]["w"]
    projections["o_proj"] = {"kernel": out.reshape(-1, out.shape[-1])}
    for name in ("q_norm", "k_norm"):
        if name in attention:
            projections[name] = {"scale": attention[name]["w"]}
    return {
        "self_attn": projections,
        "mlp": {name: {"kernel": mlp[name]["kernel"]} for name in ("gate_proj", "up_proj", "down_proj")},
        "input_layernorm": {"scale": layer["input_layernorm"]["w"]},
        "post_attention_layernorm": {"scale": layer["post_attention_layernorm"]["w"]},
    }


def _adapted(tokenizer: Any) -> Any:
    if isinstance(tokenizer, tokenizer_adapter.TokenizerAdapter):
        return tokenizer
    return tokenizer_adapter.TokenizerAdapter(tokenizer)


def _padding(row: NDArray[np.int32], pad: int) -> int:
    """Padding tokens at the start; a prompt keeps its last token whatever it is."""
    others = np.flatnonzero(row != pad)
    return int(others[0]) if len(others) else len(row) - 1


def _is_key(seed: Any) -> bool:
    return isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)


__all__ = ["RolloutSpecRollout", "model_config_of", "params_of"]

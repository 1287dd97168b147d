"""DeepSeek-V2 and -V3: attention over latents, shared and routed experts, of which groups are chosen first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_spec.models.config import ExpertsConfig, LatentConfig
from rollout_spec.models.family import Family
from rollout_spec.models.rope import yarn_attention_factor
from rollout_spec.models.sparse_decoder import SparseDecoderModel

_NEEDED = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "moe_intermediate_size")


def _shared_options(config: Mapping[str, Any], experts: dict[str, Any], faults: list[str]) -> dict[str, Any]:
    faults.extend(f"{name} is missing" for name in _NEEDED if config.get(name) is None)
    if config.get("pretraining_tp", 1) not in (None, 1):
        faults.append(f"pretraining_tp={config['pretraining_tp']!r}: only 1 is supported")
    count, groups = config.get("n_routed_experts") or 0, config.get("n_group") or 1
    if count < 1 or count % groups:
        faults.append(f"n_routed_experts={count} is not a multiple of n_group={groups}")
    if config.get("moe_layer_freq", 1) not in (None, 1):
        faults.append(f"moe_layer_freq={config['moe_layer_freq']!r}: only 1 is supported")
    if faults:
        return {}
    width, first = config["moe_intermediate_size"], config.get("first_k_dense_replace") or 0
    head_dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    return {
        "head_dim": head_dim,
        "num_kv_heads": 1,
        "query_scale": head_dim / _softmax_correction(config) ** 4,
        "attention_bias": bool(config.get("attention_bias", False)),
        "latent": LatentConfig(
            query_rank=config.get("q_lora_rank"),
            kv_rank=config["kv_lora_rank"],
            nope_dim=config["qk_nope_head_dim"],
            rope_dim=config["qk_rope_head_dim"],
            value_dim=config["v_head_dim"],
            interleaved=bool(config.get("rope_interleave", True)),
        ),
        "experts": ExpertsConfig(
            num_experts=count,
            num_chosen=config.get("num_experts_per_tok") or 8,
            intermediate_size=width,
            scale=float(config.get("routed_scaling_factor") or 1.0),
            shared_intermediate_size=width * (config.get("n_shared_experts") or 0),
            layers=tuple(range(first, config.get("num_hidden_layers") or 0)),
            **experts,
        ),
    }


def _softmax_correction(config: Mapping[str, Any]) -> float:
    """YaRN's correction, which DeepSeek puts on the scores instead of on cosine and sine."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    weight = rope.get("mscale_all_dim")
    if kind == "default" or not weight:
        return 1.0
    return (yarn_attention_factor(float(rope["factor"])) - 1.0) * float(weight) + 1.0


def _v2_options(config: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        faults.append(f"topk_method={method!r}: supported are greedy and group_limited_greedy")
    if config.get("norm_topk_prob"):
        faults.append(
            "norm_topk_prob=true: a DeepSeek-V2 has it off (transformers reads it and doesn't apply it)"
        )
    if config.get("scoring_func", "softmax") != "softmax":
        faults.append(f"scoring_func={config['scoring_func']!r}: only softmax is supported")
    limited = method == "group_limited_greedy"
    experts = {
        "num_groups": (config.get("n_group") or 1) if limited else 1,
        "chosen_groups": (config.get("topk_group") or 1) if limited else 1,
    }
    return _shared_options(config, experts, faults)


def _v3_options(config: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    if config.get("scoring_func", "sigmoid") != "sigmoid":
        faults.append(f"scoring_func={config['scoring_func']!r}: only sigmoid is supported")
    if config.get("topk_method", "noaux_tc") != "noaux_tc":
        faults.append(f"topk_method={config['topk_method']!r}: only noaux_tc is supported")
    experts = {
        "scoring": "sigmoid",
        "correction_bias": True,
        "normalised": bool(config.get("norm_topk_prob", True)),
        "num_groups": config.get("n_group") or 1,
        "chosen_groups": config.get("topk_group") or 1,
        "group_score_of": 2,
    }
    return _shared_options(config, experts, faults)


V2 = Family(
    name="deepseek_v2",
    module=SparseDecoderModel,
    huggingface_architectures=("DeepseekV2ForCausalLM",),
    huggingface_options=_v2_options,
)
V3 = Family(
    name="deepseek_v3",
    module=SparseDecoderModel,
    huggingface_architectures=("DeepseekV3ForCausalLM",),
    huggingface_options=_v3_options,
)

"""`ModelConfig` from the contents of a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_spec.errors import ModelLoadError
from rollout_spec.models import FAMILIES, ModelConfig, RopeConfig
from rollout_spec.models.family import Family
from rollout_spec.models.mtp import read_config as read_mtp_config
from rollout_spec.models.rope import yarn_attention_factor

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


def parse_config(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...] | None = None) -> ModelConfig:
    """Read a config.json; `eos_token_ids` (of generation_config.json) come before its own.

    Raises ModelLoadError that lists every missing field and every option that isn't supported, by name.
    """
    family = _family(raw)
    faults = [f"{name} is missing" for name in _REQUIRED if raw.get(name) is None]
    if faults:
        raise _refusal(family.name, faults)
    if "hidden_act" not in family.options_read and raw.get("hidden_act", "silu") not in ("silu", "swish"):
        faults.append(f"hidden_act={raw['hidden_act']!r}: only 'silu' is supported")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unnamed")
        faults.append(f"quantization_config ({method}): only unquantised safetensors are supported")
    own_fields = family.huggingface_options(raw, faults)
    mtp = own_fields.pop("mtp") if "mtp" in own_fields else read_mtp_config(raw, faults)
    rope, windowed_rope = _ropes(raw, family, faults)
    num_heads, num_kv_heads = raw["num_attention_heads"], raw.get("num_key_value_heads")
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_heads % num_kv_heads:
        faults.append(
            f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}"
        )
    head_dim = own_fields.get("head_dim") or raw.get("head_dim") or raw["hidden_size"] // num_heads
    if head_dim % 2:
        faults.append(f"head_dim={head_dim} is odd: rotary embedding turns pairs of dimensions")
    if faults:
        raise _refusal(family.name, faults)
    fields: dict[str, Any] = {
        "architecture": family.name,
        "vocab_size": raw["vocab_size"],
        "hidden_size": raw["hidden_size"],
        "intermediate_size": raw["intermediate_size"],
        "num_layers": raw["num_hidden_layers"],
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": raw["max_position_embeddings"],
        "rms_norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "rope": rope,
        "windowed_rope": windowed_rope,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "eos_token_ids": token_ids(raw.get("eos_token_id")) if eos_token_ids is None else eos_token_ids,
        "bos_token_id": raw.get("bos_token_id"),
        "mtp": mtp,
    }
    return ModelConfig(**{**fields, **own_fields})


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """config.json writes one end token as a number and several as a list."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _ropes(raw: Mapping[str, Any], family: Family, faults: list[str]) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary embedding, and that of layers with a window where it is another."""
    if not family.rope_by_layer_type:
        return parse_rope(raw, faults, family.default_rope_theta), None
    options = raw.get("rope_parameters")
    if options and any(isinstance(value, Mapping) for value in options.values()):
        beside = {key: value for key, value in raw.items() if key not in ("rope_scaling", "rope_theta")}
        of_full = {**beside, "rope_parameters": options.get("full_attention")}
        of_windows = {**beside, "rope_parameters": options.get("sliding_attention")}
        return parse_rope(of_full, faults, family.default_rope_theta), parse_rope(of_windows, faults)
    local = RopeConfig(theta=float(raw.get("rope_local_base_freq") or 10_000.0))
    return parse_rope(raw, faults, family.default_rope_theta), local


def parse_rope(raw: Mapping[str, Any], faults: list[str], default_theta: float = 10_000.0) -> RopeConfig:
    """Rotary options in either spelling: `rope_theta` and `rope_scaling`, or the newer `rope_parameters`.

    Unsupported ones are appended to `faults`.
    """
    options = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in options.values()):
        faults.append(f"rope_parameters by layer type ({', '.join(options)}): only one set for all layers")
        return RopeConfig()
    theta = float(options.get("rope_theta") or raw.get("rope_theta") or default_theta)
    kind = options.get("rope_type") or options.get("type") or "default"
    partial = options.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        faults.append(f"partial_rotary_factor={partial}: only 1.0 is supported")
    if kind in ("default", "none"):
        return RopeConfig(theta=theta)
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        faults.append(
            f"rope scaling kind {kind!r}: supported are default, linear, dynamic (up to the original "
            "length), llama3 and yarn"
        )
        return RopeConfig(theta=theta)

    trained_length = (
        raw.get("original_max_position_embeddings")
        or options.get("original_max_position_embeddings")
        or raw.get("max_position_embeddings")
    )
    factor = options.get("factor")
    if factor is None and kind == "yarn" and trained_length:
        factor = raw.get("max_position_embeddings", trained_length) / trained_length
    needed = {"factor": factor}
    if kind == "llama3":
        needed |= {name: options.get(name) for name in ("low_freq_factor", "high_freq_factor")}
    missing = [name for name, value in needed.items() if value is None]
    if missing or factor is None:
        faults.append(f"rope scaling kind {kind!r} needs {', '.join(missing)}")
        return RopeConfig(theta=theta)

    if kind == "linear":
        return RopeConfig("linear", theta, float(factor))
    if kind == "dynamic":  # transformers goes by max_position_embeddings alone
        return RopeConfig("dynamic", theta, float(factor), raw.get("max_position_embeddings"))
    if kind == "llama3":
        return RopeConfig(
            "llama3",
            theta,
            float(factor),
            trained_length,
            low_freq_factor=float(options["low_freq_factor"]),
            high_freq_factor=float(options["high_freq_factor"]),
        )
    attention_factor = options.get("attention_factor")
    if attention_factor is None:
        attention_factor = yarn_attention_factor(factor, options.get("mscale"), options.get("mscale_all_dim"))
    return RopeConfig(
        "yarn",
        theta,
        float(factor),
        trained_length,
        attention_factor=float(attention_factor),
        beta_fast=float(options.get("beta_fast") or 32),
        beta_slow=float(options.get("beta_slow") or 1),
        truncate=bool(options.get("truncate", True)),
    )


def _family(raw: Mapping[str, Any]) -> Family:
    classes = raw.get("architectures") or []
    for family in FAMILIES.values():
        if any(name in family.huggingface_architectures for name in classes):
            return family
        if not classes and raw.get("model_type") in (family.name, *family.model_types):
            return family
    known = ", ".join(name for family in FAMILIES.values() for name in family.huggingface_architectures)
    raise ModelLoadError(
        f"unknown architecture {classes or raw.get('model_type')!r} in config.json: supported are {known} "
        "(docs/models.md says how to add one)"
    )


def _refusal(architecture: str, faults: list[str]) -> ModelLoadError:
    return ModelLoadError(
        f"config.json of this {architecture} model can't be used, {len(faults)} faults:\n  "
        + "\n  ".join(faults)
    )

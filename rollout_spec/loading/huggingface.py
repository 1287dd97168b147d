"""Hugging Face folders: config.json, one or many safetensors files, tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from rollout_spec.errors import ModelLoadError
from rollout_spec.loading import safetensors_file
from rollout_spec.loading.checkpoint import LazyTensor
from rollout_spec.loading.huggingface_config import parse_config, token_ids
from rollout_spec.models import ModelConfig
from rollout_spec.tokenizer import Tokenizer

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def read_config(folder: Path) -> ModelConfig:
    """The model's configuration; end tokens from generation_config.json if it names any."""
    config_file, generation_file = folder / "config.json", folder / "generation_config.json"
    if not config_file.is_file():
        inside = sorted(file.name for file in folder.glob("*.gguf"))
        advice = f"; it holds {', '.join(inside)}: give the path of that file" if inside else ""
        raise ModelLoadError(f"{folder} holds no config.json: expected a Hugging Face model folder{advice}")
    eos_token_ids = None
    if generation_file.is_file():
        eos_token_ids = token_ids(_read_json(generation_file).get("eos_token_id")) or None
    return parse_config(_read_json(config_file), eos_token_ids)


def tensors(folder: Path) -> dict[str, LazyTensor]:
    """Every tensor of the folder's safetensors files, by name, not read yet."""
    names_by_file: dict[str, list[str] | None]
    if (folder / _INDEX).is_file():
        names_by_file = {}
        for name, file_name in _read_json(folder / _INDEX)["weight_map"].items():
            names_by_file.setdefault(file_name, []).append(name)  # type: ignore[union-attr]
    elif (folder / _SINGLE).is_file():
        names_by_file = {_SINGLE: None}
    else:
        raise ModelLoadError(
            f"{folder} holds neither {_SINGLE} nor {_INDEX}: weights must be safetensors "
            "(convert pytorch_model.bin with transformers' save_pretrained)"
        )
    absent = [file_name for file_name in names_by_file if not (folder / file_name).is_file()]
    if absent:
        raise ModelLoadError(
            f"{folder / _INDEX} names shards that are not there: {', '.join(sorted(absent))}"
        )

    found: dict[str, LazyTensor] = {}
    not_there = []
    for file_name, names in names_by_file.items():
        in_file = safetensors_file.tensors(folder / file_name)
        for name in sorted(in_file) if names is None else names:
            if name in in_file:
                found[name] = in_file[name]
            else:
                not_there.append(f"{name} (said to be in {file_name})")
    if not_there:
        raise ModelLoadError(f"{_INDEX} names tensors that its shards lack:\n  " + "\n  ".join(not_there))
    return found


def read_tokenizer(folder: Path, config: ModelConfig) -> Tokenizer | None:
    """The folder's tokenizer; None if there is no tokenizer.json."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    settings_file = folder / "tokenizer_config.json"
    settings = _read_json(settings_file) if settings_file.is_file() else {}
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.no_truncation()  # a file saved after truncating calls would cut prompts silently
    backend.no_padding()
    special_tokens = {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in settings.items()
        if name.endswith("_token") and isinstance(token, str | dict)
    }
    return Tokenizer(
        backend,
        chat_template=_chat_template(folder, settings),
        special_tokens=special_tokens,
        eos_token_ids=config.eos_token_ids,
    )


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's: a string, or "default" of a list of named ones."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ModelLoadError(f"{file} is not valid JSON: {error}") from error

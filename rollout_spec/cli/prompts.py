"""Prompts of a file, as token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PromptError
from ..intake import Intake
from ..models import ModelConfig
from ..tokenizer import Tokenizer

_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
_MOST_FAULTS = 10
"""That are listed."""


def read_prompts(path: Path, *, as_chat: bool = False) -> dict[str, Any]:
    """Texts, chats or token ids by their place, "FILE:LINE".

    A file of JSON lines has an object a line with "prompt" (a text, chat messages or token ids) or "messages"; any
    other file has a text a line. Empty lines are passed over. as_chat: a text becomes a user's message.
    Raises PromptError with all faults, OSError.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{path}: expected a text file in UTF-8 ({error.reason} at byte {error.start})"
        ) from error
    numbered = [(f"{path.name}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise PromptError(f"{path}: expected a prompt a line, found an empty file")
    if path.suffix in _JSON_SUFFIXES or numbered[0][1].lstrip().startswith("{"):
        prompts = _collected(numbered, _prompt_of_json)
    else:
        prompts = dict(numbered)
    if as_chat:
        prompts = {
            place: [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            for place, prompt in prompts.items()
        }
    return prompts


def token_ids(
    prompts: dict[str, Any], config: ModelConfig, tokenizer: Tokenizer | None, *, max_tokens: int
) -> list[NDArray[np.int32]]:
    """int32[P] of each prompt, none too long for the model with `max_tokens` behind it.

    Raises PromptError with all faults.
    """
    intake = Intake(config, tokenizer, max_seq_len=config.max_length, cache_tokens=0, seed=0)

    def checked(place: str, prompt: Any) -> NDArray[np.int32]:
        ids = intake.token_ids(prompt, place)
        if len(ids) + max_tokens > config.max_length:
            raise PromptError(
                f"{place} has {len(ids)} tokens, which with {max_tokens} generated ones exceed the model's "
                f"{config.max_length}: shorten it or lower --max-tokens"
            )
        return ids

    return list(_collected(list(prompts.items()), checked).values())


def _prompt_of_json(place: str, line: str) -> Any:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"{place}: expected a JSON object, got {_shortened(line)} ({error.msg})") from error
    if not isinstance(entry, dict):
        raise PromptError(f"{place}: expected a JSON object, got {_shortened(line)}")
    for key in ("prompt", "messages"):
        if entry.get(key):
            return entry[key]
    if "prompt" in entry or "messages" in entry:
        raise PromptError(f"{place}: the prompt is empty")
    keys = ", ".join(repr(key) for key in entry) or "none"
    raise PromptError(f'{place}: expected a key "prompt" or "messages", found {keys}')


def _collected(entries: list[tuple[str, Any]], convert: Callable[[str, Any], Any]) -> dict[str, Any]:
    """What `convert` makes of the entries, by place; raises PromptError with the faults of all."""
    converted, faults = {}, []
    for place, entry in entries:
        try:
            converted[place] = convert(place, entry)
        except PromptError as error:
            faults.append(str(error))
    if faults:
        raise PromptError("\n  ".join([_counted(faults), *_listed(faults)]))
    return converted


def _counted(faults: list[str]) -> str:
    return f"{len(faults)} prompt{'s' if len(faults) > 1 else ''} can't be used:"


def _listed(faults: list[str]) -> Iterator[str]:
    yield from faults[:_MOST_FAULTS]
    if len(faults) > _MOST_FAULTS:
        yield f"... and {len(faults) - _MOST_FAULTS} more"


def _shortened(text: str, most: int = 40) -> str:
    return repr(text if len(text) <= most else text[:most] + "...")

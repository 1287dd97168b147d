"""Generation as anyone would first write it: one request, one token at a time, everything computed anew.

What the engine must reproduce, whatever it batches, caches, drafts or preempts. None of its code is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np

from tests.helpers.plain_noise import derive_seed
from tests.helpers.plain_sampler import Float64Array, PlainSampling, draw

_SAMPLING_NAMES = {field.name for field in fields(PlainSampling)}


class LastLogits(Protocol):
    """A model: the raw logits float64[V] after a sequence of tokens, its end tokens, its longest sequence."""

    eos_token_ids: Sequence[int]
    max_length: int

    def last_logits(self, token_ids: Sequence[int]) -> Float64Array: ...


class Decoder(Protocol):
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


@dataclass
class PlainCompletion:
    """The fields of a Completion, and of each token the margin by which it was drawn (see PlainDraw)."""

    seed: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)
    kept_mass: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    text: str | None = None
    finish_reason: str = "length"
    stop_token: int | str | None = None


def first_stop_string(before: str, after: str, stop: Sequence[str]) -> tuple[str, int] | None:
    """The stop string that the last token completed and where it ends in the text.

    Of several, the one that begins first, and of those the shortest. The last token may have rewritten the
    end of `before` (bytes that only now make a character).
    """
    unchanged = 0
    while unchanged < min(len(before), len(after)) and before[unchanged] == after[unchanged]:
        unchanged += 1
    found = []
    for string in stop:
        start = after.find(string, max(0, unchanged + 1 - len(string)))
        if start >= 0:
            found.append((start, len(string), string))
    if not found:
        return None
    start, length, string = min(found)
    return string, start + length


def plain_generate(
    model: LastLogits,
    prompt: Sequence[int],
    sampling: Mapping[str, Any],
    *,
    seed: int,
    tokenizer: Decoder | None = None,
) -> PlainCompletion:
    """One completion. `sampling` holds keywords of SamplingParams; `n` and `seed` in it are not looked at."""
    numbers = PlainSampling(
        **{name: value for name, value in sampling.items() if name in _SAMPLING_NAMES and value is not None}
    )
    max_tokens = sampling.get("max_tokens", 256)
    min_tokens = sampling.get("min_tokens", 0)
    stop = [sampling["stop"]] if isinstance(sampling.get("stop"), str) else list(sampling.get("stop") or ())
    end_tokens = set(sampling.get("stop_token_ids") or ())
    if not sampling.get("ignore_eos", False):
        end_tokens |= set(model.eos_token_ids)

    completion = PlainCompletion(seed)
    output = completion.token_ids
    text = ""
    while len(output) < max_tokens and len(prompt) + len(output) < model.max_length:
        drawn = draw(
            model.last_logits([*prompt, *output]),
            numbers,
            seed=seed,
            position=len(prompt) + len(output),
            prompt=prompt,
            output=output,
            masked=sorted(end_tokens) if len(output) < min_tokens else (),
        )
        output.append(drawn.token)
        completion.logprobs.append(drawn.logprob)
        completion.sampled_logprobs.append(drawn.sampled_logprob)
        completion.kept_mass.append(drawn.kept_mass)
        completion.margins.append(drawn.margin)
        before, text = text, tokenizer.decode(output, skip_special_tokens=True) if tokenizer else ""
        if drawn.token in end_tokens:
            completion.finish_reason, completion.stop_token = "stop", drawn.token
            break
        found = first_stop_string(before, text, stop) if len(output) >= min_tokens else None
        if found is not None:
            completion.finish_reason, completion.stop_token = "stop", found[0]
            text = text[: found[1]]
            break
    completion.text = text if tokenizer else None
    return completion


def plain_samples(
    model: LastLogits,
    prompt: Sequence[int],
    sampling: Mapping[str, Any],
    *,
    seed: int,
    tokenizer: Decoder | None = None,
) -> Iterator[PlainCompletion]:
    """All `n` completions of a request whose own seed is `seed`, in order."""
    for sample in range(sampling.get("n", 1)):
        yield plain_generate(model, prompt, sampling, seed=derive_seed(seed, sample), tokenizer=tokenizer)


def certain_prefix(completion: PlainCompletion, margin: float) -> int:
    """How many leading tokens were each drawn by more than `margin`: the ones float32 must agree on."""
    narrow = np.flatnonzero(np.asarray(completion.margins) <= margin)
    return int(narrow[0]) if narrow.size else len(completion.token_ids)

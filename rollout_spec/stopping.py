"""Where a completion ends."""

from __future__ import annotations

from .kernels.sampling import TreeSample
from .outputs import FinishReason
from .requests import Sequence
from .tokenizer import Tokenizer

_TEXT_WINDOW = 256  # tokens decoded to look for a stop string


def append_until_end(
    sequence: Sequence, rows: list[int], sample: TreeSample, weight_version: int, tokenizer: Tokenizer | None
) -> list[int]:
    """Appends what was sampled at these rows of a step, up to the token that ends the sequence.

    Returns the rows whose tokens it took, at least one.
    """
    one_by_one = bool(sequence.sampling.stop_strings)  # which end may be inside any token
    rows = rows[: sequence.room]
    if not one_by_one and len(rows) > 1:
        rows = rows[: _until_stop_token(sequence, sample.tokens[rows].tolist())]
        sequence.extend(sample, rows, weight_version)
        check_end(sequence, tokenizer)
        return rows
    for taken, row in enumerate(rows, start=1):
        sequence.append(
            int(sample.tokens[row]),
            float(sample.logprobs[row]),
            float(sample.sampled_logprobs[row]),
            float(sample.kept_mass[row]),
            weight_version,
        )
        if check_end(sequence, tokenizer):
            return rows[:taken]
    return rows


def _until_stop_token(sequence: Sequence, tokens: list[int]) -> int:
    """How many of the next tokens there are up to the first one that ends the sequence."""
    first = max(sequence.sampling.min_tokens - sequence.num_generated, 0)  # earlier ones don't end it
    for index in range(first, len(tokens)):
        if tokens[index] in sequence.stop_tokens:
            return index + 1
    return len(tokens)


def check_end(sequence: Sequence, tokenizer: Tokenizer | None) -> bool:
    """Whether the token just appended ends the sequence; sets finish_reason, stop_token and text.

    A stop wins over the length limit when both are met by the same token.
    """
    token = int(sequence.tokens[sequence.length - 1])
    generated = sequence.num_generated
    if token in sequence.stop_tokens and generated > sequence.sampling.min_tokens:
        end(sequence, tokenizer, "stop", token)
    elif (found := _stop_string(sequence, tokenizer)) is not None:
        end(sequence, tokenizer, "stop", found)
    elif sequence.length >= sequence.max_len:
        end(sequence, tokenizer, "length", None)
    return sequence.finish_reason is not None


def end(
    sequence: Sequence, tokenizer: Tokenizer | None, reason: FinishReason, stop_token: int | str | None
) -> None:
    """Ends the sequence and decodes its text, cut behind the stop string that ended it."""
    sequence.finish_reason = reason
    sequence.stop_token = stop_token
    if tokenizer is None:
        return
    sequence.text = text = tokenizer.decode(sequence.output.tolist())
    if isinstance(stop_token, str):
        before = tokenizer.decode(sequence.output[:-1].tolist())
        at = _completed_at(stop_token, before, text)
        if at is not None:
            sequence.text = text[: at + len(stop_token)]


def _completed_at(string: str, before: str, text: str) -> int | None:
    """Where `string` first occurs in `text` in such a way that it wasn't complete in `before`."""
    stable = before.rstrip("\ufffd")  # an unfinished character may still change
    at = text.find(string, max(0, len(stable) - len(string) + 1))
    return at if at >= 0 else None


def _stop_string(sequence: Sequence, tokenizer: Tokenizer | None) -> str | None:
    """The stop string that the last token completed, if any; the one that begins first."""
    strings = sequence.sampling.stop_strings
    if not strings or tokenizer is None or sequence.num_generated < max(1, sequence.sampling.min_tokens):
        return None
    output = sequence.output[-_TEXT_WINDOW:].tolist()
    text, before = tokenizer.decode(output), tokenizer.decode(output[:-1])
    places = [(_completed_at(string, before, text), string) for string in strings]
    found = [(at, string) for at, string in places if at is not None]
    return min(found)[1] if found else None

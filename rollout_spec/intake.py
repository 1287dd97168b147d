"""From what a caller hands in to checked requests."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import CapacityError, ConfigError, PromptError
from .models import ModelConfig
from .outputs import Completion
from .requests import Request, Sequence
from .sampling import SamplingParams, derive_seed
from .tokenizer import Tokenizer

Prompt = str | SequenceOf[int] | NDArray[np.integer] | SequenceOf[Mapping[str, Any]]
"""Text, token ids, or chat messages."""


class Intake:
    """Checks prompts and parameters against one model and its limits."""

    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        *,
        max_seq_len: int,
        cache_tokens: int,
        seed: int,
    ) -> None:
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.max_seq_len = max_seq_len
        self.cache_tokens = cache_tokens
        self._seeds = np.random.default_rng(seed)

    def token_ids(self, prompt: Prompt, name: str = "prompt") -> NDArray[np.int32]:
        """int32[P], at least one id, all in the vocabulary. Raises PromptError."""
        if isinstance(prompt, str):
            ids: Any = self._tokenizer_for(name, "text").encode(prompt)
        elif isinstance(prompt, Mapping):
            raise PromptError(f"{name} is one chat message; a chat prompt is a list of messages")
        elif isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping):
            try:
                ids = self._tokenizer_for(name, "chat messages").apply_chat_template(prompt)
            except PromptError as error:
                raise PromptError(f"{name}: {error}") from error
        else:
            ids = prompt
        return self.check_ids(ids, name)

    def check_ids(self, ids: ArrayLike, name: str, *, may_be_empty: bool = False) -> NDArray[np.int32]:
        """int32[N] of `ids`, all in the vocabulary. Raises PromptError."""
        try:
            array = np.asarray(ids)
        except (TypeError, ValueError) as error:
            raise PromptError(f"{name} must be text, token ids or chat messages ({error})") from error
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise PromptError(
                f"{name} must be text, a flat sequence of integer token ids, or chat messages; "
                f"got dtype {array.dtype} and shape {array.shape}"
            )
        if not array.size and not may_be_empty:
            raise PromptError(f"{name} is empty; it needs at least one token")
        outside = array[(array < 0) | (array >= self.model_config.vocab_size)]
        if outside.size:
            raise PromptError(
                f"{name} has token ids outside the vocabulary of {self.model_config.vocab_size}: "
                f"{sorted(set(outside.tolist()))[:10]}"
            )
        return array.astype(np.int32)

    def _tokenizer_for(self, name: str, kind: str) -> Tokenizer:
        if self.tokenizer is None:
            raise PromptError(f"{name} is {kind}, but the engine has no tokenizer; pass token ids")
        return self.tokenizer

    def request(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        request_id: Hashable,
        group_id: Hashable = None,
        index: int = 0,
        continue_from: Completion | None = None,
        name: str = "prompt",
    ) -> Request:
        """A request with its sequences. Raises PromptError, ConfigError or CapacityError."""
        check_hashable("group_id", group_id)
        ids = self.token_ids(prompt, name)
        if len(ids) >= self.max_seq_len:
            raise PromptError(
                f"{name} has {len(ids)} tokens, but at most {self.max_seq_len - 1} leave room for one more "
                f"within the maximum length of {self.max_seq_len}"
            )
        self._check_sampling(sampling)
        max_len = min(len(ids) + sampling.max_tokens, self.max_seq_len)
        if max_len > self.cache_tokens:
            raise CapacityError(
                f"{name} and its completion may take {max_len} tokens, but the cache holds {self.cache_tokens}; "
                "set EngineConfig.kv_pages higher or max_tokens lower"
            )
        if group_id is None:
            group_id = hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()
        request = Request(request_id, ids, sampling, group_id, index)
        if continue_from is not None:
            request.sequences = [self._resumed(request, continue_from, max_len)]
            return request
        seed = sampling.seed if sampling.seed is not None else int(self._seeds.integers(0, 2**63))
        request.sequences = [
            self.sequence(request, sample, derive_seed(seed, sample), max_len) for sample in range(sampling.n)
        ]
        return request

    def sequence(self, request: Request, sample: int, seed: int, max_len: int) -> Sequence:
        prompt, sampling = request.prompt_token_ids, request.sampling
        room = max_len - len(prompt)
        tokens = np.zeros(max_len, np.int32)
        tokens[: len(prompt)] = prompt
        eos = () if sampling.ignore_eos else self.model_config.eos_token_ids
        return Sequence(
            request=request,
            sample=sample,
            seed=seed,
            sampling=sampling,
            prompt_len=len(prompt),
            max_len=max_len,
            stop_tokens=frozenset((*eos, *(sampling.stop_token_ids or ()))),
            tokens=tokens,
            length=len(prompt),
            logprobs=np.zeros(room, np.float32),
            sampled_logprobs=np.zeros(room, np.float32),
            kept_mass=np.zeros(room, np.float32),
            weight_versions=np.zeros(room, np.int32),
        )

    def scoring_request(
        self, prompt: Prompt, completion: ArrayLike, *, request_id: Hashable, index: int
    ) -> Request:
        """A request that samples nothing, but finds the log-probabilities of `completion` behind `prompt`."""
        ids = self.token_ids(prompt, f"prompts[{index}]")
        wanted = self.check_ids(completion, f"completions[{index}]", may_be_empty=True)
        length = len(ids) + len(wanted)
        limit = min(self.max_seq_len, self.cache_tokens)
        if length > limit:
            raise PromptError(
                f"prompts[{index}] and its completion have {length} tokens, at most {limit} fit"
            )
        sampling = SamplingParams(max_tokens=max(1, len(wanted)), seed=0)
        request = Request(request_id, ids, sampling, request_id, index)
        sequence = self.sequence(request, 0, 0, length)
        sequence.tokens[len(ids) :] = wanted
        sequence.length, sequence.score_from = length, len(ids)
        if not len(wanted):
            sequence.finish_reason = "length"
        request.sequences = [sequence]
        return request

    def _resumed(self, request: Request, partial: Completion, max_len: int) -> Sequence:
        """A sequence that goes on where `partial` ended, with its seed, log-probabilities and versions."""
        if request.sampling.n != 1:
            raise ConfigError(
                f"continue_from resumes one completion, so n must be 1, got {request.sampling.n}"
            )
        if not isinstance(partial, Completion):
            raise ConfigError(f"continue_from must be a Completion, got {type(partial).__name__}")
        count = len(partial.token_ids)
        room = max_len - len(request.prompt_token_ids)
        if count > room:
            raise ConfigError(
                f"continue_from has {count} tokens, but max_tokens and the maximum length allow {room}; "
                "max_tokens counts the tokens already there"
            )
        output = self.check_ids(partial.token_ids, "continue_from.token_ids", may_be_empty=True)
        sequence = self.sequence(request, 0, partial.seed, max_len)
        sequence.tokens[sequence.length : sequence.length + count] = output
        sequence.length += count
        sequence.logprobs[:count] = partial.logprobs
        sequence.sampled_logprobs[:count] = partial.sampled_logprobs
        sequence.kept_mass[:count] = partial.kept_mass
        sequence.weight_versions[:count] = partial.weight_versions
        sequence.steps, sequence.drafted = partial.draft.steps, partial.draft.drafted
        sequence.accepted = partial.draft.accepted
        if partial.finish_reason == "stop":
            sequence.finish_reason, sequence.stop_token = "stop", partial.stop_token
            sequence.text = partial.text
        return sequence

    def _check_sampling(self, sampling: SamplingParams) -> None:
        if not isinstance(sampling, SamplingParams):
            raise ConfigError(f"sampling must be a SamplingParams, got {type(sampling).__name__}")
        vocabulary = self.model_config.vocab_size
        faults = []
        for name in ("bad_token_ids", "stop_token_ids", "logit_bias"):
            outside = sorted(token for token in getattr(sampling, name) or () if token >= vocabulary)
            if outside:
                faults.append(f"{name} has ids outside the vocabulary of {vocabulary}: {outside[:10]}")
        banned = set(sampling.bad_token_ids)
        if sampling.min_tokens > 0:
            banned |= set(sampling.stop_token_ids or ())
            banned |= set(() if sampling.ignore_eos else self.model_config.eos_token_ids)
        if len(banned) >= vocabulary:
            faults.append("bad_token_ids (and stop tokens before min_tokens) leave no token to sample")
        if sampling.stop_strings and self.tokenizer is None:
            faults.append("stop strings need a tokenizer, and the engine has none; use stop_token_ids")
        if faults:
            raise ConfigError("SamplingParams: " + "; ".join(faults))


def check_hashable(name: str, value: object) -> None:
    """Raises ConfigError if `value` can't be an id."""
    try:
        hash(value)
    except TypeError as error:
        raise ConfigError(f"{name} must be hashable, got {value!r}") from error

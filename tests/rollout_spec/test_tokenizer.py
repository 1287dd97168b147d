"""The tokenizer's own promises; what it reads from files is tested with the loaders."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from rollout_spec.errors import PromptError
from rollout_spec.tokenizer import Tokenizer
from tests.rollout_spec.loading.checkpoints import open_gguf

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return open_gguf(smollm2_path).tokenizer()


def test_arrays_of_ids_are_decoded_and_special_tokens_skipped(tokenizer: Tokenizer) -> None:
    ids = np.array([1, *tokenizer.encode("two words"), 2], dtype=np.int32)
    assert tokenizer.decode(ids) == "two words"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>two words<|im_end|>"
    assert tokenizer.decode([]) == ""


def test_half_a_character_becomes_the_replacement_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\N{SNOWMAN}")
    assert len(ids) > 1
    assert tokenizer.decode(ids[:-1]) == "\N{REPLACEMENT CHARACTER}"


def test_a_pickled_tokenizer_is_the_same(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hello 42"}]
    expected = tokenizer.apply_chat_template(messages)
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.apply_chat_template(messages) == expected
    assert (copy.eos_token_ids, copy.vocab_size) == ((2,), 49_152)


def test_the_assistants_turn_is_opened_only_if_asked(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    closed = tokenizer.render_chat(messages, add_generation_prompt=False)
    assert closed == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n"
    assert tokenizer.render_chat(messages) == closed + "<|im_start|>assistant\n"


def test_a_chat_without_template_names_the_remedy(tokenizer: Tokenizer) -> None:
    bare = Tokenizer(tokenizer.backend)
    with pytest.raises(PromptError, match=r"set `tokenizer\.chat_template`"):
        bare.apply_chat_template([{"role": "user", "content": "u"}])

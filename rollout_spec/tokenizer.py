"""Text to token ids and back, and chat messages to a prompt, without transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers

from rollout_spec.chat_template import Message, render_chat
from rollout_spec.errors import PromptError


class Tokenizer:
    """A Hugging Face `tokenizers.Tokenizer` with the model's chat template and end tokens.

    Loaded with the model by `rollout_spec.loading.load_model`. Picklable.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        """special_tokens: strings by name as templates call them ("bos_token", "eos_token", ...)."""
        self.backend = backend
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included; the model's vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written out in it become their ids.

        add_special_tokens: add what the model's training put around every text (Llama's start token).
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are not valid UTF-8 become U+FFFD. No spaces are tidied up."""
        return self.backend.decode(
            [int(token) for token in token_ids], skip_special_tokens=skip_special_tokens
        )

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text of chat messages by the model's template, which also sees `variables` (tools, ...).

        Raises PromptError if the model has no template or the template refuses the messages.
        """
        if self.chat_template is None:
            raise PromptError(
                "chat messages need a chat template and this model's files hold none: give the prompt as "
                "text or token ids, or set `tokenizer.chat_template`"
            )
        return render_chat(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens, **variables},
        )

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of chat messages and of the words that open the assistant's turn; see `render_chat`."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)  # the template writes the special tokens itself

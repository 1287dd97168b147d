"""Chat templates: Jinja programs, shipped with a model, that turn a list of messages into its prompt format.

They come from strangers, so they run in Jinja's sandbox, with the extras that templates written for
transformers expect (https://huggingface.co/docs/transformers/chat_templating).
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollout_spec.errors import PromptError

Message = Mapping[str, Any]
"""{"role": "user" | "assistant" | "system" | ..., "content": str, ...}"""


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """The prompt text of `messages`; `variables` are visible to the template (bos_token, tools, ...).

    Raises PromptError if the template refuses the messages or is broken.
    """
    try:
        return _compile(template).render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
    except (jinja2.TemplateError, TypeError, KeyError) as error:
        raise PromptError(
            f"the model's chat template refused these {len(messages)} messages: {error} "
            "(expected dicts with a 'role' and a 'content' that the template knows)"
        ) from error


class _GenerationTag(Extension):
    """{% generation %}...{% endgeneration %} marks what the assistant wrote; here it only yields its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, **options: Any) -> str:
    """JSON without Jinja's escaping of HTML characters."""
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, **options)


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.datetime.now().strftime(layout)
    return environment.from_string(template)

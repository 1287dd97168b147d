"""Chat templates run as in transformers, in a sandbox."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from rollout_spec.chat_template import render_chat
from rollout_spec.errors import PromptError

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "h<i>"}]


def test_blocks_leave_no_blank_lines() -> None:
    template = (
        "{% for message in messages %}\n  {% if true %}\n{{ message.role }}\n  {% endif %}\n{% endfor %}\n"
    )
    assert render_chat(template, HELLO * 2) == "user\nuser\n"


def test_variables_and_the_generation_prompt_reach_the_template() -> None:
    template = "{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    assert render_chat(template, HELLO, bos_token="<s>") == "<s>h<i>>"
    assert render_chat(template, HELLO, bos_token="<s>", add_generation_prompt=False) == "<s>h<i>"


def test_json_is_written_without_html_escapes() -> None:
    template = "{{ messages[0] | tojson }}{{ tools | tojson(indent=1) }}"
    rendered = render_chat(template, HELLO, tools=["\N{SNOWMAN}"])
    assert rendered == '{"role": "user", "content": "h<i>"}[\n "\N{SNOWMAN}"\n]'


def test_loop_controls_generation_marks_and_the_date_work() -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') }}"
    )
    assert render_chat(template, HELLO * 3) in {
        f"user{year}" for year in (datetime.datetime.now().year, datetime.datetime.now().year - 1)
    }


def test_a_template_may_refuse_the_messages() -> None:
    template = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"
    with pytest.raises(PromptError, match="refused these 1 messages: system first"):
        render_chat(template, HELLO)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.clear() }}",
        "{% if %}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_attacks_and_broken_templates_are_prompt_errors(template: str) -> None:
    with pytest.raises(PromptError, match="chat template"):
        render_chat(template, HELLO)

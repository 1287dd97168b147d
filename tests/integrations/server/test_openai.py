"""OpenAI's endpoints, asked by its own client."""

from __future__ import annotations

import numpy as np
import openai
import pytest

from tests.integrations.server.servers import Running, expected

SEEDED = {"max_tokens": 10, "temperature": 0.7, "seed": 3}


@pytest.fixture
def client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def test_completions_are_the_engines(client: openai.OpenAI) -> None:
    wanted = expected([11, 12, 13], **SEEDED)
    got = client.completions.create(model="tiny", prompt=[11, 12, 13], logprobs=1, **SEEDED)
    (choice,) = got.choices
    assert choice.text == wanted.text
    assert choice.finish_reason in ("stop", "length")
    assert choice.logprobs is not None
    np.testing.assert_allclose(
        choice.logprobs.token_logprobs, wanted.sampled_logprobs + np.log(wanted.kept_mass), atol=1e-5
    )
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (3, len(wanted.token_ids))


def test_several_prompts_and_samples_are_numbered(client: openai.OpenAI) -> None:
    got = client.completions.create(model="tiny", prompt=["ab", "cd"], n=2, **SEEDED)
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    assert got.choices[0].text == expected("ab", **SEEDED, n=2).text


def test_chats_use_the_models_template(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "x"}]
    wanted = expected(messages, **SEEDED)
    got = client.chat.completions.create(model="tiny", messages=messages, logprobs=True, **SEEDED)  # type: ignore[arg-type]
    assert got.choices[0].message.content == wanted.text
    assert got.choices[0].logprobs is not None
    assert got.choices[0].logprobs.content is not None
    assert len(got.choices[0].logprobs.content) == len(wanted.token_ids)


def test_streams_add_up_to_the_whole_answer(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "x"}]
    pieces: list[str] = []
    usage = None
    for chunk in client.chat.completions.create(
        model="tiny",
        messages=messages,  # type: ignore[arg-type]
        stream=True,
        stream_options={"include_usage": True},
        **SEEDED,
    ):
        usage = chunk.usage or usage
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    wanted = expected(messages, **SEEDED)
    assert "".join(pieces) == wanted.text
    assert usage is not None
    assert usage.completion_tokens == len(wanted.token_ids)
    texts: dict[int, str] = {}
    for one in client.completions.create(model="tiny", prompt=["ab", "cd"], n=2, stream=True, **SEEDED):
        for choice in one.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    whole = client.completions.create(model="tiny", prompt=["ab", "cd"], n=2, **SEEDED)
    assert texts == {choice.index: choice.text for choice in whole.choices}


def test_errors_are_the_clients_own_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="not served here"):
        client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.UnprocessableEntityError):
        client.completions.create(model="tiny", prompt="a", logprobs=5)
    with pytest.raises(openai.UnprocessableEntityError, match="tools"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], tools=[])
    assert [model.id for model in client.models.list()] == ["tiny"]

"""OpenAI's `/v1/completions` and `/v1/chat/completions`, as its client speaks them."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from pydantic import Field
from rollout_spec.integrations.server import results
from rollout_spec.integrations.server.host import EngineHost, Job
from rollout_spec.integrations.server.lifetimes import until_gone
from rollout_spec.integrations.server.settings import ServerSettings
from rollout_spec.integrations.server.sglang import Strict

from rollout_spec import Completion, SamplingParams
from rollout_spec.errors import PromptError


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class Sampled(Strict):
    """What both endpoints take."""

    model: str
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = Field(default=1, ge=1)
    seed: int | None = Field(default=None, ge=0)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    user: str | None = None
    # Beyond OpenAI's, as other servers have them.
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0)
    stop_token_ids: list[int] | None = None

    def params(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            n=self.n,
            seed=self.seed,
        )

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(Sampled):
    """logprobs: only the chosen tokens' are known, so 0 or 1."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=1)
    echo: Literal[False] = False
    best_of: Literal[1] | None = None
    suffix: None = None

    def prompts(self) -> list[Any]:
        given: Any = self.prompt
        is_one = isinstance(given, str) or (given and isinstance(given[0], int))
        return [given] if is_one else given


class Message(Strict):
    role: str
    content: str
    name: str | None = None


class ChatBody(Sampled):
    """top_logprobs: only the chosen tokens' are known."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: Literal[0] | None = None


def router(host: EngineHost, settings: ServerSettings) -> APIRouter:
    """The endpoints, for an app."""
    routes, engine = APIRouter(), host.engine

    def check_model(name: str) -> None:
        if name != settings.model_name:
            raise PromptError(f"the model {name!r} is not served here; {settings.model_name!r} is")

    def text_of(token: int) -> str:
        return engine.tokenizer.decode([token], skip_special_tokens=False) if engine.tokenizer else str(token)

    def reason(completion: Completion) -> str:
        return "length" if completion.finish_reason == "length" else "stop"

    def usage(jobs: list[Job]) -> dict[str, int]:
        requests = [job.request for job in jobs if job.request is not None]
        prompt = sum(len(request.prompt_token_ids) for request in requests)
        new = sum(len(one.token_ids) for request in requests for one in request.completions)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def completion_logprobs(completion: Completion, first: int = 0) -> dict[str, Any]:
        ids, given = completion.token_ids.tolist()[first:], results.logprobs(completion).tolist()[first:]
        texts = [text_of(token) for token in ids]
        offsets, at = [], 0
        for text in texts:
            offsets.append(at)
            at += len(text)
        return {
            "tokens": texts,
            "token_logprobs": given,
            "top_logprobs": [{text: value} for text, value in zip(texts, given, strict=True)],
            "text_offset": offsets,
        }

    def chat_logprobs(completion: Completion) -> dict[str, Any]:
        ids, given = completion.token_ids.tolist(), results.logprobs(completion).tolist()
        return {
            "content": [
                {
                    "token": text_of(token),
                    "logprob": value,
                    "bytes": list(text_of(token).encode()),
                    "top_logprobs": [],
                }
                for token, value in zip(ids, given, strict=True)
            ],
            "refusal": None,
        }

    async def run(http: Request, prompts: list[Any], params: SamplingParams) -> list[Job]:
        jobs: list[Job] = []
        try:
            for prompt in prompts:
                jobs.append(await host.submit(prompt, params))
            await until_gone(http, host, jobs)
        except BaseException:
            for job in jobs:
                host.abandon(job)
            raise
        return jobs

    async def streamed(jobs: list[Job], body: Sampled, kind: str, head: dict[str, Any]) -> AsyncIterator[str]:
        """Pieces of text as they come. All prompts run at once; a choice's index counts prompts, then samples."""
        try:
            for number, job in enumerate(jobs):
                sent = [""] * body.n
                while True:
                    progress = await job.progress.get()
                    request = job.request
                    assert request is not None
                    for sample, tokens in enumerate(progress.tokens):
                        stop_tokens = request.sequences[sample].stop_tokens
                        completion = request.completions[sample] if request.completions else None
                        text = results.visible_text(engine, tokens, stop_tokens)
                        if completion is not None:
                            text = completion.text or ""
                        new = text[len(sent[sample]) :] if text.startswith(sent[sample]) else ""
                        if not new and completion is None:
                            continue
                        sent[sample] += new
                        choice = _piece(kind, number * body.n + sample, new)
                        if completion is not None:
                            choice["finish_reason"] = reason(completion)
                            if kind == "text_completion" and getattr(body, "logprobs", None) is not None:
                                choice["logprobs"] = completion_logprobs(completion)
                            elif kind != "text_completion" and getattr(body, "logprobs", False):
                                choice["logprobs"] = chat_logprobs(completion)
                        yield _event({**head, "choices": [choice]})
                    if progress.done:
                        if request.error is not None:
                            yield _event({"error": {"message": str(request.error), "type": "server_error"}})
                        break
            if body.wants_usage:
                yield _event({**head, "choices": [], "usage": usage(jobs)})
            yield "data: [DONE]\n\n"
        finally:
            for job in jobs:
                host.abandon(job)

    async def submit_streams(prompts: list[Any], params: SamplingParams) -> list[Job]:
        jobs: list[Job] = []
        try:
            for prompt in prompts:
                jobs.append(await host.submit(prompt, params, streams=True))
        except BaseException:
            for job in jobs:
                host.abandon(job)
            raise
        return jobs

    def head(prefix: str, kind: str) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": settings.model_name,
            "system_fingerprint": f"weights-{engine.weight_version}",
        }

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        one = {"id": settings.model_name, "object": "model", "created": 0, "owned_by": "rollout_spec"}
        return {"object": "list", "data": [one]}

    @routes.post("/v1/completions")
    async def completions(body: CompletionBody, http: Request) -> Any:
        check_model(body.model)
        params, prompts = body.params(body.max_tokens), body.prompts()
        start = head("cmpl", "text_completion")
        if body.stream:
            jobs = await submit_streams(prompts, params)
            return StreamingResponse(
                streamed(jobs, body, "text_completion", start), media_type="text/event-stream"
            )
        jobs = await run(http, prompts, params)
        choices = [
            {
                "text": completion.text or "",
                "logprobs": None if body.logprobs is None else completion_logprobs(completion),
                "finish_reason": reason(completion),
            }
            for job in jobs
            if job.request is not None
            for completion in results.completions_of(job.request)
        ]
        return {
            **start,
            "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
            "usage": usage(jobs),
        }

    @routes.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, http: Request) -> Any:
        check_model(body.model)
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        limit = body.max_completion_tokens or body.max_tokens
        params = body.params(engine.max_seq_len if limit is None else limit)
        if body.stream:
            jobs = await submit_streams([messages], params)
            start = head("chatcmpl", "chat.completion.chunk")
            return StreamingResponse(
                streamed(jobs, body, "chat.completion.chunk", start), media_type="text/event-stream"
            )
        jobs = await run(http, [messages], params)
        assert jobs[0].request is not None
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": completion.text or "", "refusal": None},
                "logprobs": chat_logprobs(completion) if body.logprobs else None,
                "finish_reason": reason(completion),
            }
            for index, completion in enumerate(results.completions_of(jobs[0].request))
        ]
        return {**head("chatcmpl", "chat.completion"), "choices": choices, "usage": usage(jobs)}

    return routes


def _piece(kind: str, index: int, text: str) -> dict[str, Any]:
    if kind == "text_completion":
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}
    return {
        "index": index,
        "delta": {"role": "assistant", "content": text},
        "logprobs": None,
        "finish_reason": None,
    }


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"

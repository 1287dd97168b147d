"""The endpoints of SGLang that RL frameworks use."""

from __future__ import annotations

import base64
import json
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator
from rollout_spec.integrations.server import results
from rollout_spec.integrations.server.host import EngineHost, Job
from rollout_spec.integrations.server.lifetimes import until_gone
from rollout_spec.integrations.server.settings import ServerSettings

from rollout_spec import Completion, SamplingParams
from rollout_spec.errors import PromptError, RolloutError, WeightUpdateError
from rollout_spec.loading import safetensors_file

TokenId = int
Mode = Literal["drain", "interrupt", "inflight", "inflight_keep"]


class Strict(BaseModel):
    """Fields that nobody reads are refused, so that none is ignored in silence."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class SglangSampling(Strict):
    """SGLang's names for `SamplingParams`."""

    max_new_tokens: int = Field(default=128, ge=1)
    min_new_tokens: int = Field(default=0, ge=0)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    n: int = Field(default=1, ge=1)
    sampling_seed: int | None = Field(default=None, ge=0)
    logit_bias: dict[int, float] | None = None
    skip_special_tokens: Literal[True] = True
    spaces_between_special_tokens: Literal[True] = True
    no_stop_trim: bool = True

    def params(self) -> SamplingParams:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            max_tokens=self.max_new_tokens,
            min_tokens=self.min_new_tokens,
            stop_token_ids=None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            stop=stop,
            ignore_eos=self.ignore_eos,
            n=self.n,
            seed=self.sampling_seed,
        )


class GenerateBody(Strict):
    """One prompt or several, as text or as token ids."""

    text: str | list[str] | None = None
    input_ids: list[TokenId] | list[list[TokenId]] | None = None
    sampling_params: SglangSampling | list[SglangSampling] = Field(default_factory=SglangSampling)
    rid: str | list[str] | None = None
    return_logprob: bool = False
    stream: bool = False
    log_metrics: bool = True

    @model_validator(mode="after")
    def _one_form(self) -> GenerateBody:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("expected either text or input_ids")
        count = len(self.prompts())
        if count == 0:
            raise ValueError("expected at least one prompt")
        for name in ("sampling_params", "rid"):
            values = getattr(self, name)
            if isinstance(values, list) and len(values) != count:
                raise ValueError(f"{name} must have one entry a prompt: {count} prompts, got {len(values)}")
        if isinstance(self.rid, str) and count > 1:
            raise ValueError("several prompts need a list of rids")
        if self.stream and self.is_batch:
            raise ValueError("only one prompt is streamed at a time")
        return self

    @property
    def is_batch(self) -> bool:
        given = self.text if self.text is not None else self.input_ids
        return isinstance(given, list) and not (given and isinstance(given[0], int))

    def prompts(self) -> list[Any]:
        given: Any = self.text if self.text is not None else self.input_ids
        return given if self.is_batch else [given]

    def sampling(self, index: int) -> SamplingParams:
        params = self.sampling_params
        return (params[index] if isinstance(params, list) else params).params()

    def request_id(self, index: int) -> str | None:
        return self.rid[index] if isinstance(self.rid, list) else self.rid


class FromDisk(Strict):
    model_path: str
    weight_version: int | None = None
    mode: Mode = "drain"
    abort_all_requests: bool = False
    load_format: Literal["auto", "safetensors"] | None = None
    flush_cache: bool = True


class FromTensors(Strict):
    """serialized_named_tensors: safetensors files as base64. Nothing is ever unpickled."""

    serialized_named_tensors: list[str] = Field(min_length=1)
    weight_version: int | None = None
    mode: Mode = "drain"
    abort_all_requests: bool = False
    load_format: Literal["safetensors"] | None = None
    flush_cache: bool = True


class Abort(Strict):
    rid: str | None = None
    abort_all: bool = False


def router(host: EngineHost, settings: ServerSettings) -> APIRouter:
    """The endpoints, for an app."""
    routes, engine = APIRouter(), host.engine

    def described(job: Job, completion: Completion, body: GenerateBody, began: float) -> dict[str, Any]:
        request = job.request
        assert request is not None
        meta: dict[str, Any] = {
            "id": str(job.request_id),
            "finish_reason": results.finish_reason(completion),
            "prompt_tokens": len(request.prompt_token_ids),
            "completion_tokens": len(completion.token_ids),
            "weight_version": str(engine.weight_version),
            "weight_versions": completion.weight_versions.tolist(),
            "seed": completion.seed,
            "spec_accept_length": 1.0
            if not completion.draft.steps
            else len(completion.token_ids) / completion.draft.steps,
            "e2e_latency": time.perf_counter() - began,
        }
        if body.return_logprob:
            given = results.logprobs(completion).tolist()
            ids = completion.token_ids.tolist()
            meta["output_token_logprobs"] = [[lp, token, None] for lp, token in zip(given, ids, strict=True)]
            meta["model_logprobs"] = completion.logprobs.tolist()
        return {"text": completion.text or "", "output_ids": completion.token_ids.tolist(), "meta_info": meta}

    @routes.post("/generate")
    async def generate(body: GenerateBody, http: Request) -> Any:
        """Completions of one prompt (an object, or a list if n > 1) or of several (a list)."""
        began = time.perf_counter()
        jobs: list[Job] = []
        try:
            for index, prompt in enumerate(body.prompts()):
                jobs.append(
                    await host.submit(
                        prompt, body.sampling(index), request_id=body.request_id(index), streams=body.stream
                    )
                )
        except BaseException:
            for job in jobs:
                host.abandon(job)
            raise
        if body.stream:
            return StreamingResponse(_events(host, jobs[0], body, began), media_type="text/event-stream")
        found = [
            described(job, completion, body, began)
            for job, request in zip(jobs, await until_gone(http, host, jobs), strict=True)
            for completion in results.completions_of(request)
        ]
        return found if body.is_batch or len(found) > 1 else found[0]

    async def _events(host: EngineHost, job: Job, body: GenerateBody, began: float) -> AsyncIterator[str]:
        """All that there is so far, after each step that brought tokens."""
        try:
            while True:
                progress = await job.progress.get()
                request = job.request
                assert request is not None
                if progress.done:
                    break
                for number, tokens in enumerate(progress.tokens):
                    text = results.visible_text(engine, tokens, request.sequences[number].stop_tokens)
                    meta = {
                        "id": str(job.request_id),
                        "finish_reason": None,
                        "completion_tokens": len(tokens),
                    }
                    yield _event({"text": text, "output_ids": tokens, "index": number, "meta_info": meta})
            if request.error is not None:
                yield _event({"error": {"message": str(request.error)}})
            for number, completion in enumerate(request.completions):
                yield _event({**described(job, completion, body, began), "index": number})
            yield "data: [DONE]\n\n"
        finally:
            host.abandon(job)

    async def update(weights: Any, body: FromDisk | FromTensors) -> Any:
        mode = "interrupt" if body.abort_all_requests else body.mode
        try:
            report = await host.ask(
                lambda: engine.update_weights(weights, version=body.weight_version, mode=mode)
            )
        except (WeightUpdateError, OSError) as error:
            return JSONResponse({"success": False, "message": str(error)}, 400)
        return {
            "success": True,
            "message": f"weights of version {report.version} serve",
            "weight_version": str(report.version),
            "num_paused_requests": 0,
        }

    @routes.post("/update_weights_from_disk")
    async def update_weights_from_disk(body: FromDisk) -> Any:
        """Loads a folder of safetensors, or an Orbax checkpoint, from below a folder given at start."""
        return await update(settings.weights_path(body.model_path), body)

    @routes.post("/update_weights_from_tensor")
    async def update_weights_from_tensor(body: FromTensors) -> Any:
        """Takes weights by their Hugging Face names."""
        weights: dict[str, Any] = {}
        for number, text in enumerate(body.serialized_named_tensors):
            try:
                weights |= _tensors(base64.b64decode(text, validate=True))
            except Exception as error:  # of several libraries' kinds
                raise WeightUpdateError(
                    f"serialized_named_tensors[{number}] is no safetensors file in base64: {error}"
                ) from error
        return await update(weights, body)

    @routes.get("/flush_cache")
    @routes.post("/flush_cache")
    async def flush_cache() -> dict[str, Any]:
        """Forgets the prefix cache."""
        await host.ask(engine.clear_prefix_cache)
        return {"success": True}

    @routes.post("/pause_generation")
    async def pause_generation() -> dict[str, Any]:
        """Nothing is computed until /continue_generation; requests keep their place."""
        await host.ask(host.pause)
        return {"success": True}

    @routes.post("/continue_generation")
    async def continue_generation() -> dict[str, Any]:
        await host.ask(host.resume)
        return {"success": True}

    @routes.post("/abort_request")
    async def abort_request(body: Abort) -> dict[str, Any]:
        """Ends a request, or all; its caller gets what there is."""
        if body.rid is None and not body.abort_all:
            raise PromptError("expected a rid, or abort_all")
        count = await host.ask(lambda: host.abort(None if body.abort_all else [body.rid]))
        return {"success": True, "aborted": count}

    @routes.get("/get_model_info")
    @routes.post("/get_model_info")
    async def get_model_info() -> dict[str, Any]:
        return {
            "model_path": settings.model_path,
            "tokenizer_path": settings.model_path,
            "is_generation": True,
            "weight_version": str(engine.weight_version),
            "max_total_tokens": engine.max_seq_len,
            "vocab_size": engine.model_config.vocab_size,
        }

    @routes.get("/get_weight_version")
    @routes.post("/get_weight_version")
    async def get_weight_version() -> dict[str, Any]:
        return {"weight_version": str(engine.weight_version)}

    @routes.get("/health_generate")
    async def health_generate(http: Request) -> Any:
        """Generates a token."""
        job = await host.submit([0], SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0))
        (request,) = await until_gone(http, host, [job])
        if request.error is not None:
            raise RolloutError(str(request.error))
        return {"status": "ok"}

    return routes


def _tensors(content: bytes) -> dict[str, Any]:
    """The tensors of a safetensors file."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "weights.safetensors"
        path.write_bytes(content)
        return {name: np.array(tensor.read()) for name, tensor in safetensors_file.tensors(path).items()}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"

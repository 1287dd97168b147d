"""The FastAPI app around an engine: endpoints, limits, the key, errors, metrics, and the status page."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from rollout_spec.integrations.server import openai, sglang
from rollout_spec.integrations.server.host import EngineHost, QueueFullError
from rollout_spec.integrations.server.lifetimes import ClientGoneError
from rollout_spec.integrations.server.metrics import exposition
from rollout_spec.integrations.server.settings import ServerSettings
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_spec.errors import (
    CapacityError,
    ConfigError,
    EngineStateError,
    PromptError,
    RolloutError,
    UnknownRequestError,
    WeightUpdateError,
)

_STATUS_OF: tuple[tuple[type[Exception], int, str], ...] = (
    (QueueFullError, 503, "overloaded"),
    (UnknownRequestError, 404, "not_found"),
    (WeightUpdateError, 400, "invalid_request_error"),
    (PromptError, 400, "invalid_request_error"),
    (ConfigError, 400, "invalid_request_error"),
    (CapacityError, 400, "invalid_request_error"),
    (EngineStateError, 503, "unavailable"),
    (RolloutError, 500, "server_error"),
)
_CARRY_WEIGHTS = ("/update_weights_from_tensor",)
_NEED_NO_KEY = ("/health", "/")  # the page itself holds nothing; what it asks for needs the key
_PAGE = Path(__file__).parent / "status.html"


def create_app(host: EngineHost, settings: ServerSettings) -> FastAPI:
    """The app. It closes the host, and so the engine, when it ends."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        host.close()

    app = FastAPI(title="rollout_spec", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.include_router(sglang.router(host, settings))
    app.include_router(openai.router(host, settings))

    @app.exception_handler(RolloutError)
    async def refused(http: Request, error: RolloutError) -> JSONResponse:
        status, kind = next((code, name) for type_, code, name in _STATUS_OF if isinstance(error, type_))
        headers = {"Retry-After": "1"} if status == 503 else None
        return _error(status, str(error), kind, headers)

    @app.exception_handler(ClientGoneError)
    async def gone(http: Request, error: ClientGoneError) -> Response:
        return Response(status_code=499)

    @app.get("/health")
    async def health() -> Any:
        """Whether the engine's thread is alive."""
        if host.error is not None:
            return _error(503, f"the engine's thread ended: {host.error!r}", "unavailable")
        return {"status": "ok"}

    @app.get("/status")
    async def status() -> dict[str, Any]:
        """What the status page shows."""
        return await host.ask(lambda: _status(host, settings))

    @app.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        content, media_type = await host.ask(lambda: exposition(host))
        return Response(content, media_type=media_type)

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"))

    @app.middleware("http")
    async def key(http: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        if settings.api_key is None or http.url.path in _NEED_NO_KEY:
            return await go_on(http)
        given = http.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), settings.api_key.encode()):
            return _error(401, "expected the server's key: Authorization: Bearer KEY", "invalid_api_key")
        return await go_on(http)

    app.add_middleware(BodyLimit, settings=settings)
    return app


class BodyLimit:
    """Answers 413 to a body that says it is too large, and to one that turns out to be."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app = app
        self.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        carries_weights = scope["path"] in _CARRY_WEIGHTS
        limit = self.settings.max_weights_bytes if carries_weights else self.settings.max_body_bytes
        said = dict(scope["headers"]).get(b"content-length", b"0")
        refusal = _error(413, f"the body may have at most {limit:,} bytes", "too_large")
        if said.isdigit() and int(said) > limit:
            await refusal(scope, receive, send)
            return
        taken = 0
        answered = False

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > limit:
                raise _TooLargeError
            return message

        async def noted(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            await self.app(scope, counted, noted)
        except _TooLargeError:
            if not answered:
                await refusal(scope, receive, send)


class _TooLargeError(Exception):
    pass


def _error(status: int, message: str, kind: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """In OpenAI's shape, which its client reads."""
    content = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return JSONResponse(content, status, headers)


def _status(host: EngineHost, settings: ServerSettings) -> dict[str, Any]:
    stats = host.engine.stats()
    depths = zip(stats.drafted_by_depth, stats.accepted_by_depth, strict=True)
    return {
        "model": settings.model_name,
        "weight_version": host.engine.weight_version,
        "paused": host.paused,
        "running": stats.running,
        "waiting": stats.waiting,
        "tokens_per_s": host.tokens_per_s(),
        "generated_tokens": stats.generated_tokens,
        "requests_finished": stats.requests_finished,
        "requests_failed": stats.requests_failed,
        "acceptance_length": stats.acceptance_length,
        "acceptance_by_depth": [accepted / drafted if drafted else 0.0 for drafted, accepted in depths],
        "estimated_speedup": stats.estimated_speedup,
        "pages_held": stats.pages_held,
        "pages": stats.pages,
    }

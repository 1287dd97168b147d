"""Requests live as long as somebody waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import Request as HttpRequest
from rollout_spec.integrations.server.host import EngineHost, Job

from rollout_spec.requests import Request


class ClientGoneError(Exception):
    """The client closed the connection."""


async def until_gone(http: HttpRequest, host: EngineHost, jobs: Sequence[Job]) -> list[Request]:
    """The jobs' requests, ended. Where the client goes away before, they are aborted and ClientGoneError is raised."""
    waiting: asyncio.Future[list[Request]] = asyncio.gather(*(host.finished(job) for job in jobs))
    gone: asyncio.Future[Any] = asyncio.ensure_future(_disconnect(http))
    try:
        both: set[asyncio.Future[Any]] = {waiting, gone}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        raise ClientGoneError
    finally:
        gone.cancel()
        waiting.cancel()


async def _disconnect(http: HttpRequest) -> None:
    while not await http.is_disconnected():
        await asyncio.sleep(0.1)

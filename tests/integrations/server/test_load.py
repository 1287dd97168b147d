"""Many clients, clients that go away, updates under load, limits and the key: nothing is lost, no version mixed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from rollout_spec.integrations.server import ServerSettings

from rollout_spec.errors import ConfigError
from tests.integrations.server import servers
from tests.integrations.server.servers import Running, expected, serve, wait_until_idle

SAMPLING = {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True}


def together(url: str, coroutine: Any) -> Any:
    async def run() -> Any:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
            return await coroutine(client)

    return asyncio.run(run())


def body(number: int, **more: Any) -> dict[str, Any]:
    return {
        "input_ids": [11 + number % 7, 12],
        "sampling_params": {**SAMPLING, "sampling_seed": number, **more},
    }


def test_200_clients_at_once_get_what_one_engine_says(running: Running) -> None:
    async def all_of_them(client: httpx.AsyncClient) -> list[httpx.Response]:
        return await asyncio.gather(*(client.post("/generate", json=body(i)) for i in range(200)))

    answers = together(running.url, all_of_them)
    assert {answer.status_code for answer in answers} == {200}
    for number in range(0, 200, 9):
        wanted = expected([11 + number % 7, 12], max_tokens=8, seed=number, ignore_eos=True)
        assert answers[number].json()["output_ids"] == wanted.token_ids.tolist()


def test_clients_that_go_away_are_aborted_and_the_others_are_served(running: Running) -> None:
    before = wait_until_idle(running)

    async def storm(client: httpx.AsyncClient) -> list[Any]:
        async def leave(number: int) -> None:
            long = body(number, max_new_tokens=80) | {"stream": number % 2 == 0}
            with pytest.raises((asyncio.TimeoutError, httpx.HTTPError)):
                await asyncio.wait_for(client.post("/generate", json=long), 0.02 * (1 + number % 4))

        stay = [client.post("/generate", json=body(i)) for i in range(20)]
        found = await asyncio.gather(*stay, *(leave(i) for i in range(60)))
        return found[:20]

    answers = together(running.url, storm)
    for number, answer in enumerate(answers):
        wanted = expected([11 + number % 7, 12], max_tokens=8, seed=number, ignore_eos=True)
        assert answer.json()["output_ids"] == wanted.token_ids.tolist()
    after = wait_until_idle(running)
    assert after["requests_failed"] == before["requests_failed"]
    assert after["pages_held"] == 0


@pytest.mark.parametrize("mode", ["drain", "interrupt", "inflight", "inflight_keep"])
def test_updates_under_load_lose_nothing_and_mix_no_versions(
    running: Running, weights_dir: Path, mode: str
) -> None:
    start = int(running.client.get("/get_weight_version").json()["weight_version"])

    async def load(client: httpx.AsyncClient) -> tuple[list[httpx.Response], list[httpx.Response]]:
        async def updates() -> list[httpx.Response]:
            done = []
            for turn, name in enumerate(("other", "first")):
                await asyncio.sleep(0.1)
                told = {
                    "model_path": str(weights_dir / name),
                    "weight_version": start + 1 + turn,
                    "mode": mode,
                }
                done.append(await client.post("/update_weights_from_disk", json=told))
            return done

        asked = [client.post("/generate", json=body(i, max_new_tokens=30)) for i in range(40)]
        *answers, updated = await asyncio.gather(*asked, updates())
        return answers, updated

    answers, updated = together(running.url, load)
    assert all(answer.json()["success"] for answer in updated)
    assert {answer.status_code for answer in answers} == {200}
    for answer in answers:
        meta = answer.json()["meta_info"]
        versions = meta["weight_versions"]
        assert versions == sorted(versions)
        assert set(versions) <= {start, start + 1, start + 2}
        if mode in ("drain", "interrupt"):
            assert len(set(versions)) <= 1
        assert meta["finish_reason"]["type"] == "length" or mode == "interrupt"
        assert len(versions) == meta["completion_tokens"]
    running.post("/flush_cache")
    wanted = expected([11, 12], max_tokens=8, seed=0, ignore_eos=True)
    assert running.post("/generate", **body(0)).json()["output_ids"] == wanted.token_ids.tolist()


def test_limits_and_the_key() -> None:
    with serve(api_key="secret", max_waiting=2, max_body_bytes=2048) as running:
        assert running.client.get("/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret2"}):
            assert running.client.get("/status", headers=headers).status_code == 401
        running.client.headers["Authorization"] = "Bearer secret"
        assert running.client.get("/status").status_code == 200
        assert running.post("/generate", input_ids=[1] * 2000).status_code == 413

        def endless() -> Any:
            for _ in range(100):
                yield b"[" * 100

        assert running.client.post("/generate", content=endless()).status_code in (413, 400)
        running.post("/pause_generation")

        async def crowd(client: httpx.AsyncClient) -> list[int]:
            client.headers["Authorization"] = "Bearer secret"
            asked = [asyncio.ensure_future(client.post("/generate", json=body(i))) for i in range(12)]
            while (await client.get("/status")).json()["waiting"] < 2:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.3)
            await client.post("/continue_generation", json={})
            return [answer.status_code for answer in await asyncio.gather(*asked)]

        codes = together(running.url, crowd)
        assert set(codes) == {200, 503}
        assert codes.count(200) >= 2


def test_settings_that_are_unsafe_or_wrong_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="open to others"):
        ServerSettings(model_name="m", host="0.0.0.0")
    assert ServerSettings(model_name="m", host="0.0.0.0", api_key="k").api_key == "k"
    with pytest.raises(ConfigError, match="is no folder"):
        ServerSettings(model_name="m", weights_folders=(tmp_path / "none",))


def test_the_host_says_so_when_it_is_closed() -> None:
    with serve() as running:
        host = running.host
    assert np.isfinite(host.engine.stats().generated_tokens)
    with pytest.raises(Exception, match="has ended"):
        host.call(lambda: None).result()


def test_the_engine_serves_on_after_errors(running: Running) -> None:
    for bad in ({"input_ids": [10**8]}, {"text": 5}, {"sampling_params": 3}):
        assert running.post("/generate", **bad).status_code in (400, 422)
    wanted = expected([11, 12], max_tokens=8, seed=0, ignore_eos=True)
    assert running.post("/generate", **body(0)).json()["output_ids"] == wanted.token_ids.tolist()
    assert servers.wait_until_idle(running)["pages_held"] == 0

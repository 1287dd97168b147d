"""A server of a tiny model on loopback, in this process, and what one engine says of the same requests."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn
from rollout_spec.integrations.server import EngineHost, ServerSettings, create_app

from rollout_spec import DraftConfig, EngineConfig, RolloutEngine, SamplingParams
from rollout_spec.models import Params
from tests.helpers.tiny_models import TinyModel, random_params, tiny_model
from tests.helpers.tiny_tokenizer import tiny_tokenizer

CONFIG = EngineConfig(
    max_seqs=4, page_size=4, max_batch_tokens=24, max_seq_len=96, draft=DraftConfig(max_nodes=3, gate=False)
)
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"


def model() -> TinyModel:
    return tiny_model("llama-tied")


def other_params() -> Params:
    return random_params(model().config, 9)


def new_engine() -> RolloutEngine:
    tokenizer = tiny_tokenizer(model().config.vocab_size, model().config.eos_token_ids)
    tokenizer.chat_template = CHAT
    return RolloutEngine(model().config, model().params, tokenizer=tokenizer, config=CONFIG)


@dataclass(frozen=True)
class Running:
    """A server that listens."""

    url: str
    host: EngineHost
    client: httpx.Client

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)


@contextlib.contextmanager
def serve(**settings: Any) -> Iterator[Running]:
    host = EngineHost(new_engine(), max_waiting=settings.get("max_waiting", 1024))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(256)
        port = listening.getsockname()[1]
        app = create_app(host, ServerSettings(model_name="tiny", port=port, **settings))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        url = f"http://127.0.0.1:{port}"
        try:
            with httpx.Client(base_url=url, timeout=120) as client:
                yield Running(url, host, client)
        finally:
            server.should_exit = True
            thread.join()


def expected(prompt: Any, **sampling: Any) -> Any:
    """What an engine without a server generates: one completion."""
    return _engine().generate([prompt], SamplingParams(**sampling))[0].completions[0]


_made: list[RolloutEngine] = []


def _engine() -> RolloutEngine:
    if not _made:
        _made.append(new_engine())
    return _made[0]


def wait_until_idle(running: Running, seconds: float = 60.0) -> dict[str, Any]:
    until = time.monotonic() + seconds
    while True:
        status = running.client.get("/status").json()
        if status["running"] == status["waiting"] == 0:
            return status
        assert time.monotonic() < until, status
        time.sleep(0.02)


def safetensors_folder(folder: Path, params: Params) -> Path:
    from safetensors.numpy import save_file

    from rollout_spec.weights import to_hf

    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.ascontiguousarray(array) for name, array in to_hf(model().config, params)}
    save_file(arrays, folder / "model.safetensors")
    return folder

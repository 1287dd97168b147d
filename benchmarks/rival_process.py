"""A rival in a process of its own, so that its threads and packages never meet ours.

The process says on the first line of its standard output what it is; then it answers a request of JSON on each line of
its standard input by a line of JSON: seconds of the call, prompt included, and the tokens of each completion.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Run:
    """One timed call: its seconds, prompt included, and the tokens it generated for each prompt."""

    seconds: float
    tokens: list[list[int]]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


class RivalProcess:
    """A worker program under some Python, serving a Hugging Face folder; use it as a context manager.

    Raises RuntimeError when the process ends before its time; its own words are on standard error.
    """

    def __init__(
        self, name: str, worker: Path, folder: Path, *options: str, python: str | Path = sys.executable
    ) -> None:
        self.name = name
        # -P: modules beside the worker don't stand for packages of their name (transformers looks for "kernels").
        command = [str(python), "-P", str(worker), str(folder), *options]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.described: dict[str, Any] = {}
        """Versions and settings in the worker's own words, once `wait` has returned."""

    def wait(self) -> None:
        """Returns when the model is loaded."""
        self.described = self._read()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        stop_at_eos: bool,
        temperature: float = 0.0,
        seed: int = 0,
        prompt_lookup: int | None = None,
    ) -> Run:
        """Completions of token id prompts in one batch, timed inside the process."""
        if not self.described:
            self.wait()
        assert self._process.stdin is not None
        request = {
            "prompts": [list(map(int, prompt)) for prompt in prompts],
            "max_tokens": max_tokens,
            "stop_at_eos": stop_at_eos,
            "temperature": temperature,
            "seed": seed,
            "prompt_lookup": prompt_lookup,
        }
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
        except BrokenPipeError as error:
            raise self._ended() from error
        return Run(**self._read())

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise self._ended()
        return json.loads(answer)

    def _ended(self) -> RuntimeError:
        status = self._process.wait()
        return RuntimeError(
            f"the process of {self.name} ended with status {status}; its own message stands above"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()


def transformers_process(folder: Path, threads: int, *, python: str | Path = sys.executable) -> RivalProcess:
    """transformers' `generate` for that Hugging Face folder."""
    return RivalProcess(
        "transformers", FOLDER / "transformers_worker.py", folder, "--threads", str(threads), python=python
    )

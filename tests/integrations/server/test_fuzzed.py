"""Every endpoint, fuzzed from the schema that the server publishes: refused or answered, and it serves on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from rollout_spec.integrations.server import ServerSettings, create_app
from schemathesis.checks import not_a_server_error

from tests.integrations.server.servers import Running, expected, wait_until_idle

NOT_FUZZED = ("/pause_generation",)
"""Everything behind it would wait for ever."""

_WITHOUT_ENGINE: Any = SimpleNamespace(engine=None)
SCHEMA = schemathesis.openapi.from_dict(
    create_app(_WITHOUT_ENGINE, ServerSettings(model_name="tiny")).openapi()
)
OPERATIONS = [(path, method) for path, methods in SCHEMA.raw_schema["paths"].items() for method in methods]


@pytest.mark.parametrize(("path", "method"), [one for one in OPERATIONS if one[0] not in NOT_FUZZED])
def test_no_endpoint_breaks(running: Running, path: str, method: str) -> None:
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(SCHEMA[path][method].as_strategy())
    def ask(case: Any) -> None:
        response = case.call(base_url=running.url, timeout=60)
        if response.status_code != 503:  # a queue that is full says so
            case.validate_response(response, checks=[not_a_server_error])

    ask()


def test_it_serves_on(running: Running) -> None:
    assert len(OPERATIONS) > 18
    assert wait_until_idle(running)["pages_held"] == 0
    sampling = {"max_new_tokens": 6, "sampling_seed": 1, "ignore_eos": True}
    got = running.post("/generate", input_ids=[11, 12], sampling_params=sampling).json()
    wanted = expected([11, 12], max_tokens=6, seed=1, ignore_eos=True)
    assert got["output_ids"] == wanted.token_ids.tolist()

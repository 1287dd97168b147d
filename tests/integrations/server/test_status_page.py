"""The status page in a real browser: what it shows is what the engine says."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from tests.integrations.server.servers import Running, serve, wait_until_idle

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")


def seen(url: str, tmp_path: object) -> str:
    """The page's document after its scripts ran for a while."""
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    ran = subprocess.run(
        [*command, "--virtual-time-budget=4000", "--dump-dom", url],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return ran.stdout


@needs_browser
def test_it_shows_what_the_engine_says(running: Running, tmp_path: object) -> None:
    sampling = {"max_new_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    for _ in range(3):  # what repeats is drafted
        running.post("/generate", input_ids=[11, 12, 13], sampling_params=sampling)
    status = wait_until_idle(running)
    assert status["acceptance_by_depth"]
    page = seen(running.url, tmp_path)
    for name in ("weight_version", "requests_finished", "running"):
        assert f'<b id="{name}">{status[name]}</b>' in page
    assert f">{status['model']}<" in page
    shown = re.findall(r"width: ([0-9.]+)px", page)
    assert len(shown) == len(status["acceptance_by_depth"])
    assert 'role="status"></div>' in page, "no problem is shown"


@needs_browser
def test_it_says_what_it_lacks(tmp_path: object) -> None:
    with serve(api_key="secret") as running:
        assert "needs the key" in seen(running.url, tmp_path)
        page = seen(f"{running.url}/#key=secret", tmp_path)
        assert '<b id="weight_version">0</b>' in page

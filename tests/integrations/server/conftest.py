from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.server import servers


@pytest.fixture(scope="session")
def weights_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    servers.safetensors_folder(folder / "first", servers.model().params)
    servers.safetensors_folder(folder / "other", servers.other_params())
    return folder


@pytest.fixture(scope="session")
def running(weights_dir: Path) -> Iterator[servers.Running]:
    with servers.serve(weights_folders=(weights_dir,)) as made:
        yield made

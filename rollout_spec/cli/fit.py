"""Say whether a model fits a TPU slice, and how fast its steps could be, without a TPU.

The engine's whole step is compiled for the slice by the real TPU compiler (libtpu; no weights are needed, config.json
is enough). Memory is what the compiler says; times are roofs, which no step can beat.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ModelLoadError

if TYPE_CHECKING:
    from ..fitting import Fit
    from ..models import ModelConfig

HELP = "say whether a model fits a TPU slice, compiled for it without a TPU"
_GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, required=True, metavar="CONFIG", help="a config.json, or its folder"
    )
    parser.add_argument(
        "--chip", required=True, metavar="SLICE", help="a slice of TPUs, as in v5e-8, v5p-8, v6e-8"
    )
    parser.add_argument("--max-seqs", type=int, default=64, metavar="N", help="completions at once (64)")
    parser.add_argument("--max-len", type=int, default=4096, metavar="N", help="tokens of a sequence (4096)")
    parser.add_argument(
        "--draft-nodes", type=int, default=7, metavar="N", help="a request in a tree step (7)"
    )


def run(parsed: argparse.Namespace) -> None:
    from ..chips import parse_slice
    from ..fitting import fit

    model, where = read_model(parsed.model), parse_slice(parsed.chip)
    print(
        report(
            fit(
                model,
                where,
                max_seqs=parsed.max_seqs,
                max_len=parsed.max_len,
                draft_nodes=parsed.draft_nodes,
            )
        )
    )


def read_model(path: Path) -> ModelConfig:
    """The configuration in a config.json, or in a folder's."""
    from ..loading.huggingface import read_config
    from ..loading.huggingface_config import parse_config

    if path.is_dir():
        return read_config(path)
    try:
        return parse_config(json.loads(path.read_text(encoding="utf-8")))
    except json.JSONDecodeError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error


def report(found: Fit) -> str:
    """What `fit` found, in words."""
    hbm = found.slice.chip.hbm_bytes
    largest = max(found.steps, key=lambda step: step.peak_bytes)
    axes = ", ".join(f"{name} {size}" for name, size in found.mesh_shape.items())
    lines = [
        f"{found.slice.name}: {'fits' if found.fits else 'does not fit'}",
        f"mesh: {axes} ({found.slice.num_chips} chips of {hbm / _GIB:.0f} GiB)",
        f"HBM of a chip, in GiB: weights {found.weight_bytes / _GIB:.2f}, "
        f"cache {found.pages * found.page_bytes / _GIB:.2f}, "
        f"temporaries {largest.temporary_bytes / _GIB:.2f}, "
        f"all with outputs and code {largest.peak_bytes / _GIB:.2f}",
        f"pages of {found.page_size} tokens: {found.pages_available:,} available, {found.pages_needed:,} needed "
        f"for all sequences at full length ({found.pages:,} compiled)",
    ]
    for step in found.steps:
        collectives = ", ".join(f"{count} {kind}" for kind, count in sorted(step.collectives.items()))
        lines.append(
            f"{step.name} step of {step.shape.tokens} tokens: at least {1000 * step.roofline_s:.2f} ms (roofline); "
            f"collectives: {collectives or 'none'} ({step.collective_bytes / 2**20:.0f} MiB); "
            f"Pallas kernels: {step.kernels}; compiled in {step.compile_s:.0f} s"
        )
    return "\n".join(lines)

"""Project what speculation would gain on a TPU slice, from recorded rollouts, without a TPU.

The rollouts are replayed through the engine's own scheduler, drafter and draft budget. A step takes its roofline on the
slice (see `rollout-spec fit`), without collectives; the host's part of it is measured on this machine. So every figure
is projected, and none measured.

    rollout-spec project --model config.json --chip v5e-8 --history rollouts.jsonl

A history is JSON lines of {"epoch": 0, "prompt_token_ids": [...], "completions": [{"token_ids": [...]}, ...]}, or an
.npz as benchmarks/data/README.md describes. Earlier epochs are learnt; the last one is what the figures are of.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from .fit import read_model

if TYPE_CHECKING:
    from ..projection import Projected

HELP = "project tokens/s on a TPU slice, plain and speculative, from recorded rollouts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, required=True, metavar="CONFIG", help="a config.json, or its folder"
    )
    parser.add_argument(
        "--chip", required=True, metavar="SLICE", help="a slice of TPUs, as in v5e-8, v5p-8, v6e-8"
    )
    parser.add_argument("--history", type=Path, required=True, metavar="FILE", help="recorded rollouts")
    parser.add_argument(
        "--slots",
        type=_positive,
        nargs="+",
        default=[1, 4, 16, 64],
        metavar="N",
        help="batch sizes (1 4 16 64)",
    )
    parser.add_argument("--draft-nodes", type=_nodes, default=16, metavar="N", help="most a request (16)")
    parser.add_argument("--json", action="store_true", help="print JSON lines")


def run(parsed: argparse.Namespace) -> None:
    from ..chips import parse_slice
    from ..draft.config import DraftConfig
    from ..fitting import choose_mesh, slice_devices
    from ..projection import project
    from ..recorded import load_workload

    model, where = read_model(parsed.model), parse_slice(parsed.chip)
    workload, draft = load_workload(parsed.history), DraftConfig(max_nodes=parsed.draft_nodes)
    layout = choose_mesh(model, slice_devices(where))
    if not parsed.json:
        print(
            f"projected for {where.name} from {workload.name}: {workload.num_tokens:,} recorded tokens, "
            f"{len(workload.epochs)} epoch(s); rooflines without collectives, the host as on this machine"
        )
    for found in project(layout, where, workload, parsed.slots, draft):
        print(
            json.dumps({"projected": dataclasses.asdict(found)}) if parsed.json else _line(found), flush=True
        )


def _line(found: Projected) -> str:
    plain, fast = found.plain, found.speculative
    return (
        f"projected at {found.slots} slots: {plain.tokens_per_s:,.0f} tokens/s plain, {fast.tokens_per_s:,.0f} "
        f"speculative ({found.speedup:.2f}x; {fast.acceptance_length:.2f} tokens and {fast.nodes_per_step:.1f} draft "
        f"nodes a step); the batch takes {plain.seconds:.2f} s plain, {fast.seconds:.2f} s speculative, of which its "
        f"tail {plain.tail_s:.2f} s and {fast.tail_s:.2f} s, and the host {plain.host_s:.2f} s and {fast.host_s:.2f} s"
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def _nodes(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 63:
        raise argparse.ArgumentTypeError(f"expected 1 to 63, got {number}")
    return number

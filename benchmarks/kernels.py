"""What the TPU compiler makes of the kernels: bundles a block, a whole call, and HBM bytes; no TPU needed.

make test-tpu                              # that everything compiles for all five chips
.venv-tpu/bin/python -m benchmarks.kernels # the tables of docs/kernels.md, and benchmarks/results/kernels.json
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import sys
from pathlib import Path

from benchmarks import kernels_cases
from benchmarks.tpu_compile import TOPOLOGIES, Compiled, compile_case

RESULTS = Path(__file__).parent / "results" / "kernels.json"
BLOCK_TOKENS = 512
AT_MOST = {
    "A": {"v4": 1700, "v5e": 1250, "v5p": 1250, "v6e": 1100, "tpu7x": 1050},
    "B": {"v6e": 8 * 700},
    "C": {"v5e": 700, "v6e": 700},
    "D": {"v6e": 1000},
}
"""Bundles a sequence and block that we set out to need; B's are for 64 tokens."""
CLOCK_HZ = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9, "tpu7x": 2.2e9}
"""Of a core: what the chip's published bf16 rate implies; on v6e and tpu7x with two passes a cycle, which we assume."""
HBM_BYTES_PER_S = {"v4": 6.15e11, "v5e": 8.2e11, "v5p": 1.23e12, "v6e": 1.64e12, "tpu7x": 3.69e12}
"""Of a core: the chip's published bandwidth over its cores."""
TOKENS = {"A": 8, "B": 64, "C": 1, "D": 8}


@dataclasses.dataclass(frozen=True)
class Figures:
    """A measured case on a chip."""

    chip: str
    case: str
    block_bundles: int
    """Everything executed for a sequence and a block of 512 cached tokens, the tree included."""
    at_most: int | None
    call_bundles: int
    """Of a call for 16 sequences with 2,048 cached tokens each."""
    spills: int
    fills: int
    hbm_bytes: int
    least_hbm_bytes: int


def figures(compiled: Compiled) -> Figures:
    schedule = max(compiled.schedules, key=lambda one: one.block_bundles)  # beside copies that XLA wraps
    tokens = TOKENS[compiled.case]
    blocks = -(-(kernels_cases.CACHED_TOKENS + tokens) // BLOCK_TOKENS)
    write_groups = tokens // 16 + 1
    per_sequence = (
        write_groups * schedule.by_depth[1]  # the task's own bundles are counted with each: an upper bound
        + blocks * schedule.block_bundles
        + BLOCK_TOKENS // kernels_cases.PAGE_SIZE * schedule.edge_bundles
    )
    moved, least = kernels_cases.HBM_BYTES[compiled.case]
    return Figures(
        chip=compiled.chip,
        case=compiled.case,
        block_bundles=schedule.block_bundles,
        at_most=AT_MOST[compiled.case].get(compiled.chip),
        call_bundles=schedule.by_depth[0] + kernels_cases.SEQUENCES * per_sequence,
        spills=schedule.spills,
        fills=schedule.fills,
        hbm_bytes=moved,
        least_hbm_bytes=least,
    )


def table(found: list[Figures]) -> str:
    lines = [
        "| case | chip | bundles a block | at most | spills / fills | bundles a call, at most | HBM bytes / least "
        "| bundles, µs | copies, µs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.case} | {one.chip} | {one.block_bundles:,} | {one.at_most or '-'} | {one.spills} / {one.fills} | "
        f"{one.call_bundles:,} | {one.hbm_bytes / one.least_hbm_bytes:.3f} | "
        f"{one.call_bundles / CLOCK_HZ[one.chip] * 1e6:.0f} | {one.hbm_bytes / HBM_BYTES_PER_S[one.chip] * 1e6:.0f} |"
        for one in found
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chips", default=",".join(TOPOLOGIES), help="comma-separated")
    parser.add_argument(
        "--compile-only", action="store_true", help="all cases, and only whether they compile"
    )
    parser.add_argument("--table", action="store_true", help="only the table of the stored results")
    asked = parser.parse_args()
    if asked.table:
        print(table([Figures(**one) for one in json.loads(RESULTS.read_text())["figures"]]))
        return 0
    cases = kernels_cases.CASES if asked.compile_only else kernels_cases.MEASURED
    failed, found = 0, []
    for case in cases:
        for chip in asked.chips.split(","):
            compiled = compile_case(chip, "benchmarks.kernels_cases", case)
            print(f"{chip:6} {case}: {compiled.error or 'compiled'}", flush=True)
            failed += compiled.error is not None
            if compiled.error is None and not asked.compile_only:
                found.append(figures(compiled))
    if found:
        print(table(found))
        versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
        RESULTS.write_text(
            json.dumps({"versions": versions, "figures": list(map(dataclasses.asdict, found))}, indent=1)
            + "\n"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Compiles functions for TPUs on a machine that has none, and reads the compiler's schedule.

libtpu, which `jax[tpu]` installs, carries the real compiler: it compiles for a chip that is only described, and writes
down the VLIW bundles that it scheduled. A bundle is a cycle of the core, copies apart, so the bundles of a loop times
its trips are its compute time. Figures are the same in every run with the same jax and libtpu.

Every case compiles in a process of its own, because the compiler aborts on some code that it doesn't support.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:([A-Z]{2})?\s*):\s*(>*)(.*)")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A Pallas kernel as it was scheduled. Bundles by loop depth; depth 0 is outside every loop."""

    by_depth: dict[int, int]
    spills: int
    fills: int
    block_bundles: int
    """Executed for a block: the innermost loop around matmuls, without the regions in it that only a sequence's first
    and last block run."""
    edge_bundles: int
    """What those blocks run beside that: the region's own bundles, and one round of its loops."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What became of one case on one chip."""

    chip: str
    case: str
    error: str | None
    """The compiler's message, None where it compiled."""
    hbm_temp_bytes: int = 0
    schedules: tuple[Schedule, ...] = ()


def compile_case(chip: str, module: str, case: str) -> Compiled:
    """Compiles `module.CASES[case]()`, which returns (function, arguments as ShapeDtypeStructs, options of jit)."""
    command = [sys.executable, "-m", "benchmarks.tpu_compile", chip, module, case]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        found = json.loads(done.stdout.splitlines()[-1])
        schedules = tuple(
            Schedule(**{**one, "by_depth": {int(depth): n for depth, n in one["by_depth"].items()}})
            for one in found["schedules"]
        )
        return Compiled(chip, case, None, found["hbm_temp_bytes"], schedules)
    lines = done.stderr.strip().splitlines()
    fatal = next((line for line in lines if line.startswith("F")), None)
    return Compiled(chip, case, fatal or "\n".join(lines[-5:]) or f"exit status {done.returncode}")


def read_schedule(text: str) -> Schedule:
    """The Schedule of a dump of final bundles."""
    bundles = [match.groups() for match in map(_BUNDLE.match, text.splitlines()) if match]
    depths = [len(arrows) for _, arrows, _ in bundles]
    block, edge = _block_loop(bundles, depths)
    return Schedule(
        by_depth={depth: depths.count(depth) for depth in sorted(set(depths))},
        spills=len(re.findall(r"vst \[vmem:\[#allocation\d+_spill", text)),
        fills=len(re.findall(r"vld \[vmem:\[#allocation\d+_spill", text)),
        block_bundles=block,
        edge_bundles=edge,
    )


def _block_loop(bundles: list[tuple], depths: list[int]) -> tuple[int, int]:
    """(block_bundles, edge_bundles): a branch around nested loops is taken by all blocks but a sequence's edges."""
    with_matmul = [index for index, bundle in enumerate(bundles) if "vmatmul" in bundle[2]]
    if not with_matmul:
        return 0, 0
    first = with_matmul[0]
    depth = depths[first]
    starts = [index for index in range(first) if bundles[index][0] == "LB" and depths[index] == depth]
    if not starts:
        return len(bundles), 0
    start = starts[-1]
    # The last bundle as deep: inside a loop, a bundle of moves between registers may be marked as outside it.
    end = 1 + max(index for index, deep in enumerate(depths) if deep >= depth)
    nested = [index for index in range(start, first) if depths[index] > depth]
    if not nested:
        return end - start, 0
    branch = next(index for index in range(start, nested[0]) if "sbr.rel" in bundles[index][2])
    after = max(index for index in range(start, first + 1) if bundles[index][0] == "PF")
    return branch + 1 - start + end - after, after - branch - 1


def _compile_here(chip: str, module: str, case: str, dump: Path) -> dict:
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
    os.environ["TPU_ACCELERATOR_TYPE"] = "v6e-4"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # there is no chip that two processes could fight for
    import jax
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices
    mesh = jax.sharding.Mesh(devices[:1], ("core",))
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    function, arguments, options = importlib.import_module(module).CASES[case]()
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), arguments)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(function, **options).lower(*placed).compile()
    memory = compiled.memory_analysis()
    assert memory is not None, "the TPU compiler always tells"
    schedules = [dataclasses.asdict(read_schedule(path.read_text(errors="replace"))) for path in _dumps(dump)]
    return {"hbm_temp_bytes": memory.temp_size_in_bytes, "schedules": schedules}


def _dumps(dump: Path) -> Iterable[Path]:
    """The final bundles of every custom call, which is what a Pallas kernel is to XLA."""
    for path in sorted(dump.glob("*-final_bundles.txt")):
        if "schedule-analysis" in path.name:
            continue
        stem = re.sub(r"-\d+-final_bundles\.txt$", "", path.name)
        analysis = list(dump.glob(f"{stem}-*schedule-analysis_final_bundles*"))
        name = re.sub(r"^\d+-", "", stem)
        if (
            analysis
            and not name.startswith(("TLP", "<"))
            and "custom-call" in analysis[0].read_text(errors="replace")
        ):
            yield path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for argument in ("chip", "module", "case"):
        parser.add_argument(argument)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = _compile_here(asked.chip, asked.module, asked.case, Path(folder))
    print()
    print(json.dumps(result))

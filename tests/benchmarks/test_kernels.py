"""What is read from the TPU compiler's schedules, and the arithmetic on it."""

from __future__ import annotations

import json

import jax
import pytest

from benchmarks import kernels, kernels_cases
from benchmarks.tpu_compile import Compiled, Schedule, read_schedule

DUMP = """
= control target key start
     0   :  { %1 = sld [smem:[#allocation3]] }
   0x1 LB: > { %2 = sphi }
   0x2   : > { %3 = vld [vmem:[#allocation104_spill] sm:$0xff] }
   0x3 LB: >> { %4 = sphi }
   0x4   : >> { %5 = sbr.rel (%p1) target = $region9 }
   0x5   : >> { %6 = vsel }
   0x6 LB: >>> { %7 = vld }
   0x7   : >>> { %8 = sbr.rel (!%p2) target = $region8 }
   0x8 PF: >> { %9 = vmatmul.mubr.bf16.gmra.mxu0 %v1 }
   0x9   : > { %10 = smov }
   0xa   : >> { %11 = sbr.rel (!%p3) target = $region7 }
   0xb   : > { %12 = vst }
"""


def test_a_block_is_charged_what_it_runs_and_not_what_only_edges_run() -> None:
    schedule = read_schedule(DUMP)
    assert schedule.by_depth == {0: 1, 1: 4, 2: 5, 3: 2}
    assert schedule.block_bundles == 5, "0x3, 0x4, 0x8, 0x9, 0xa"
    assert schedule.edge_bundles == 3, "0x5, 0x6, 0x7"
    assert schedule.fills == 1


def test_without_matmuls_there_is_no_block() -> None:
    assert read_schedule("   0x1   : > { %1 = vld }").block_bundles == 0


def test_a_call_counts_every_loop_as_often_as_it_runs() -> None:
    schedule = Schedule({0: 100, 1: 10, 2: 40, 3: 5}, spills=1, fills=2, block_bundles=30, edge_bundles=7)
    found = kernels.figures(Compiled("v6e", "A", None, 0, (schedule,)))
    assert found.at_most == 1100
    assert found.call_bundles == 100 + 16 * (10 + 5 * 30 + 8 * 7)  # 2,056 tokens are five blocks
    assert "| A | v6e | 30 | 1100 | 1 / 2 |" in kernels.table([found])


@pytest.mark.parametrize("case", "ABC")
def test_a_call_reads_little_more_than_the_live_pages(case: str) -> None:
    moved, least = kernels_cases.HBM_BYTES[case]
    assert least < moved < 1.05 * least


@pytest.mark.parametrize("name", kernels_cases.CASES)
def test_every_case_is_supported(name: str) -> None:
    function, arguments, _ = kernels_cases.CASES[name]()
    jax.eval_shape(function, *arguments)


def test_the_page_shows_the_stored_figures() -> None:
    stored = [kernels.Figures(**one) for one in json.loads(kernels.RESULTS.read_text())["figures"]]
    page = kernels.RESULTS.parents[2] / "docs" / "kernels.md"
    assert kernels.table(stored) in page.read_text()

"""How the decode benchmark's results are shown on the terminal, and stored results in README.md and docs/drafting.md.

    python -m benchmarks.tables

rewrites README.md's table from benchmarks/results/decode.json and docs/drafting.md's from
benchmarks/results/drafter.json, those that there are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.drafter_markdown import drafter_markdown

RESULTS = Path(__file__).parent / "results" / "decode.json"
README = Path(__file__).parent.parent / "README.md"
DRAFTER_RESULTS = RESULTS.with_name("drafter.json")
DRAFTING_PAGE = README.parent / "docs" / "drafting.md"
BEGIN, END = "<!-- from benchmarks/results/{} -->", "<!-- end -->"


class Comparison(NamedTuple):
    """Two rivals of one part of the results, and the least ratio that is wanted of them."""

    part: str
    subject: str
    rival: str
    wanted: float
    title: str
    subject_title: str
    rival_title: str


COMPARISONS = (
    Comparison(
        "one request",
        "plain",
        "transformers",
        2.0,
        "one request",
        "drafting off",
        "transformers `generate`",
    ),
    Comparison(
        "many requests",
        "plain",
        "transformers",
        1.5,
        "16 requests at once",
        "drafting off",
        "transformers, batch of 16",
    ),
    Comparison(
        "grounded prompts",
        "speculative",
        "plain",
        1.8,
        "edits of a given text, one request",
        "drafting on",
        "drafting off",
    ),
    Comparison(
        "grounded prompts",
        "speculative",
        "transformers prompt lookup",
        1.5,
        "edits of a given text, one request",
        "drafting on",
        "transformers, `prompt_lookup_num_tokens=10`",
    ),
)


def print_results(results: dict[str, Any], console: Console) -> None:
    """Speeds, ratios and the rest."""
    speeds = Table("measurement", "rival", title="Tokens per second, medians", title_justify="left")
    for column in ("tokens/s", "same tokens"):
        speeds.add_column(column, justify="right")
    for part in ("one request", "many requests", "grounded prompts"):
        for name, figures in results[part].items():
            same = f"{figures['completions_as_first_rival']} of {figures['completions']}"
            speeds.add_row(part, name, f"{figures['tokens_per_s']:.1f}", same)
    compared = Table("part", "ratio", title="Ratios", title_justify="left")
    for column in ("measured", "wanted"):
        compared.add_column(column, justify="right")
    for one in COMPARISONS:
        compared.add_row(
            one.part, f"{one.subject} / {one.rival}", f"{_ratio(results, one):.2f}", f"{one.wanted:.2f}"
        )
    console.print(speeds, compared)
    step, warm_up = results["plain step"], results["warm-up"]
    hosts = ", ".join(f"{name} {share:.1%}" for name, share in results["host share of a step"].items())
    warm_ups = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in warm_up["seconds"].items())
    console.print(
        f"Acceptance length on grounded prompts: {results['acceptance length on grounded prompts']:.2f}\n"
        f"Plain step, one request: {1e3 * step['seconds']:.1f} ms for {step['weight_bytes'] / 1e6:.0f} MB of "
        f"weights, {step['share_of_copy_bandwidth']:.0%} of the copy bandwidth "
        f"({max(step['copy_bytes_per_s_by_threads'].values()) / 1e9:.1f} GB/s read and written)\n"
        f"Host share of a step: {hosts}\n"
        f"Warm-up: {warm_ups}, {warm_up['compilations']} compilations; "
        f"afterwards {warm_up['compilations_afterwards']}",
        highlight=False,
    )


def _ratio(results: dict[str, Any], one: Comparison) -> float:
    part = results[one.part]
    return part[one.subject]["tokens_per_s"] / part[one.rival]["tokens_per_s"]


def markdown(stored: dict[str, Any]) -> str:
    """README.md's table of a stored run."""
    described, results = stored["machine"], stored["results"]
    versions = described["versions"]
    lines = [
        "| greedy, tokens/s | rollout_spec | compared with | |",
        "|---|---|---|---|",
    ]
    for one in COMPARISONS:
        part = results[one.part]
        lines.append(
            f"| {one.title} | {one.subject_title}: {part[one.subject]['tokens_per_s']:.1f} "
            f"| {one.rival_title}: {part[one.rival]['tokens_per_s']:.1f} | **{_ratio(results, one):.1f}x** |"
        )
    lines += [
        "",
        f"SmolLM2-135M in float32, {described['cores']} cores ({described['processor']}), "
        f"jax {versions['jax']}, transformers {versions['transformers']} on torch {versions['torch']}; "
        f"medians of {stored['settings']['rounds']} rounds in turns (`make bench`).",
    ]
    return "\n".join(lines)


def replace_table(readme: str, stored: dict[str, Any]) -> str:
    """README.md with the table of a stored run between its two marks."""
    return replace_between(readme, README.name, RESULTS.name, lambda: markdown(stored))


def replace_drafter_tables(page: str, stored: dict[str, Any]) -> str:
    """docs/drafting.md with the tables of a stored run between its two marks."""
    return replace_between(page, DRAFTING_PAGE.name, DRAFTER_RESULTS.name, lambda: drafter_markdown(stored))


def replace_between(page: str, name: str, results: str, content: Callable[[], str]) -> str:
    """A page with new content between the marks of a results file. ValueError if it lacks them."""
    begin = BEGIN.format(results)
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"expected the marks {begin} and {END} in {name}, found not both")
    return f"{before}{begin}\n{content()}\n{END}{after}"


if __name__ == "__main__":
    for path, results, replaced in (
        (README, RESULTS, replace_table),
        (DRAFTING_PAGE, DRAFTER_RESULTS, replace_drafter_tables),
    ):
        if results.exists():
            path.write_text(replaced(path.read_text(), json.loads(results.read_text())))

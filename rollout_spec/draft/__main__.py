"""Looks into saved histories, and merges them.

    python -m rollout_spec.draft inspect FILE [--context "11 12 13" | --context-file F] [--group ID] [--nodes 16]
    python -m rollout_spec.draft merge A B [...] -o OUT [--capacity-tokens N]

`inspect` says what a history holds and, for a context, what it drafts. `merge` adds up several histories; weights of
the mixture, calibration and the weight version come from the first. Needs no JAX.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import DraftError, RolloutError
from ..tree import ROOT, DraftTree
from . import counts
from .config import DraftConfig
from .history import BYTES_PER_TOKEN
from .trie import TrieDrafter

_MOST_SHOWN = 12
"""Tokens of the context that are repeated."""
_SPARE = 2
"""Capacity for a merged history over that of its parts: of two pairs that are equal but for the group three are made,
and a table that may grow is less full than one that has its largest size."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code, 1 after an error, which is told in one line on stderr."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    try:
        if parsed.command == "inspect":
            inspect(parsed)
        else:
            merge(parsed)
    except RolloutError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        place = "" if error.filename is None else f"{error.filename}: "
        print(f"{parser.prog}: {place}{error.strerror or error}", file=sys.stderr)
        return 1
    return 0


def inspect(parsed: argparse.Namespace) -> None:
    """Prints what a history holds and, if a context is given, its draft."""
    context = _context(parsed)
    drafter = TrieDrafter(DraftConfig(capacity_tokens=_capacity([parsed.file]), max_nodes=parsed.nodes))
    drafter.load(parsed.file)
    if context is not None:
        drafter.start("inspected", context, group_id=parsed.group)
    print(_facts_table(drafter, parsed.file))
    if context is None:
        return
    (tree,) = drafter.propose(["inspected"], [parsed.nodes])
    shown = " ".join(map(str, context[-_MOST_SHOWN:]))
    group = "" if parsed.group is None else f", group {parsed.group!r}"
    print(f"\nDraft after {'... ' if len(context) > _MOST_SHOWN else ''}{shown}{group}")
    for line in draft_lines(tree):
        print(line)
    print(f"{len(tree)} nodes; a step emits {1 + tree.probs.sum():.2f} tokens if the probabilities hold")


def merge(parsed: argparse.Namespace) -> None:
    """Adds up histories and saves the sum."""
    capacity = parsed.capacity_tokens
    if capacity is None:
        capacity = _SPARE * _capacity([parsed.first, *parsed.others])
    drafter = TrieDrafter(DraftConfig(capacity_tokens=capacity))
    drafter.load(parsed.first)
    for file in parsed.others:
        drafter.merge(file)
    drafter.save(parsed.output)
    print(_facts_table(drafter, parsed.output))


def draft_lines(tree: DraftTree) -> Iterator[str]:
    """A line for each node, below its parent: how likely it is to be accepted, and its token, indented by depth."""
    depths: list[int] = []
    for token, parent, prob in zip(
        tree.tokens.tolist(), tree.parents.tolist(), tree.probs.tolist(), strict=True
    ):
        depths.append(0 if parent == ROOT else depths[parent] + 1)
        yield f"  {prob:.3f}  {'  ' * depths[-1]}{token}"


def _facts_table(drafter: TrieDrafter, path: Path) -> str:
    facts = drafter.facts()
    slots = facts.table_bytes // counts.SLOT_BYTES
    rows = {
        "file": f"{path}, {path.stat().st_size:,} bytes",
        "tokens learnt": f"{facts.tokens:,} (forgotten ones included)",
        "pairs held": f"{facts.pairs:,} of a context and a token that followed it",
        "prompts": f"{facts.groups:,} with evidence of their own",
        "weight version": str(facts.weight_version),
        "weight updates": f"{facts.weight_updates:,}",
        "table": f"{facts.table_bytes:,} bytes, {facts.pairs / slots:.0%} of its {slots:,} slots in use",
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _capacity(files: Sequence[Path]) -> int:
    """Tokens of capacity whose table is larger than those of the files together."""
    return 1 + sum(file.stat().st_size for file in files) // BYTES_PER_TOKEN


def _context(parsed: argparse.Namespace) -> list[int] | None:
    if parsed.context is not None:
        text, source = parsed.context, "--context"
    elif parsed.context_file is not None:
        text, source = parsed.context_file.read_text(errors="replace"), str(parsed.context_file)
    else:
        return None
    words = [word for word in re.split(r"[\s,]+", text) if word]
    if wrong := [word for word in words if not re.fullmatch(r"[0-9]{1,10}", word)]:
        listed = ", ".join(repr(word[:20]) for word in wrong[:5])
        raise DraftError(f"{source}: expected token ids apart by spaces or commas, got {listed}")
    if not words:
        raise DraftError(f"{source}: expected at least one token id, got none")
    return [int(word) for word in words]


def _group_id(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rollout_spec.draft", description="Looks into saved histories, and merges them."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    inspecting = commands.add_parser("inspect", help="what a history holds, and what it drafts")
    inspecting.add_argument("file", type=Path, help="what save() or RolloutEngine.save_history wrote")
    context = inspecting.add_mutually_exclusive_group()
    context.add_argument(
        "--context", help="token ids, apart by spaces or commas; prints the draft after them"
    )
    context.add_argument("--context-file", type=Path, help="a text file of the same")
    inspecting.add_argument(
        "--group",
        type=_group_id,
        metavar="ID",
        help="group id of the context (RolloutOutput.group_id), taken as a number if it reads as one, else as a "
        "string; without it the context counts as the prompt of a request without a group id",
    )
    inspecting.add_argument("--nodes", type=int, default=16, help="most nodes of the draft (16)")

    merging = commands.add_parser("merge", help="adds up histories")
    merging.add_argument("first", type=Path, help="the one whose weights, calibration and version stay")
    merging.add_argument("others", type=Path, nargs="+")
    merging.add_argument("-o", "--output", type=Path, required=True, help="the file to write")
    merging.add_argument(
        "--capacity-tokens",
        type=int,
        metavar="N",
        help="as DraftConfig.capacity_tokens; beyond it the least used is left out (default: enough for all)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""Measure what drafting gains on your own model and prompts, and what to set.

The engine runs your prompts with drafting off and on, in turns, at several numbers of slots; the same prompts are asked
again in every epoch, as in training. A table, a recommendation in words, and whether all tokens are identical.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..tree import MAX_NODES

if TYPE_CHECKING:
    from rich.console import Console

    from .advice import Advice
    from .comparison import Comparison, Settings

HELP = "measure what drafting gains on your own model and prompts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, required=True, help="a Hugging Face folder or a .gguf file, on this machine"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE",
        help='JSON lines with a key "prompt" (a text, chat messages or token ids), or a text file with a prompt a line',
    )
    parser.add_argument("--chat", action="store_true", help="put each text into a chat as the user's message")
    parser.add_argument(
        "--slots",
        type=_numbers,
        default=(1, 4, 16),
        metavar="N,N",
        help="completions at once (default: 1,4,16)",
    )
    parser.add_argument(
        "--nodes", type=_nodes, default=(16,), metavar="N,N", help="values of max_nodes, the usual first (16)"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="default: 1")
    parser.add_argument("--samples", type=_number, default=4, metavar="N", help="completions of a prompt (4)")
    parser.add_argument("--max-tokens", type=_number, default=128, metavar="N", help="of a completion (128)")
    parser.add_argument(
        "--epochs", type=_number, default=2, metavar="N", help="times the same prompts are asked (2)"
    )
    parser.add_argument(
        "--rounds", type=_number, default=3, metavar="N", help="repetitions, each from an empty history (3)"
    )
    parser.add_argument(
        "--limit",
        type=_number,
        metavar="N",
        help="prompts in a round (default: enough for about twice as many completions as slots)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (0)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of weights and cache (default: float32 on CPU, bfloat16 elsewhere)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures as JSON")


def run(parsed: argparse.Namespace) -> None:
    """Measures, prints, and writes JSON if asked. Raises RolloutError or OSError with what is wrong."""
    from rich.console import Console

    from ..loading.load import load_model
    from ..sampling import SamplingParams
    from .advice import advise
    from .comparison import Settings, compare
    from .prompts import read_prompts, token_ids

    settings = Settings(**{field.name: getattr(parsed, field.name) for field in dataclasses.fields(Settings)})
    SamplingParams(temperature=settings.temperature, seed=settings.seed, max_tokens=settings.max_tokens)
    if parsed.output is not None and not parsed.output.absolute().parent.is_dir():
        raise ConfigError(f"--output {parsed.output}: its folder does not exist")
    prompts = read_prompts(parsed.prompts, as_chat=parsed.chat)
    progress, console = Console(stderr=True), Console()

    def say(text: str) -> None:
        progress.print(text, style="dim", highlight=False)

    say(f"Loading {parsed.model} ...")
    model = load_model(parsed.model, parsed.dtype)
    ids = token_ids(prompts, model.config, model.tokenizer, max_tokens=settings.max_tokens)
    comparisons = list(compare(settings, model, ids, say))
    advice = advise(comparisons, settings.nodes)
    print_report(comparisons, advice, settings, console)
    if parsed.output is not None:
        parsed.output.write_text(
            json.dumps(as_json(comparisons, advice, settings, parsed.model.name), indent=1) + "\n"
        )
        say(f"Written to {parsed.output}")


def print_report(
    comparisons: Sequence[Comparison], advice: Advice, settings: Settings, console: Console
) -> None:
    """The table, whether tokens are identical, and the recommendation."""
    from rich.table import Table

    from .comparison import PLAIN

    table = Table(title=f"Tokens per second, medians of {settings.rounds} rounds", title_justify="left")
    several = len(settings.nodes) > 1
    columns = ["slots", "epoch", *(["max_nodes"] if several else []), "plain", "speculative", "ratio"]
    columns += ["acceptance length", "nodes a step", "host share"]
    for column in columns:
        table.add_column(column, justify="right")
    for one in comparisons:
        for epoch, figures in enumerate(one.epochs):
            for nodes in settings.nodes:
                drafting = figures[nodes]
                table.add_row(
                    str(one.slots),
                    str(epoch + 1),
                    *([str(nodes)] if several else []),
                    f"{figures[PLAIN].speed:,.1f}",
                    f"{drafting.speed:,.1f}",
                    f"{one.ratio(nodes, epoch):.2f}x",
                    f"{drafting.acceptance_length:.2f}",
                    f"{drafting.nodes_per_step:.2f}",
                    f"{drafting.host_share:.1%}",
                )
        table.add_section()
    console.print(table)
    console.print(identity(comparisons), highlight=False, soft_wrap=True)
    console.print("\n".join(advice.sentences), highlight=False, style="bold", soft_wrap=True)


def identity(comparisons: Sequence[Comparison]) -> str:
    """Whether drafting changed a token."""
    completions = sum(one.completions for one in comparisons)
    identical = sum(one.identical for one in comparisons)
    if identical == completions:
        return f"Tokens: all {completions} completions are identical with drafting on and off."
    return (
        f"Tokens: {completions - identical} of {completions} completions differ between drafting on and off. Steps of "
        "other sizes round otherwise, which tips tokens whose lead is smaller than that; rarely in float32 (--dtype), "
        "more often in lower precision."
    )


def as_json(
    comparisons: Sequence[Comparison], advice: Advice, settings: Settings, model: str
) -> dict[str, Any]:
    """All figures, to be written to a file."""
    import jax

    from .comparison import PLAIN

    cells = []
    for one in comparisons:
        epochs = []
        for epoch, figures in enumerate(one.epochs):
            described = {
                "plain" if nodes == PLAIN else f"max_nodes={nodes}": dataclasses.asdict(those)
                | {"tokens_per_s": those.speed, "ratio": one.ratio(nodes, epoch)}
                for nodes, those in figures.items()
            }
            epochs.append(described)
        cell = {"slots": one.slots, "epochs": epochs, "completions": one.completions}
        cells.append(cell | {"identical_completions": one.identical, "warm_up_s": one.warm_up_s})
    return {
        "model": model,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "settings": dataclasses.asdict(settings),
        "slots": cells,
        "recommended": {"draft": advice.draft, "in_words": advice.sentences},
    }


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_number(part.strip()) for part in text.split(",")))


def _nodes(text: str) -> tuple[int, ...]:
    numbers = _numbers(text)
    if max(numbers) > MAX_NODES:
        raise argparse.ArgumentTypeError(f"expected numbers of at most {MAX_NODES}, got {text!r}")
    return numbers

"""Parses the command line and runs a subcommand; errors are told in words, without a traceback."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..errors import RolloutError
from . import bench, fit, generate, inspect, project, serve

SUBCOMMANDS = {
    "generate": generate,
    "serve": serve,
    "inspect": inspect,
    "bench": bench,
    "fit": fit,
    "project": project,
}
"""Modules with HELP, `add_arguments(parser)` and `run(parsed)`. They import what is heavy in `run`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code, 1 after an error, which is told on stderr."""
    parser = argparse.ArgumentParser(
        prog="rollout-spec", description="Lossless speculative rollouts for LLM reinforcement learning."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in SUBCOMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(subparser)
    parsed = parser.parse_args(arguments)
    try:
        SUBCOMMANDS[parsed.command].run(parsed)
    except RolloutError as error:
        return _failed(parsed.command, str(error))
    except OSError as error:
        place = "" if error.filename is None else f"{error.filename}: "
        return _failed(parsed.command, f"{place}{error.strerror or error}")
    except KeyboardInterrupt:
        return _failed(parsed.command, "interrupted")
    return 0


def _failed(command: str, message: str) -> int:
    print(f"rollout-spec {command}: {message}", file=sys.stderr)
    return 1

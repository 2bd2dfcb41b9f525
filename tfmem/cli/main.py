"""`tfmem COMMAND`: the parser, the exit codes, and how all commands fail."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence

from custom_ops.errors import TfmemError
from graph_passes.errors import InfeasibleBudgetError
from tfmem import __version__
from tfmem.cli import commands, plan_command
from tfmem.cli.output import UsageError

DONE, FAILED, USAGE, NO_FIT = 0, 1, 2, 3
EXIT_CODES = """exit codes:
  0  done: the step fits, or the command did what was asked
  1  failed: the reason is on standard error; for doctor, something is broken
  2  the command line is wrong
  3  no plan fits the memory budget
"""


class Help(argparse.RawDescriptionHelpFormatter):
    """Help of at most 100 columns, whose description keeps its lines."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=100)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code."""
    options = parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int | None] = options.run
    try:
        return run(options) or DONE
    except (TfmemError, OSError, ValueError, ImportError) as error:
        if isinstance(error, BrokenPipeError):  # `tfmem ... | head`
            return DONE
        text = str(error)
        if isinstance(error, OSError) and error.filename:
            text = f"'{error.filename}': {error.strerror}"
        if options.json:
            print(json.dumps({"error": text, "kind": type(error).__name__}))
        print(f"tfmem {options.command}: {text}", file=sys.stderr)
        codes = {InfeasibleBudgetError: NO_FIT, UsageError: USAGE}
        return next((code for kind, code in codes.items() if isinstance(error, kind)), FAILED)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    found = argparse.ArgumentParser(
        prog="tfmem",
        description="Train TensorFlow models within a memory budget, replace recurrent layers, fuse ops.",
        epilog=EXIT_CODES,
        formatter_class=Help,
    )
    found.add_argument("--version", action="version", version=f"tfmem {__version__}")
    subparsers = found.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for add in (*plan_command.COMMANDS, *commands.COMMANDS):
        command = add(subparsers)
        command.formatter_class = Help
        command.add_argument("--json", action="store_true", help="print JSON for programs")
    return found


if __name__ == "__main__":
    sys.exit(main())

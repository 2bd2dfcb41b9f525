"""What all benchmarks that run named cases share: their command line, and which cases are asked for."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks.records import load


class Named(Protocol):
    """A case."""

    @property
    def name(self) -> str:
        """Unique; parts are separated by slashes."""


AnyCase = TypeVar("AnyCase", bound=Named)


def command_line(module: str, document: str | None, output: str = "") -> argparse.ArgumentParser:
    """The parser of `python -m benchmarks.MODULE`.

    Args:
        module: the benchmark's own name.
        document: its docstring.
        output: the file that results go to if no other is named; "" for a module that runs no cases.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}",
        description=document,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if output:
        parser.add_argument("--output", type=Path, default=Path(output), help="results (JSON)")
        parser.add_argument("--resume", type=Path, help="earlier results to start from")
        parser.add_argument("--only", nargs="+", default=[], metavar="PREFIX", help="cases to run, by start of name")
        parser.add_argument("--again", action="store_true", help="run cases that have a result, too")
        parser.add_argument("--list", action="store_true", help="name the cases and stop")
        parser.add_argument("--total-seconds", type=float, default=540, help="begin no case when this is over (540)")
    return parser


def asked(
    parser: argparse.ArgumentParser,
    arguments: list[str] | None,
    cases: Sequence[AnyCase],
    table: Callable[[Mapping[str, Mapping[str, Any]]], list[str]],
) -> tuple[argparse.Namespace, list[AnyCase]]:
    """The options, and the cases to run; none where their names or the table of results were asked for, and printed.

    Raises:
        ValueError: a pattern of `--only` fits no case.
    """
    parser.add_argument("--table", type=Path, help="results to make a table of, and run nothing")
    options = parser.parse_args(arguments)
    if options.table:
        print("\n".join(table((load(options.table) or {"cases": {}})["cases"])))
        return options, []
    found = named(cases, options.only)
    if options.list:
        print("\n".join(case.name for case in found))
        return options, []
    return options, found


def waiting(cases: Sequence[AnyCase], results: Mapping[str, Any], options: argparse.Namespace) -> Iterator[AnyCase]:
    """Those without a result, one after the other until the time is over."""
    deadline = time.monotonic() + options.total_seconds
    for case in cases:
        if time.monotonic() < deadline and (options.again or case.name not in results["cases"]):
            yield case


def named(cases: Sequence[AnyCase], patterns: Sequence[str]) -> list[AnyCase]:
    """The cases whose names start with one of `patterns`; all of them for none.

    Raises:
        ValueError: a pattern fits no case.
    """
    for pattern in patterns:
        if not any(case.name.startswith(pattern) for case in cases):
            raise ValueError(f"no case starts with '{pattern}'; --list shows them")
    return [case for case in cases if not patterns or case.name.startswith(tuple(patterns))]

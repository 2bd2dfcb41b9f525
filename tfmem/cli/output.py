"""What commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table


class UsageError(ValueError):
    """The command line is wrong in a way that its parser does not see."""


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    print(json.dumps(value, indent=1))


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table as wide as the terminal; cells that are too long continue on the next line."""
    columns = [Column(title, overflow="fold") for title in header]
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for row in rows:
        table.add_row(*(cell.replace("[", "\\[") for cell in row))
    console = Console(highlight=False)
    console.print(table)

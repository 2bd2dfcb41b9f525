"""The table of reasons in the documentation: `python -m tools.refusal_table --document docs/refusals.md`."""

from __future__ import annotations

import argparse
import string
import sys
from collections.abc import Sequence
from pathlib import Path

from graph_passes.refusals import Reason

MARKS = "<!-- reasons -->", "<!-- end of reasons -->"


def table() -> str:
    """All reasons, as rows of a page."""
    lines = ["| reason | refused by | sentence |", "|---|---|---|"]
    for each in Reason:
        fields = {name: f"*{name}*" for _, name, _, _ in string.Formatter().parse(each.sentence) if name}
        lines.append(f"| `{each.name}` | {each.area} | {each.sentence.format(**fields)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table between the marks of a page."""
    parser = argparse.ArgumentParser(prog="python -m tools.refusal_table", description="Writes the table of reasons.")
    parser.add_argument("--document", type=Path, required=True, help="the page")
    page: Path = parser.parse_args(arguments).document
    text = page.read_text()
    before, rest = text.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    page.write_text(f"{before}{MARKS[0]}\n{table()}\n{MARKS[1]}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

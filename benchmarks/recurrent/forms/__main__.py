"""Says of each form of a recurrence whether tfmem replaces it, in inference and in training, and why not.

    python -m benchmarks.recurrent.forms                      all forms
    python -m benchmarks.recurrent.forms LSTM tf.scan         the forms whose names contain one of these
    python -m benchmarks.recurrent.forms --document docs/recurrent_forms.md

Values, and in training gradients, are compared with plain TensorFlow. Returns 1 if one differs.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.recurrent.forms.run import FORMS, Outcome, outcome

MARKS = "<!-- forms -->", "<!-- end of forms -->"
MODES = ("inference", "training")
REPLACED = ("replaced", "small")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the forms, print a line each, and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recurrent.forms", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names; all forms by default")
    parser.add_argument("--document", type=Path, help="the page whose table is written")
    parser.add_argument("--mode", choices=MODES, action="append", help="one mode alone")
    options = parser.parse_args(arguments)
    chosen = [name for name in FORMS if not options.names or any(part in name for part in options.names)]
    rows: list[tuple[str, list[Outcome]]] = []
    for name in chosen:
        found = [_tried(name, mode == "training") for mode in options.mode or MODES]
        print(f"{name:45}", *(f"{each.kind:9}" for each in found), *(_error(each) for each in found), flush=True)
        for each in found:
            if each.reason:
                print("      ", each.reason[:600], flush=True)
        rows.append((name, found))
    wrong = [name for name, found in rows if not all(each.right for each in found)]
    counts = [Counter(found[place].kind for _, found in rows) for place in range(len(options.mode or MODES))]
    print(len(rows), "forms:", *map(dict, counts), "wrong:", wrong)
    if options.document:
        _write(options.document, rows)
    return int(bool(wrong))


def _tried(name: str, training: bool) -> Outcome:
    try:
        return outcome(name, training)
    except Exception as error:  # a form that fails is a row of the table
        traceback.print_exc()
        return Outcome(
            "failed", float("inf"), f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )


def _error(found: Outcome) -> str:
    return f"{found.error:.0e}"


def _write(page: Path, rows: Sequence[tuple[str, list[Outcome]]]) -> None:
    text = page.read_text()
    before, rest = text.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    counts = [
        [sum(found[place].kind in kinds for _, found in rows) for place in (0, 1)] for kinds in (REPLACED, ("small",))
    ]
    (inference, training), (few, fewer) = counts
    lines = [
        f"Of {len(rows)} forms, {inference} are replaced in inference and {training} in training; {few} and {fewer} of",
        "these are `small`: they have an op for each number of a row, and large states stay loops.",
        "",
    ]
    lines += ["| form | inference | training | why a loop stays |", "| --- | --- | --- | --- |"]
    for name, found in rows:
        reason = next((each.reason for each in found if each.reason and each.kind not in REPLACED), "")
        lines.append(f"| {name} | {found[0].kind} | {found[1].kind} | {reason.replace('|', '/')} |")
    table = "\n".join(lines)
    page.write_text(f"{before}{MARKS[0]}\n{table}\n{MARKS[1]}{after}")


if __name__ == "__main__":
    sys.exit(main())

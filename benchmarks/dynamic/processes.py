"""Workers of the benchmark, each in a separate process, and their inputs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from examples import trees

ROOT = Path(__file__).resolve().parents[2]


def numbered(given: list[trees.Tree]) -> list:
    """Trees whose words are numbers."""
    words: dict[str, int] = {}

    def of(tree: trees.Tree) -> list:
        if len(tree) == 2:
            return [tree[0], words.setdefault(tree[1], len(words))]
        return [tree[0], of(tree[1]), of(tree[2])]

    return [of(tree) for tree in given]


def command(
    python: str, worker: str, data: Path, hidden: int, seconds: float | None, batches: Sequence[int], *more: str
) -> list[str]:
    """The command of a worker; `seconds` of each measurement, which DyNet's worker does not take."""
    timed = [] if seconds is None else [str(seconds)]
    return [
        python,
        str(ROOT / "benchmarks/dynamic" / worker),
        str(data),
        str(hidden),
        *timed,
        *more,
        *map(str, batches),
    ]


def rows_in(output: str) -> list[dict]:
    """What a worker has shown."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def run(python: str, worker: str, data: Path, hidden: int, seconds: float | None, batches: Sequence[int]) -> list[dict]:
    """A worker's rows; ends the benchmark if it fails."""
    return rows_in(output_of(command(python, worker, data, hidden, seconds, batches)))


def output_of(words: Sequence[str]) -> str:
    """What a command prints; ends the benchmark if it fails."""
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def installed(*packages: str) -> dict[str, str]:
    """Versions of those packages that there are."""
    found = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def versions(dynet: str | None) -> dict[str, str]:
    """The versions of TensorFlow, and of DyNet's package in its Python."""
    found = installed("tensorflow")
    if dynet:
        asked = "import importlib.metadata as m; print(m.version('dyNET38'))"
        found["dyNET38"] = subprocess.run(
            [dynet, "-c", asked], capture_output=True, text=True, check=True
        ).stdout.strip()
    return found

"""Compiles C++ units, two at a time, and says on the terminal how far it is."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock


@dataclass(frozen=True)
class Job:
    """What one call of the compiler makes.

    Attributes:
        label: what the terminal says of it.
        target: the file that is made; one that ends in .d, beside it, lists what it was made from.
        command: the call, without the flags that make that list.
        header: the precompiled header that it reads, which another job makes.
    """

    label: str
    target: Path
    command: list[str]
    header: Path | None = None

    def is_stale(self) -> bool:
        """Whether the target is missing, or older than a file that it was made from."""
        listed = self.target.with_suffix(".d")
        if not listed.exists():
            return True
        sources = listed.read_text().partition(":")[2].replace("\\\n", " ").split()
        # g++ does not list the precompiled header.
        return is_older(self.target, [*sources, *([self.header] if self.header else [])])


def compile_all(jobs: Sequence[Job], extra: Sequence[str] = ()) -> None:
    """Runs the jobs whose targets are stale, in this order as far as headers allow; ends Python if one fails.

    Args:
        jobs: a job that makes a header stands before those that read it.
        extra: flags for all of them.
    """
    stale = list(_stale(jobs))
    numbers, printing = itertools.count(1), Lock()
    running: dict[Path, Future[None]] = {}

    def make(job: Job, header: Future[None] | None) -> None:
        if header:
            header.result()
        with printing:
            print(f"[{next(numbers)}/{len(stale)}] compiling {job.label}", flush=True)
        run([*job.command, *extra, "-MMD", "-MF", str(job.target.with_suffix(".d"))])

    with ThreadPoolExecutor(max_workers=2) as pool:
        for job in stale:
            running[job.target] = pool.submit(make, job, running.get(job.header) if job.header else None)
        try:
            for future in running.values():
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _stale(jobs: Iterable[Job]) -> Iterator[Job]:
    targets = set()
    for job in jobs:
        if job.header in targets or job.is_stale():
            targets.add(job.target)
            yield job


def is_older(target: Path, sources: Iterable[str | Path]) -> bool:
    """Whether `target` is missing or older than a source, or a source is missing."""
    paths = [target, *map(Path, sources)]
    if not all(path.exists() for path in paths):
        return True
    return any(path.stat().st_mtime > target.stat().st_mtime for path in paths)


def run(command: Sequence[str]) -> None:
    """Runs a command of the compiler's; ends Python with a message if it fails."""
    try:
        subprocess.run(command, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        sys.exit(f"\nnot everything was built: {error}\nIt needs g++ (or CXX=...) with C++17.\n")


def write(path: Path, text: str) -> None:
    """Writes a file, unless that is what it holds: what was made from it stays younger."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)

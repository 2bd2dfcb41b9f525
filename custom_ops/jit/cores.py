"""How many processes may compute at once: fewer than the machine has cores where its administrator says so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import ceil
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """The number of cores that this process may run on, and has time for by its control groups; at least one.

    `root` is where the system's files lie, for tests.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *_quotas(root)]))


def _quotas(root: Path) -> Iterator[int]:
    groups = root / "sys/fs/cgroup"
    for folder in _own_and_above(root, "", groups):  # version 2: "max 100000" or "150000 100000"
        yield from _cores(_words(folder / "cpu.max"))
    for folder in _own_and_above(root, "cpu", groups / "cpu"):  # version 1: -1 for no quota
        yield from _cores([*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")])


def _own_and_above(root: Path, controller: str, mount: Path) -> Iterator[Path]:
    """The folders of this process's control group and of those above it, as far as they are there."""
    yield mount
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            own = mount / path.lstrip("/")
            yield from (folder for folder in (own, *own.parents) if folder != mount and folder.is_relative_to(mount))


def _cores(words: list[str]) -> Iterator[int]:
    """A quota and its period, in microseconds, as whole cores; nothing where there is none."""
    if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):
        yield ceil(int(words[0]) / int(words[1]))


def _words(path: Path) -> list[str]:
    return _text(path).split()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

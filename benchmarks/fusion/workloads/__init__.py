"""Each workload is a module with a function `make() -> Workload`, written as a user without tfmem would."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.fusion.workloads.workload import Workload


def make(name: str) -> Workload:
    """A workload with new variables, and the same numbers each time.

    Args:
        name: of a module here; or after "large/" or "models/" one of that module's.
    """
    group, slash, member = name.partition("/")
    if slash:
        return import_module(f"benchmarks.fusion.workloads.{group}").WORKLOADS[member]()
    return import_module(f"benchmarks.fusion.workloads.{name}").make()

"""Ranks the kernels of patterns by the model, each pattern once, and in another process where there is one.

Ranking is Python for tens of milliseconds a pattern, and a thread that trains meanwhile needs the interpreter as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, TypeAlias

from custom_ops.fusion.codegen.plan.kernel_plan import PatternConfiguration
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.fusion.search.bench import candidates, point

MOST = 200  # that are kept of a pattern: a tuner looks at the first few, and for others of the fastest one's kind

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
Ranked: TypeAlias = Sequence[tuple[PatternConfiguration, float]]  # best first, with the nanoseconds predicted
Run: TypeAlias = Callable[..., Any]  # a function and its arguments: what it gives, from another process


def ranked(pattern: Pattern, shapes: Shapes, processors: int) -> Ranked:
    """The best configurations for tensors of these shapes, on a GPU with so many multiprocessors."""
    return candidates(pattern, processors)(point(shapes))[:MOST]


@dataclass(frozen=True)
class Ranking:
    """What `ranked` finds, from any thread.

    Attributes:
        run: calls a function in another process; None: this one ranks, one thread at a time.
        found: by pattern, shapes and processors.
    """

    run: Run | None = None
    found: dict[tuple[str, Shapes, int], Ranked] = field(default_factory=dict)
    _lock: Any = field(default_factory=Lock)

    def __call__(self, pattern: Pattern, shapes: Shapes, processors: int) -> Ranked:
        """The best first.

        Raises:
            KernelError: the other process died, or the program has ended.
        """
        key = pattern.digest, shapes, processors
        if key not in self.found:
            if self.run is not None:
                bare = replace(pattern)  # without what was found of it, which takes long to pickle
                self.found[key] = self.run(ranked, bare, shapes, processors)
            else:
                with self._lock:
                    self.found[key] = ranked(pattern, shapes, processors)
        return self.found[key]

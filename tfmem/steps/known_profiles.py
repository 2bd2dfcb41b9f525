"""What was measured of a step before: by an earlier process, or of another batch size of the same function."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from graph_passes.analysis.memory.observe import Observation
from graph_passes.graph.ir import Graph
from tfmem.runtime.engine import Engine
from tfmem.runtime.profile_cache import ProfileCache
from tfmem.steps.trace import Trace

ALIKE = 0.9  # of a step's ops have to be known by name, for another's profile to serve as its estimate
_NUMBERS = re.compile("_?[0-9]+")
MOST_KEPT = 8  # batch sizes of a function whose profiles are kept

Specs = tuple[tuple[str, tuple[int | None, ...] | None], ...]  # dtype and shape of each input


@dataclass(frozen=True)
class _Seen:
    """An observed trace: the specs that it was traced with, its ops in the order in which the program made them, bytes
    that each op touches, and what was seen."""

    signature: Specs
    order: tuple[str, ...]
    touched: dict[str, int]
    observation: Observation  # its base is what lies beyond the memory in use, as in the cache


class BatchProfiles:
    """Observations of one function's traces. Each serves as the estimate of others that differ in the batch size alone.

    A Python function makes the same ops in the same order in each trace, by the same names but for numbers: a first
    trace has made variables, too. Ops that Grappler made are known by their names.
    """

    def __init__(self) -> None:
        self._seen: list[_Seen] = []

    def add(self, trace: Trace, seen: Observation) -> None:
        """Keep what was observed of `trace`."""
        signature = trace.input_specs
        self._seen = [
            *self._seen[1 - MOST_KEPT :],
            _Seen(signature, trace.creation_order, _touched(trace.step.graph), seen),
        ]

    def scaled(self, trace: Trace) -> tuple[Observation, int] | None:
        """What `trace` should take by the observation of the nearest batch size, and that size; None if there is none.

        Times and workspace go by the ratio of the batch sizes, those of an op that touches as much as before stay.
        """
        signature = trace.input_specs
        sizes = [(_batches(each.signature, signature), each) for each in self._seen]
        related = [(old, new, each) for pair, each in sizes if pair is not None for old, new in [pair]]
        if not related:
            return None
        old, new, nearest = min(related, key=lambda item: max(item[0] / item[1], item[1] / item[0]))
        touched, now = _touched(trace.step.graph), _renamed(nearest.order, trace.creation_order)
        before = {now.get(name, name): nbytes for name, nbytes in nearest.touched.items()}
        if len(touched.keys() & before.keys()) < ALIKE * len(touched):
            return None
        ratio, seen = new / old, nearest.observation
        factor = {name: 1.0 if touched.get(name) == nbytes else ratio for name, nbytes in before.items()}

        def scaled(values: Mapping[str, float]) -> dict[str, float]:
            renamed = {now.get(name, name): value for name, value in values.items()}
            return {name: value * factor.get(name, ratio) for name, value in renamed.items()}

        workspace = {name: round(value) for name, value in scaled(seen.workspace).items()}
        took = seen.step_seconds * ratio
        return replace(seen, seconds=scaled(seen.seconds), workspace=workspace, step_seconds=took, curve=()), old


def _renamed(old: tuple[str, ...], new: tuple[str, ...]) -> dict[str, str]:
    """The names in another trace of the ops of one; empty if the traces are not alike."""
    if [_NUMBERS.sub("", name) for name in old] != [_NUMBERS.sub("", name) for name in new]:
        return {}
    return dict(zip(old, new, strict=True))


def _touched(graph: Graph) -> dict[str, int]:
    return {node.name: sum(map(graph.nbytes, (*node.inputs, *graph.tensors(node)))) for node in graph}


def _batches(old: Specs, new: Specs) -> tuple[int, int] | None:
    """The two batch sizes, if that is all in which the inputs of two traces differ."""
    if len(old) != len(new):
        return None
    pairs = set()
    for (dtype, before), (other, after) in zip(old, new, strict=True):
        if (dtype, before) == (other, after):
            continue
        if dtype != other or not before or not after or before[1:] != after[1:] or None in (*before, *after):
            return None
        pairs.add((before[0], after[0]))
    found = pairs.pop() if len(pairs) == 1 else (0, 0)
    return (int(found[0] or 0), int(found[1] or 0)) if all(found) else None


class KnownProfiles:
    """Profiles of one step, whatever its budget.

    Attributes:
        in_use: bytes that are taken besides the step; None if that is not known.
    """

    def __init__(self, engine: Engine, trace: Trace, others: BatchProfiles) -> None:
        """
        Args:
            engine: device and options.
            trace: the step, already read.
            others: of the same function.
        """
        self._trace = trace
        self._others = others
        settings = engine.settings
        self._scales = settings.observes and not settings.target.is_gpu  # what cuDNN chooses does not scale
        self.in_use = engine.memory.in_use_alone
        self._memory = engine.settings.target.memory
        self._key = trace.fingerprint()
        self._cache = ProfileCache(engine.settings.options.cache_directory)

    def find(self) -> tuple[Observation, str] | None:
        """What was observed before, and where; nothing while the memory in use besides the step is unknown."""
        if self.in_use is None:
            return None
        seen = self._cache.load(self._key, self.in_use, self._trace.step.order, self._memory)
        if seen is not None:
            return seen, "op times and memory were measured by an earlier process"
        scaled = self._others.scaled(self._trace) if self._scales else None
        if scaled is None:
            return None
        seen, batch = scaled
        seen = replace(seen, base=seen.base + self.in_use)
        return seen, f"op times and memory are scaled from batch {batch}, which was observed"

    def keep(self, seen: Observation) -> None:
        """Keep an observation, in the cache and for other batch sizes."""
        if self.in_use is None:
            return
        self._cache.store(self._key, seen, self.in_use)
        self._others.add(self._trace, replace(seen, base=seen.base - self.in_use))

"""Profiles of steps on disk: what an observed step measured, found again by the graph and the device it ran on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import fields
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

from custom_ops.jit.cache import MALFORMED, Cache, UnusableError
from graph_passes.analysis.memory.observe import Observation
from graph_passes.graph.ir import Graph

FORMAT = 4
LARGEST = 64 << 20  # bytes of a file: ten times what a step of 24,000 ops takes
LONGEST = 1e5  # seconds of a step


def fingerprint(graph: Graph, facts: Mapping[str, Any]) -> str:
    """A digest of everything an observation depends on.

    Args:
        graph: the graph; its ops, edges, shapes and dtypes count, attribute values that do not change shapes do not.
        facts: the budget, and the device with its software (`devices.conditions`), as JSON-able values.
    """
    state = hashlib.sha256(json.dumps([FORMAT, facts], sort_keys=True, default=str).encode())
    for node in graph:
        specs = [graph.specs.get(tensor) for tensor in graph.tensors(node)]
        state.update(f"{node.name}|{node.op}|{node.inputs}|{node.control}|{specs}\n".encode())
    return state.hexdigest()[:32]


class ProfileCache:
    """A `Cache` of observations; an unusable folder or file is the same as an empty one.

    Each process has other memory in use besides the step, so `load` adapts an observation to the memory in use now. Any
    program may have written a file, so `load` rejects values that no step could have measured.
    """

    def __init__(self, directory: str) -> None:
        self._cache = Cache(Path(directory) / "profiles", LARGEST) if directory else None

    def load(self, key: str, in_use: int, ops: Collection[str], most: int) -> Observation | None:
        """The observation stored under `key`, if there is one.

        Args:
            key: see `fingerprint`.
            in_use: bytes that are taken before the step.
            ops: the names of its ops.
            most: bytes of the device's memory.
        """

        def parsed(data: bytes) -> Observation:
            try:
                found, before = _observation(json.loads(data, parse_constant=_refuse))
                _require_possible(found, before, frozenset(ops), most)
            except MALFORMED as error:
                raise UnusableError(str(error)) from error
            return Observation(**{**_fields(found), "base": found.base - before + in_use, "least_base": 0})

        return None if self._cache is None else self._cache.find(key, parsed)

    def store(self, key: str, observation: Observation, in_use: int) -> None:
        """Keep `observation` of a step before which `in_use` bytes were taken."""
        if self._cache is None:
            return
        with suppress(ValueError):  # a number that JSON has not; the next process observes again
            text = json.dumps({**_fields(observation), "in_use": in_use}, allow_nan=False)
            self._cache.keep(key, text.encode())


def _fields(observation: Observation) -> dict[str, Any]:
    return {field.name: getattr(observation, field.name) for field in fields(Observation)}


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} in a profile")


def _observation(profile: Any) -> tuple[Observation, int]:
    """What a file says, and the bytes in use before that step; all types are right."""
    before = profile.pop("in_use")
    profile["curve"] = tuple((name, size) for name, size in profile["curve"])
    found = Observation(**profile)
    counts = [
        before,
        found.base,
        found.least_base,
        found.peak,
        *found.workspace.values(),
        *(size for _, size in found.curve),
    ]
    times = [found.step_seconds, *found.seconds.values()]
    if not all(type(count) is int for count in counts) or not all(type(time) in (int, float) for time in times):
        raise TypeError("a profile with something else than numbers")
    return found, before


def _require_possible(found: Observation, before: int, ops: frozenset[str], most: int) -> None:
    """Raise ValueError if no step with these ops can have been observed so."""
    if found.seconds.keys() != ops or found.workspace.keys() != ops or not {name for name, _ in found.curve} <= ops:
        raise ValueError("a profile of other ops")
    if not all(isfinite(time) and 0 <= time <= LONGEST for time in (found.step_seconds, *found.seconds.values())):
        raise ValueError("a profile with impossible times")
    if not 0 <= found.peak <= most or not 0 <= before <= most or not abs(found.base) <= most:
        raise ValueError("a profile with more bytes than the device has")
    if not found.curve or not all(0 <= size <= found.peak for _, size in found.curve):
        raise ValueError("a profile with a curve above its peak")
    # while an op ran, there was its workspace, the base and buffers, all within the peak
    if not all(-most <= size and size + found.base <= found.peak for size in found.workspace.values()):
        raise ValueError("a profile with more workspace than its peak has room for")

"""Times of steps with and without regions, kept on disk; they say whether stitching made a step faster."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from tensorflow.core.framework.graph_pb2 import GraphDef

from custom_ops.jit.cache import Cache
from custom_ops.timing.remembered import Remembered
from tfmem.timing.ab_timing import Times

FORMAT = "fusion times 3"
_LARGEST = 1 << 10  # bytes of a file


def choices(directory: str) -> Remembered[Times]:
    """The times of steps; `directory` is that of all caches, "" keeps nothing."""
    return Remembered(FORMAT, Cache(Path(directory) / "choices", _LARGEST) if directory else None, _written, _read)


def key_of(known: Remembered[Times], stitched: GraphDef, facts: Mapping[str, Any]) -> str:
    """The cache key of times: the ops that run, and the device with its software (`devices.conditions`).

    The order in which the functions were added to the graph makes no difference.
    """
    functions = sorted(function.SerializeToString(deterministic=True) for function in stitched.library.function)
    body = GraphDef(node=stitched.node, versions=stitched.versions)
    return known.key(facts, body.SerializeToString(deterministic=True), *functions)


def _written(times: Times) -> dict[str, Any]:
    return {"given": times.given, "stitched": times.stitched, "tuned": times.tuned, "noise": times.noise}


def _read(found: Any) -> Times:
    times = Times(float(found["given"]), float(found["stitched"]), bool(found["tuned"]), float(found["noise"]))
    numbers = (times.given, times.stitched, times.noise)
    if not (all(map(isfinite, numbers)) and min(times.given, times.stitched) > 0 and times.noise >= 0):
        raise ValueError("times that no step can have")
    return times

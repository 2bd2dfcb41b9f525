"""What was found out about a stitched step, kept on disk: whether it is faster than the step as it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from tensorflow.core.framework.graph_pb2 import GraphDef

from custom_ops.jit.cache import MALFORMED, Cache, UnusableError, digest
from tfmem.timing.ab_timing import Times

FORMAT = "fusion times 1"
_LARGEST = 1 << 10  # bytes of a file


class Choices:
    """A `Cache` of times; an unusable folder or file is the same as an empty one."""

    def __init__(self, directory: str) -> None:
        """`directory`: of all caches; "" keeps nothing."""
        self._cache = Cache(Path(directory) / "choices", _LARGEST) if directory else None

    def find(self, key: str) -> Times | None:
        """What is known under a key."""
        return None if self._cache is None else self._cache.find(key, _parsed)

    def keep(self, key: str, times: Times) -> None:
        """Let other processes know."""
        if self._cache is not None:
            self._cache.keep(key, json.dumps({"given": times.given, "stitched": times.stitched}).encode())


def key_of(stitched: GraphDef, facts: Mapping[str, Any]) -> str:
    """What times are kept under: the ops that run, and the device with its software (`devices.conditions`)."""
    known = json.dumps(facts, sort_keys=True, default=str)
    return digest(FORMAT, known, stitched.SerializeToString(deterministic=True))


def _parsed(data: bytes) -> Times:
    try:
        found = json.loads(data)
        times = Times(float(found["given"]), float(found["stitched"]))
    except MALFORMED as error:
        raise UnusableError(str(error)) from error
    if not (isfinite(times.given) and isfinite(times.stitched) and min(times.given, times.stitched) > 0):
        raise UnusableError("times that no step can have")
    return times

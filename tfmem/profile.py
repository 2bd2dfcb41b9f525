"""Profiles of steps on disk: what an observed step measured, found again by the graph and the device it ran on."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graph_passes.cost.observe import Observation
from graph_passes.ir import Graph

FORMAT = 2


def fingerprint(graph: Graph, facts: Mapping[str, Any]) -> str:
    """A digest of everything an observation depends on.

    Args:
        graph: the graph; its ops, edges, shapes and dtypes count, attribute values that do not change shapes do not.
        facts: the budget, and the device with its software (`devices.conditions`), as JSON-able values.
    """
    digest = hashlib.sha256(json.dumps([FORMAT, facts], sort_keys=True, default=str).encode())
    for node in graph:
        specs = [graph.specs.get(tensor) for tensor in graph.tensors(node)]
        digest.update(f"{node.name}|{node.op}|{node.inputs}|{node.control}|{specs}\n".encode())
    return digest.hexdigest()[:32]


class ProfileCache:
    """A folder of observations; an unusable folder or file is the same as an empty one.

    What is in use besides a step is another process's own: a base is stored as what is beyond that.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory) / "profiles" if directory else None

    def load(self, key: str, in_use: int | None) -> Observation | None:
        """The observation stored under `key`, if there is one, as of a step before which `in_use` bytes are taken.

        None, where that is not known, finds nothing and stores nothing.
        """
        if self._directory is None or in_use is None:
            return None
        try:
            values = json.loads((self._directory / f"{key}.json").read_text())
            values["curve"] = tuple((name, size) for name, size in values["curve"])
            values["base"] += in_use
            return Observation(**values)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def store(self, key: str, observation: Observation, in_use: int | None) -> None:
        """Write aside, then rename, so that a reader never sees half a file; `in_use` as in `load`."""
        if self._directory is None or in_use is None:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            handle, path = tempfile.mkstemp(dir=self._directory, suffix=".tmp")
            with os.fdopen(handle, "w") as file:
                json.dump(observation.__dict__ | {"base": observation.base - in_use}, file)
            Path(path).replace(self._directory / f"{key}.json")
        except OSError:
            return  # a profile is a convenience; the next process observes again

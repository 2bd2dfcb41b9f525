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

FORMAT = 1


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
    """A folder of observations; an unusable folder or file is the same as an empty one."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory) / "profiles" if directory else None

    def load(self, key: str) -> Observation | None:
        """The observation stored under `key`, if there is one."""
        if self._directory is None:
            return None
        try:
            values = json.loads((self._directory / f"{key}.json").read_text())
            values["curve"] = tuple((name, size) for name, size in values["curve"])
            return Observation(**values)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def store(self, key: str, observation: Observation) -> None:
        """Write aside, then rename, so that a reader never sees half a file."""
        if self._directory is None:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            handle, path = tempfile.mkstemp(dir=self._directory, suffix=".tmp")
            with os.fdopen(handle, "w") as file:
                json.dump(observation.__dict__, file)
            Path(path).replace(self._directory / f"{key}.json")
        except OSError:
            return  # a profile is a convenience; the next process observes again

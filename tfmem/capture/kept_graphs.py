"""Graphs as Grappler left them, on disk: a second process that traces the same step does not run Grappler again.

Grappler's result follows from its input, so a file's name is a digest of all of that: the graph with its library and
what has to survive, the configuration, the device, TensorFlow with its environment, and the CPU, which folds constants.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf
from google.protobuf.message import DecodeError, Message
from tensorflow.core.framework.graph_pb2 import GraphDef

from custom_ops.code_digest import code_digest
from custom_ops.jit.cache import Cache, UnusableError, digest

FORMAT = "graphs 1"
FEWEST = 1000  # ops of a graph that is kept: Grappler takes a tenth of a second for so many
LARGEST = 64 << 20  # bytes of a file


@dataclass(frozen=True)
class KeptGraphs:
    """A folder of graphs; an unusable folder or file counts as an empty one.

    Attributes:
        directory: the cache's; "" keeps nothing.
        facts: what Grappler's result depends on besides its input, as JSON-able values.
    """

    directory: str
    facts: Mapping[str, Any]

    def get(self, count: int, inputs: tuple[Message, ...], make: Callable[[], GraphDef]) -> GraphDef:
        """What `make` makes of the inputs, or what a process made of them before.

        Args:
            count: ops of the graph.
            inputs: all that `make` reads.
            make: runs Grappler. What it raises is not kept.
        """
        if not self.directory or count < FEWEST:
            return make()
        cache, key = Cache(Path(self.directory) / "graphs", LARGEST), self._key(inputs)
        found = cache.find(key, _parsed)
        if found is None:
            found = make()
            data = found.SerializeToString()
            if len(data) < LARGEST:
                cache.keep(key, data)
        return found

    def _key(self, inputs: tuple[Message, ...]) -> str:
        known = {**self.facts, "tensorflow": tf.version.GIT_VERSION, "code": code_digest()}
        text = json.dumps(known, sort_keys=True, default=str)
        return digest(FORMAT, text, *(each.SerializeToString(deterministic=True) for each in inputs))


def _parsed(data: bytes) -> GraphDef:
    try:
        return GraphDef.FromString(data)
    except DecodeError as error:
        raise UnusableError(str(error)) from error

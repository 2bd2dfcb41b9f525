"""Steps that are one of several replicas: what distinguishes them from a step that runs by itself."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

from graph_passes.graph import ops

_SCOPE = re.compile(r"(?:^|/)replica_[1-9][0-9]*(?:/|$)")  # TensorFlow names the first replica's ops without one


class DeviceNode(Protocol):
    """A node of a graph, or of a GraphDef."""

    @property
    def name(self) -> str: ...

    @property
    def op(self) -> str: ...

    @property
    def device(self) -> str: ...


def shared_by(nodes: Iterable[DeviceNode]) -> str:
    """What ties a step to other replicas of it, in words; "" if nothing does.

    Ops of other replicas and workers are waited for, so an order of this one's ops may wait for itself.
    """
    devices, replica = set(), ""
    for node in nodes:
        if node.op in ops.COLLECTIVES:
            return f"'{node.name}' ({node.op}) waits for other replicas"
        devices.add(node.device)
        if not replica and _SCOPE.search(node.name):
            replica = node.name
    return f"'{replica}' is of another replica" if replica and len(devices) > 1 else ""

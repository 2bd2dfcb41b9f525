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


def are_one_device(names: Iterable[str]) -> bool:
    """Whether names of devices, in full or in part, can all be of one: "/device:CPU:0" and "/job:localhost/task:0"."""
    known: dict[str, str] = {}
    for name in names:
        for part in name.split("/"):
            kind, _, number = part.removeprefix("device:").partition(":")
            of_worker = kind in ("job", "replica", "task")
            said = {kind: number} if of_worker else {"kind": kind.upper(), "number": number}
            for field, value in said.items():
                if value not in ("", "*") and known.setdefault(field, value) != value:
                    return False
    return True


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

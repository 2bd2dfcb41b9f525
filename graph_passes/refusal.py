"""One reason why something stays unchanged, with what it is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graph_passes.graph.ir import TensorId

if TYPE_CHECKING:
    from graph_passes.refusals import Reason

_NODES = frozenset({"node", "reader", "other"})  # arguments that are names of nodes


@dataclass(frozen=True)
class Refusal:
    """Why something stays unchanged.

    Attributes:
        reason: the kind.
        arguments: (name, value) of what it is about.
    """

    reason: Reason
    arguments: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        return self.reason.sentence.format(**dict(self.arguments))

    def renamed(self, names: Mapping[str, str]) -> Refusal:
        """This refusal about a graph of the same ops, whose nodes have other names."""
        return Refusal(self.reason, tuple((key, _renamed(key, value, names)) for key, value in self.arguments))


class RefusedError(Exception):
    """Something cannot be done, or stays as it is.

    Attributes:
        refusal: what, and why.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


def _renamed(key: str, value: object, names: Mapping[str, str]) -> object:
    if isinstance(value, Refusal):
        return value.renamed(names)
    if isinstance(value, TensorId):
        return TensorId(names.get(value.node, value.node), value.index)
    return names.get(value, value) if key in _NODES and isinstance(value, str) else value

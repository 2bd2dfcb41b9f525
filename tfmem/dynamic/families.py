"""Kinds of nodes with any number of children: one kind for each number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from custom_ops.errors import DynamicError
from tfmem.dynamic.kinds import NodeKind

_MOST = 64  # numbers of children


def expanded(kinds: Mapping[str, NodeKind]) -> dict[str, NodeKind]:
    """The kinds, those with a range of children replaced by one for each number, called `name/number`.

    Raises:
        DynamicError: a range is none, or too long.
    """
    found: dict[str, NodeKind] = {}
    for name, kind in kinds.items():
        if not isinstance(kind, NodeKind) or not isinstance(kind.children, range):
            found[name] = kind
            continue
        if not 0 < len(kind.children) <= _MOST or min(kind.children) < 0:
            raise DynamicError(f"kind '{name}' has {kind.children} children; expected 1 to {_MOST} numbers from 0 on")
        for count in kind.children:
            found[member(name, count)] = replace(kind, children=count)
    return found


def families(kinds: Mapping[str, NodeKind]) -> dict[str, range]:
    """The numbers of children of those kinds that have a range of them."""
    found = {name: kind.children for name, kind in kinds.items() if isinstance(kind, NodeKind)}
    return {name: children for name, children in found.items() if isinstance(children, range)}


def member(name: str, children: int) -> str:
    """The name of the kind with so many children."""
    return f"{name}/{children}"

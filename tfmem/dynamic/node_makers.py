"""What makes the nodes of a handle, and says why it makes none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from custom_ops.errors import DynamicError
from tfmem.dynamic.batch import Node


class NodeMaker(Protocol):
    """What `Handle.node` is."""

    def __call__(self, kind: str, *given: Any) -> Node:
        """A node of a kind, its children, then its integer arguments."""


def no_such_node(
    forms: Mapping[str, Any], kinds: Iterable[str], families: Mapping[str, Any], kind: Any, given: int
) -> DynamicError:
    """Why there is no node of a kind with so many children and arguments."""
    form = forms.get(kind) if isinstance(kind, str) else None
    if form is None:
        return DynamicError(f"there is no kind of node {kind!r}; expected one of {', '.join(kinds)}")
    if isinstance(form, tuple):
        _, children, count = form
        return DynamicError(
            f"node('{kind}', ...) got {given} values; expected {count}: {children} children, then "
            f"{count - children} integer arguments"
        )
    _, children, count = next(iter(form.values()))
    return DynamicError(f"node('{kind}', ...) got {given - (count - children)} children; expected {families[kind]}")

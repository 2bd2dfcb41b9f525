"""The line of the user's program that made an op, for reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfmem.capture.captured import Captured
from tfmem.user_frames import innermost


def source_lines(captured: Captured, names: Iterable[str]) -> dict[str, str]:
    """Where ops of a captured graph or of its functions were written, as "cell.py:31, in call"; only what is known.

    Args:
        captured: the graph, and the graphs that it was traced into.
        names: of ops; those of functions that were inlined, too.
    """
    wanted = {name: _forms(captured, name) for name in names}
    looked_for = {form for forms in wanted.values() for form in forms}
    found: dict[str, set[str]] = {}
    for graph in _graphs(captured):
        for name in looked_for:
            try:
                made = graph.get_operation_by_name(name)
            except (KeyError, ValueError):
                continue
            line = _line(made)
            if line:
                found.setdefault(name, set()).add(line)
    lines: dict[str, str] = {}
    for name, forms in wanted.items():
        known = next((found[form] for form in forms if form in found), set())
        if len(known) == 1:  # else functions have ops of one name
            lines[name] = next(iter(known))
    return lines


def _forms(captured: Captured, name: str) -> list[str]:
    """The names that the op may have in the graph that it was traced into, the likeliest first."""
    origin = captured.origins.get(name)
    parts = name.split("/")
    return [*([origin[1]] if origin else []), *("/".join(parts[place:]) for place in range(len(parts)))]


def _graphs(captured: Captured) -> Iterator[Any]:
    """The graphs that the program was traced into, and those of the functions that they call."""
    waiting, seen = list(captured.traced.values()), set[int]()
    while waiting:
        graph = waiting.pop()
        if graph is None or id(graph) in seen:
            continue
        seen.add(id(graph))
        yield graph
        # Relies on the private registry of a graph: nothing public gives the traced body of a loop.
        waiting += [getattr(function, "graph", None) for function in getattr(graph, "_functions", {}).values()]


def _line(made: tf.Operation) -> str:
    frame = innermost(list(made.traceback or ()))
    return f"{Path(frame.filename).name}:{frame.lineno}, in {frame.name or '<lambda>'}" if frame else ""

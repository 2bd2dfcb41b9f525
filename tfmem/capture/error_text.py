"""What an error says, in one line.

TensorFlow's errors of a graph begin with "Graph execution error:" and where the op was made; what was wrong comes last,
in front of the nodes ("[[{{node x}}]]").
"""

from __future__ import annotations

_NODES = "\n\t [["


def said(error: Exception) -> str:
    """The line that says what was wrong; the error's type if it says nothing."""
    before, nodes, _ = str(error).partition(_NODES)
    lines = before.strip().splitlines()
    return lines[-1 if nodes else 0].strip() if lines else type(error).__name__

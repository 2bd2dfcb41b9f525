"""What TensorFlow is told when it asks for the gradient of a stitched op."""

from __future__ import annotations

from typing import Any

from custom_ops.errors import GradientError

OP = "TfmemFusion"


def register_gradient() -> None:
    """Tells TensorFlow; once, when the op library is loaded.

    A function, or a SavedModel, that was stitched has the gradient of what it was, and never comes here.
    """
    import tensorflow as tf

    tf.RegisterGradient(OP)(_refuse)


def _refuse(op: Any, *_: Any) -> None:
    raise GradientError(
        f"'{op.name}' ({OP}) runs many ops of a graph that was optimised, and has no gradient of its own; take the "
        "gradient in the graph as it was and optimise that together with the gradient, or leave 'fusion' out of passes"
    )

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
        f"'{op.name}' ({OP}) is a fused op of an optimised graph, and has no gradient. Take the gradient in the "
        "original graph and optimise both together, or leave 'fusion' out of passes"
    )

"""The error that TensorFlow gets when it asks for the gradient of a fused op."""

from __future__ import annotations

from typing import Any

from custom_ops.errors import GradientError

OP = "TfmemFusion"


def register_gradient() -> None:
    """Register the error with TensorFlow; once, when the op library is loaded.

    A fused function or SavedModel has the gradient of the original, and never comes here.
    """
    import tensorflow as tf

    tf.RegisterGradient(OP)(_refuse)


def _refuse(op: Any, *_: Any) -> None:
    raise GradientError(
        f"'{op.name}' ({OP}) is a fused op of an optimised graph, and has no gradient. Take the gradient in the "
        "original graph and optimise both together, or leave 'fusion' out of passes"
    )

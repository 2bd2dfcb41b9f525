"""Parameters of which each replica of a distribution strategy has a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from custom_ops.errors import DynamicError


def is_mirrored(variable: object) -> bool:
    """Whether each replica of a distribution strategy has a copy of it."""
    return isinstance(variable, tf.Variable) and isinstance(variable, tf.distribute.DistributedValues)


def handles_of(variable: Any) -> tuple[Any, ...]:
    """The resources that a variable stands for; of a mirrored one, that of each replica of this process."""
    if is_mirrored(variable):
        return tuple(each.handle for each in variable.values)
    return () if getattr(variable, "handle", None) is None else (variable.handle,)


def require_alone(parameters: Sequence[tf.Variable]) -> None:
    """Refuse to update the parameters of one replica, from which the others would differ.

    Raises:
        DynamicError: each replica has a copy of them, or one of several replicas runs.
    """
    strategies = [each.distribute_strategy for each in parameters if is_mirrored(each)]
    if not strategies and not tf.distribute.in_cross_replica_context():
        replica = tf.distribute.get_strategy()
        strategies = [replica] if replica.num_replicas_in_sync > 1 else []
    if strategies:
        raise DynamicError(
            f"Handle.step would update the parameters of one replica alone, under {type(strategies[0]).__name__}; in "
            "what strategy.run calls, give the gradients of Handle.forward_backward to the apply_gradients of a Keras "
            "optimizer, which sums them over all replicas"
        )

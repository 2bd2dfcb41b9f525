"""The results of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf


@dataclass(frozen=True)
class Outcome:
    """The results of a batch.

    Attributes:
        losses: the loss of each example, `[examples]`, of the parameters' type.
        gradients: the gradients of the sum of the losses, for each parameter in order: a tensor of its shape, or
            `tf.IndexedSlices` for a table that is only looked up, where there is one replica. Empty if there are none.
        outputs: the outputs of the node kinds, `[nodes, width]`; 0 for a node whose kind has none. A gradient
            through them raises `GradientError`.
        states: the states of all nodes, `[nodes, width]`, if `states` was set.
    """

    losses: tf.Tensor
    gradients: tuple[tf.Tensor | tf.IndexedSlices, ...] = ()
    outputs: tuple[tf.Tensor, ...] = ()
    states: tuple[tf.Tensor, ...] = ()

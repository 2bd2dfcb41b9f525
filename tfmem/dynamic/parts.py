"""A batch that needs more memory than there is runs in parts; the results are those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import tensorflow as tf

from custom_ops.dynamic.op import seed_of
from custom_ops.errors import warn
from tfmem.dynamic.batch import Batch
from tfmem.dynamic.dtypes import computed
from tfmem.dynamic.optimizers import Optimizer

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices
Parts: TypeAlias = tuple[tf.Tensor, tuple[tf.Tensor, ...], tuple[Gradient, ...]]  # losses, outputs, gradients
Run: TypeAlias = Callable[[Batch, tf.Tensor | None, int | tf.Tensor], Parts]
InParts: TypeAlias = Callable[[Run, Batch, tf.Tensor | None, int | tf.Tensor], Parts]


def in_parts(run: Run, batch: Batch, loss_weights: tf.Tensor | None, seed: int | tf.Tensor) -> Parts:
    """Losses, outputs and gradients of a batch: by one call of `run`, or as those of halves if memory is short.

    Each part has another seed, so dropout drops other values than in the whole batch.

    Raises:
        tf.errors.ResourceExhaustedError: memory is short for one example.
    """
    try:
        return run(batch, loss_weights, seed)
    except tf.errors.ResourceExhaustedError:
        if _examples(batch) < 2:
            raise
    return in_halves(run, batch, loss_weights, seed)


def in_halves(run: Run, batch: Batch, loss_weights: tf.Tensor | None, seed: int | tf.Tensor) -> Parts:
    """Losses, outputs and gradients of a batch that is known to be too large, from its two halves."""
    count = _examples(batch)
    warn(  # without its size: Python shows equal warnings once
        "a batch needs more memory than there is: it runs in two parts, one after the other; give smaller batches to "
        "save the time of the attempt"
    )
    halves = []
    for first, end in ((0, count // 2), (count // 2, count)):
        with tf.device("/CPU:0"):
            half = Batch(*(ragged[first:end] for ragged in batch))
            own_seed = seed_of(seed) + (first << 32)
        halves.append(in_parts(run, half, None if loss_weights is None else loss_weights[first:end], own_seed))
    (losses, outputs, gradients), (more_losses, more_outputs, more_gradients) = halves
    return (
        tf.concat([losses, more_losses], 0),
        tuple(tf.concat(pair, 0) for pair in zip(outputs, more_outputs, strict=True)),
        tuple(map(_sum, gradients, more_gradients)),
    )


def apply(
    optimizer: Optimizer,
    number: tf.Tensor,
    parameters: Sequence[tf.Variable],
    slots: Sequence[tf.Variable],
    gradients: Sequence[Gradient],
) -> None:
    """Make the update that the op would make, with these gradients; `number` is the step's, from 1."""
    count = len(parameters)
    for place, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        if not parameter.trainable:
            continue
        variables = [parameter, *(slots[turn * count + place] for turn in range(len(optimizer.slots)))]
        wide = computed(parameter.dtype)
        if isinstance(gradient, tf.IndexedSlices):
            rows = gradient.indices
            own = [tf.cast(tf.gather(variable, rows), wide) for variable in variables]
            values = optimizer.update(number, tf.cast(gradient.values, wide), *own)
            for variable, value in zip(variables, values, strict=True):
                variable.scatter_update(tf.IndexedSlices(tf.cast(value, variable.dtype), rows))
        else:
            own = [tf.cast(variable, wide) for variable in variables]
            values = optimizer.update(number, tf.cast(gradient, wide), *own)
            for variable, value in zip(variables, values, strict=True):
                variable.assign(tf.cast(value, variable.dtype))


def _examples(batch: Batch) -> int:
    return int(batch.kinds.row_splits.shape[0]) - 1


def _sum(a: Gradient, b: Gradient) -> Gradient:
    """The sum of two gradients; a table's has each row once."""
    if not isinstance(a, tf.IndexedSlices):
        return a + b
    rows, place = tf.unique(tf.concat([a.indices, b.indices], 0))
    values = tf.math.unsorted_segment_sum(tf.concat([a.values, b.values], 0), place, tf.size(rows))
    return tf.IndexedSlices(values, rows, a.dense_shape)

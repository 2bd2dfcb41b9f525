"""Batches that `tf.data` makes in threads beside Python's, while the net trains on the batch before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from custom_ops.errors import DynamicError
from tfmem.dynamic.batch import Batch, as_batch


def dataset(
    examples: Any,
    batch_size: int,
    *,
    beside: Sequence[Any] = (),
    shuffle: bool = False,
    seed: int | None = None,
    drop_remainder: bool = False,
) -> tf.data.Dataset:
    """A dataset of batches of some of the examples. Its threads run C++ alone, so Python's lock holds up none of them.

    Args:
        examples: all graphs, as `Handle.batch` returns them.
        batch_size: examples of a batch; the last one may have fewer.
        beside: tensors that have something for each example, such as labels, or the rows of an input: `[examples,
            rows, width]`, padded or ragged.
        shuffle: whether each epoch has another order.
        seed: of the order.
        drop_remainder: whether a last batch that is smaller is left out.

    Returns:
        A `tf.data.Dataset` of `Batch`, or of tuples of a `Batch` and the parts of `beside`.

    Raises:
        DynamicError: `examples` is no batch, or a tensor has not something for each example.
    """
    batch = as_batch(examples)
    count = int(batch.kinds.nrows())
    others = [each if isinstance(each, tf.RaggedTensor) else tf.convert_to_tensor(each) for each in beside]
    for number, other in enumerate(others):
        found = int(other.nrows()) if isinstance(other, tf.RaggedTensor) else (other.shape[:1].as_list() or [None])[0]
        if found != count:
            raise DynamicError(f"beside[{number}] has shape {other.shape}; expected {count} rows, one for each example")

    def taken(indices: tf.Tensor) -> Any:
        chosen = Batch(*(tf.gather(ragged, indices) for ragged in batch))
        return (chosen, *(tf.gather(other, indices) for other in others)) if others else chosen

    numbers = tf.data.Dataset.range(count)
    if shuffle:
        numbers = numbers.shuffle(count, seed, reshuffle_each_iteration=True)
    numbers = numbers.batch(batch_size, drop_remainder=drop_remainder)
    return numbers.map(taken, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)

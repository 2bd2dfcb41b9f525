"""Steps as graphs of flat tensors: several ops take longer than a small batch runs on a GPU; one call of a graph does
not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from custom_ops.dynamic.codegen.gpu_program import DynamicProgram
from custom_ops.dynamic.op import seed_of
from tfmem.capture.early_results import with_early_results
from tfmem.dynamic.batch import Batch

Step = Callable[..., tuple[tf.Tensor, tuple[tf.Tensor, ...]]]


class FlatSteps:
    """The steps of a handle, each as a concrete function of flat tensors."""

    def __init__(self, dtype: tf.DType) -> None:
        """Start with none, for a net whose numbers have type `dtype`."""
        self._dtype = dtype
        self._lock = threading.Lock()
        self._traced: dict[tuple[str, int, bool, bool], Any] = {}

    def of(
        self, step: Step, text: str, program: DynamicProgram | None, has_weights: bool, has_seed: bool
    ) -> tf.types.experimental.ConcreteFunction:
        """A step as a graph of values and splits, weights if it has some, a seed if it has one.

        Args:
            step: runs a batch, with weights, a seed and a program.
            text: of the kinds.
            program: for a GPU.
            has_weights: whether losses have weights.
            has_seed: whether dropout has a seed.
        """

        def flat(*given: tf.Tensor) -> tuple[tf.Tensor, ...]:
            parts = (tf.RaggedTensor.from_row_splits(*given[i : i + 2], validate=False) for i in (0, 2, 4))
            weights, seed = given[6] if has_weights else None, given[-1] if has_seed else None
            losses, outputs = step(Batch(*parts), weights, seed, program)
            return losses, *outputs

        key = text, 0 if program is None else program.rows, has_weights, has_seed
        with self._lock:
            if key not in self._traced:
                signature = [tf.TensorSpec([None], tf.int32), tf.TensorSpec([None], tf.int64)] * 3
                signature += [tf.TensorSpec([None], self._dtype)] * has_weights
                signature += [tf.TensorSpec([], tf.int64)] * has_seed
                concrete = tf.function(flat, input_signature=signature).get_concrete_function()
                self._traced[key] = with_early_results(concrete)
            return self._traced[key]


def flat_tensors(batch: Batch, loss_weights: Any, seed: Any, dtype: tf.DType) -> list[tf.Tensor]:
    """What such a step takes."""
    given = [part for ragged in batch for part in (ragged.values, _long(ragged.row_splits))]
    given += [] if loss_weights is None else [tf.cast(loss_weights, dtype)]
    return given + ([] if seed is None else [seed_of(seed)])


def _long(splits: tf.Tensor) -> tf.Tensor:
    return splits if splits.dtype == tf.int64 else tf.cast(splits, tf.int64)

"""Batches of graphs: as tensors, and from nodes that Python made."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from custom_ops.errors import DynamicError
from tfmem.dynamic.extension import flatten_nodes

PADDING = -1


class Batch(NamedTuple):
    """Graphs as tensors; `docs/dynamic.md` has an example.

    Attributes:
        kinds: for each example the kind of each of its nodes, int32 `[examples, (nodes)]`.
        children: for each example the children of its nodes one after the other, as positions among the example's
            nodes, int32 `[examples, (children)]`.
        arguments: for each example the integer arguments of its nodes one after the other, int32
            `[examples, (arguments)]`.
    """

    kinds: tf.RaggedTensor
    children: tf.RaggedTensor
    arguments: tf.RaggedTensor


class Node(NamedTuple):
    """A node that Python made: `handle.node("pair", left, right, label)`."""

    kind: int
    children: tuple[Any, ...]
    arguments: tuple[int, ...]


@functools.cache
def node_type(forms: tuple[Any, ...]) -> type[Node]:
    """The type of nodes of handles whose kinds have the same names, children, states and arguments.

    Other handles refuse such nodes. A pickled or copied node is a plain `Node`, whose kind is only a number.
    """
    return type("Node", (Node,), {"__slots__": (), "__reduce__": lambda node: (Node, tuple(node))})


def flatten(*roots: Node, own: type[Node] | None = None) -> tuple[list[int], list[int], list[int]]:
    """Kinds, children and arguments of all nodes under `roots`, in order, each after its children and each once.

    Args:
        roots: of one graph.
        own: the type that nodes must have, unless they are plain ones; None: any type.

    Raises:
        DynamicError: a node depends on itself, or has another type.
    """
    kinds, children, arguments = (np.frombuffer(values, np.int32).tolist() for values, _ in _flat([roots], own))
    return kinds, children, arguments


def from_roots(examples: Sequence[Sequence[Node]], own: type[Node] | None = None) -> Batch:
    """A batch of graphs, each given by its roots; see `flatten`."""
    return from_bytes(_flat(examples, own))


def _flat(examples: Sequence[Sequence[Node]], own: type[Node] | None) -> tuple[tuple[bytes, bytes], ...]:
    with _refused("a graph"):
        return flatten_nodes(examples) if own is None else flatten_nodes(examples, (own, Node, tuple))


def from_lists(examples: Iterable[tuple[Sequence[int], Sequence[int], Sequence[int]]]) -> Batch:
    """A batch of examples that are lists of kinds, children and arguments.

    Raises:
        DynamicError: an example is something else.
    """
    columns = list(zip(*map(_three, examples), strict=True)) or [(), (), ()]
    with _refused("an example of kinds, children and arguments"):
        return _batch(list(map(_of_rows, columns)))


def listed(examples: Any) -> list[Any]:
    """The examples that a user gives.

    Raises:
        DynamicError: they are no sequence of examples.
    """
    if isinstance(examples, Node | Mapping | str) or not isinstance(examples, Iterable):
        raise DynamicError(f"the examples have type {type(examples).__name__}; expected a list of examples")
    with _refused("examples"):
        return list(examples)


def _three(example: Any) -> Any:
    if (
        not isinstance(example, tuple | list)
        or len(example) != 3
        or not all(hasattr(row, "__len__") for row in example)
    ):
        raise DynamicError(
            f"an example has type {type(example).__name__}; expected a node, a list of nodes, or lists of kinds, "
            "children and arguments"
        )
    return example


@contextlib.contextmanager
def _refused(what: str) -> Iterator[None]:
    """Errors of reading `what` as integers become a `DynamicError` that names it."""
    try:
        yield
    except DynamicError:
        raise
    except RecursionError:
        raise DynamicError(f"{what}: found a deep graph where a node or an integer is expected") from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DynamicError(f"{what}: {error}") from None


def from_bytes(columns: Iterable[tuple[bytes, bytes]]) -> Batch:
    """A batch of kinds, children and arguments: of each the values, int32, and the row splits, int64."""
    return _batch([(np.frombuffer(values, np.int32), np.frombuffer(splits, np.int64)) for values, splits in columns])


def _of_rows(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    splits = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=splits[1:])
    try:
        integers = map(operator.index, itertools.chain.from_iterable(rows))
        return np.fromiter(integers, np.int32, int(splits[-1])), splits
    except (TypeError, AttributeError, OverflowError) as error:
        raise DynamicError(
            f"an example holds something other than 32-bit integers; pass lists of integers: {error}"
        ) from None


def _batch(columns: Sequence[tuple[np.ndarray, np.ndarray]]) -> Batch:
    with tf.device("/CPU:0"):  # where the op reads them, also for a GPU
        # `from_row_splits` would take longer to make tensors of arrays
        tensors = [(tf.constant(values), tf.constant(splits)) for values, splits in columns]
        return Batch(*(tf.RaggedTensor.from_row_splits(*column, validate=False) for column in tensors))


def as_batch(given: Any) -> Batch:
    """A batch from what `tf.data` and Keras make of one: ragged tensors, or dense ones padded with -1.

    Args:
        given: a `Batch`, or a tuple or dict of the same three.

    Raises:
        DynamicError: it is none of these.
    """
    if isinstance(given, Mapping):
        missing = [name for name in Batch._fields if name not in given]
        if missing:
            raise DynamicError(f"the batch has no '{missing[0]}'; expected {', '.join(Batch._fields)}")
        given = tuple(given[name] for name in Batch._fields)
    if not isinstance(given, tuple | list) or isinstance(given, Node) or len(given) != 3:
        raise DynamicError(f"the batch has type {type(given).__name__}; expected kinds, children and arguments")
    with _refused("a batch of kinds, children and arguments"):
        return Batch(*map(_as_ragged, given))


def _as_ragged(tensor: Any) -> tf.RaggedTensor:
    if not isinstance(tensor, tf.RaggedTensor):
        tensor = tf.RaggedTensor.from_tensor(_in_32_bits(tf.convert_to_tensor(tensor)), padding=PADDING)
    elif isinstance(tensor.values, tf.Tensor) and tensor.values.shape.rank == 1 and tensor.dtype == tf.int32:
        return tensor  # as `from_lists` makes it; to ask for its shape takes longer than all else
    if tensor.shape.rank != 2:
        raise DynamicError(
            f"a tensor of the batch has shape {tensor.shape}; expected [examples, nodes], ragged or padded with -1"
        )
    return tensor if tensor.dtype == tf.int32 else tensor.with_flat_values(_in_32_bits(tensor.flat_values))


def _in_32_bits(tensor: tf.Tensor) -> tf.Tensor:
    """32-bit integers for the op; an integer that does not fit becomes the nearest that does, which the op refuses."""
    if not tensor.dtype.is_integer:
        raise DynamicError(f"found numbers of type {tensor.dtype.name} in a batch; expected integers")
    if tensor.dtype.max > tf.int32.max:
        tensor = tf.minimum(tensor, tf.constant(tf.int32.max, tensor.dtype))
    if tensor.dtype.min < tf.int32.min:
        tensor = tf.maximum(tensor, tf.constant(tf.int32.min, tensor.dtype))
    return tf.cast(tensor, tf.int32)

"""Which trace a call would get, and what its arguments say beyond that trace.

Relies on `ConcreteFunction.function_type`, which says how arguments are flattened, on `tf.data.IteratorSpec`, and on
how a `tf.function` completes the arguments of a call before it looks for a trace.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, MutableMapping
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import function_type_utils
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

from tfmem.capture.captured import op_name
from tfmem.capture.concrete_function import call_key, flat_arguments


def with_defaults(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """All arguments of a call, as the trace that `function` has for it takes them.

    A trace knows no defaults: what the call leaves out is filled in by the `tf.function`, which also brings keywords
    into their places and converts what its signature asks for.
    """
    if not isinstance(function, Function):
        return args, kwargs
    bound = function_type_utils.canonicalize_function_inputs(
        args, kwargs, function._function_type, function._default_values, function._is_pure
    )
    return bound.args, bound.kwargs


class IteratorTraces:
    """The traces that a `tf.function` gets when another calls it with the next element of its argument, an iterator.

    The other one relaxes shapes that change from iterator to iterator (`reduce_retracing`), and keeps what it traced:
    so does Keras's function.
    """

    def __init__(self, trace: Callable[[Any], ConcreteFunction]) -> None:
        """`trace` takes the structure of `tf.TypeSpec` of an element."""
        self._trace = trace
        self._outer = _relaxing()
        self._inner: MutableMapping[ConcreteFunction, ConcreteFunction] = weakref.WeakKeyDictionary()
        self._last: tuple[Callable[[], Any], Any] = (lambda: None, None)

    def of(self, iterator: Any) -> ConcreteFunction:
        """The trace for the elements of `iterator`."""
        known, traced = self._last
        if known() is not iterator:
            outer = self._outer.get_concrete_function(iterator)
            traced = self._inner.get(outer)
            if traced is None:
                try:
                    traced = self._inner[outer] = self._trace(_argument(outer)._element_spec)
                except BaseException:
                    self._forget()
                    raise
            self._last = weakref.ref(iterator), traced
        return traced

    def _forget(self) -> None:
        """Forget the last iterator, whose step could not be traced: TensorFlow relaxes no shape because of it."""
        known, self._outer = list(self._inner.items()), _relaxing()
        self._inner = weakref.WeakKeyDictionary(
            {self._outer.get_concrete_function(_argument(outer)): traced for outer, traced in known}
        )


def _relaxing() -> Any:
    return tf.function(lambda iterator: None, reduce_retracing=True, autograph=False)


def _argument(outer: ConcreteFunction) -> Any:
    return outer.structured_input_signature[0][0]


def is_iterator(source: object) -> bool:
    """Whether the elements' shapes are known before there is one."""
    return isinstance(source, tf.data.Iterator | tf.distribute.DistributedIterator)


def open_shapes(
    cf: ConcreteFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> dict[str, tuple[int, ...]]:
    """The shapes of those tensors among the arguments that the trace leaves open, by the names of their placeholders.

    Parts of sparse and ragged tensors stay open: they differ in every batch.
    """
    if all(placeholder.shape.is_fully_defined() for placeholder in cf.inputs):
        return {}
    flat = flat_arguments(cf, args, dict(kwargs or {}))
    given = [local for item in tf.nest.flatten((args, kwargs or {})) for local in _local_values(item)]
    whole = [tf.nest.flatten(item, expand_composites=True) for item in given]
    parts = {id(part) for item, found in zip(given, whole, strict=True) for part in found if part is not item}
    return {
        op_name(placeholder.name): tuple(tensor.shape)
        for placeholder, tensor in zip(cf.inputs, flat, strict=False)  # captures come behind
        if not placeholder.shape.is_fully_defined() and id(tensor) not in parts
    }


def shapes_key(args: tuple[Any, ...]) -> Hashable | None:
    """What tells calls of one trace apart by their shapes; None where an argument is no plain tensor."""
    given = (local for item in tf.nest.flatten(args) if item is not None for local in _local_values(item))
    return call_key(tuple(given), {})


def _local_values(item: Any) -> tuple[Any, ...]:
    """What an argument of a distribution strategy holds for each replica of this process; `item` of any other."""
    if isinstance(item, tf.distribute.DistributedValues) and not isinstance(item, tf.Variable):
        return tuple(getattr(item, "values", (item,)))
    return (item,)

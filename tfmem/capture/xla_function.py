"""A traced function that XLA runs for the shapes that it was compiled for; others run as before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf
from tensorflow.python.eager import cancellation
from tensorflow.python.framework import ops

from tfmem.capture.branches import with_selects
from tfmem.capture.captured import Captured
from tfmem.capture.concrete_function import ConcreteFunction, RestoredFunction, gradient_order, restore_concrete
from tfmem.capture.optionals import without_optionals
from tfmem.capture.xla_draws import with_own_draws


class XlaFunction(RestoredFunction):
    """Called eagerly with arguments of the known shapes, it runs with XLA. All else runs `otherwise`.

    XLA compiles for each set of shapes, which takes seconds to minutes; a call must not wait for that.
    """

    attributes: ClassVar[Mapping[str, Any]] = {"_XlaMustCompile": True}
    otherwise: ConcreteFunction
    shapes: tuple[tuple[int, ...], ...] = ()

    def _call_flat(self, tensor_inputs: Sequence[tf.Tensor], captured_inputs: Sequence[tf.Tensor]) -> Any:
        if self._is_compiled_for(tensor_inputs, captured_inputs):
            return self.run_flat([*tensor_inputs, *captured_inputs])
        return self.otherwise._call_flat(tensor_inputs, captured_inputs)

    def _is_compiled_for(self, tensor_inputs: Sequence[tf.Tensor], captured_inputs: Sequence[tf.Tensor]) -> bool:
        if not tf.executing_eagerly() or ops.get_default_graph().building_function or self._returns_handles:
            return False
        if shapes_of(tensor_inputs) != self.shapes or cancellation.context() is not None:
            return False
        return not gradient_order(self, [*tensor_inputs, *captured_inputs])


def shapes_of(tensors: Sequence[tf.Tensor]) -> tuple[tuple[int, ...], ...]:
    """The shape of each of some eager tensors."""
    return tuple(tensor._shape_tuple() for tensor in tensors)


def compilable(captured: Captured, on_a_gpu: bool) -> Captured:
    """`captured` without Optionals, for which XLA has no kernel, where their conditions can be followed.

    On a GPU a condition makes the host wait for its predicate, so small ones become selects there.
    """
    given = with_selects(captured) if on_a_gpu else captured
    return without_optionals(given) or with_selects(given)


def xla_function(
    cf: ConcreteFunction, captured: Captured, arguments: Sequence[tf.Tensor], otherwise: Any
) -> XlaFunction:
    """A function that XLA compiles in its first call.

    Args:
        cf: the trace.
        captured: its graph as traced (XLA has no kernels for some ops of Grappler's), made `compilable`.
        arguments: eager tensors with the shapes that it is for, without captures.
        otherwise: runs calls with other shapes.
    """
    function = restore_concrete(cf, captured, with_own_draws(captured.graph_def), kind=XlaFunction)
    assert isinstance(function, XlaFunction)
    function.otherwise, function.shapes = otherwise, shapes_of(arguments)
    function.kept_alive = (*function.kept_alive, otherwise)
    function.make_portable = lambda: getattr(otherwise, "portable", otherwise)
    return function

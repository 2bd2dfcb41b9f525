"""Calls a function's graph at once, where nobody asks for what TensorFlow's Python does around a call.

That takes longer than a small graph runs: the trace is looked up, gradient tapes, variables' watchers and cancellation
are served, options are written anew. In a plain call (see `plain_key`) there is none of it.

Relies on `execute.execute`, by which TensorFlow runs every eager op, on a function's name being one, and on what
`ConcreteFunction._call_flat` and `AtomicFunction.call_flat` do around it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from tensorflow.python.eager import cancellation, context, execute, record
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import dtypes, ops
from tensorflow.python.framework.ops import EagerTensor
from tensorflow.python.saved_model import save_context

from tfmem.capture.function import RestoredFunction
from tfmem.capture.grappler import options_without_grappler

_HANDLES = frozenset({dtypes.resource.as_datatype_enum, dtypes.variant.as_datatype_enum})


def plain_key(args: tuple[Any, ...]) -> Hashable | None:
    """The arguments' dtypes and shapes, by which plain calls choose their trace; None where a call is not plain.

    In a plain call nobody records gradients, cancels, distributes, saves or builds a graph, and all arguments are
    tensors other than handles.
    """
    if record.could_possibly_record() or not context.executing_eagerly() or cancellation.context() is not None:
        return None
    if ops.get_default_graph()._distribution_strategy_stack or save_context.in_save_context():
        return None
    key = []
    for arg in args:
        if type(arg) is not EagerTensor:
            return None
        dtype = arg._datatype_enum()
        if dtype in _HANDLES:
            return None
        key.append((dtype, arg._shape_tuple()))
    return tuple(key)


def direct_call(function: Any) -> DirectCall | None:
    """A way to call `function` in plain calls; None if it has none: it is not ours, captures what is made anew for each
    call, or returns handles."""
    if not isinstance(function, RestoredFunction):
        return None
    captured = list(function._captured_inputs)
    outputs = function.function_type.flat_outputs
    if not all(type(tensor) is EagerTensor for tensor in captured):
        return None
    if any(output.dtype.as_datatype_enum in _HANDLES for output in outputs):
        return None
    return DirectCall(function, captured)


class DirectCall:
    """Calls one `RestoredFunction` with the tensors that it was traced for."""

    def __init__(self, function: RestoredFunction, captured: list[EagerTensor]) -> None:
        self._function = function  # whose variables live as long as it does
        self._captured = captured
        self._atomic = function._inference_function
        self._name = self._atomic.name.decode()
        self._count = len(function.function_type.flat_outputs)
        self._pack = function.function_type.pack_output
        self._known: tuple[Any, tuple[Any, ...]] = (None, ())  # options of a call, and what they make of it

    def __call__(self, args: tuple[EagerTensor, ...]) -> Any:
        """What the function returns. The call has to be plain."""
        eager = context.context()
        known, attributes = self._known
        options = eager.function_call_options
        wanted = options.executor_type, options.config_proto_serialized
        if wanted != known:
            attributes = tuple(part for item in options_without_grappler(options).as_attrs().items() for part in item)
            self._known = wanted, attributes
        with atomic_function.InterpolateRuntimeError(self._atomic):
            outputs = execute.execute(self._name, self._count, [*args, *self._captured], attributes, eager)
        return self._pack(outputs or None)

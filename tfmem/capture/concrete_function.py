"""Captures a `ConcreteFunction` and restores one of the same signature and captures around another
graph.

Relies on TensorFlow's `FuncGraph`, `AtomicFunction` and `ConcreteFunction`: no public API makes a
function from a graph with inputs captured by reference and a structured signature. Calls rely on
`execute.execute`, by which TensorFlow runs every eager op, and on a function's name being one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.python.eager import cancellation, context, execute, record
from tensorflow.python.eager.polymorphic_function import atomic_function, concrete_function, function_context
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction
from tensorflow.python.framework import func_graph as func_graphs
from tensorflow.python.framework import ops
from tensorflow.python.framework.ops import EagerTensor
from tensorflow.python.ops import control_flow_util, gradients_util, resource_variable_ops
from tensorflow.python.saved_model import save_context

from custom_ops.errors import warn
from graph_passes.errors import GraphError
from tfmem.capture.build import annotate_handles, build_graph, own_library
from tfmem.capture.captured import Captured, op_name, side_effects, unique
from tfmem.capture.grappler import NO_GRAPPLER, options_without_grappler, without_grappler
from tfmem.capture.set_shapes import traced_graphs

__all__ = [
    "ConcreteFunction",
    "RestoredFunction",
    "asks_for_xla",
    "call_key",
    "call_traced",
    "capture_concrete",
    "flat_arguments",
    "is_distributed",
    "is_recorded",
    "restore_concrete",
    "strategies_of",
]

_WITH_HANDLES = (tf.resource, tf.variant)  # what they refer to counts, too
_HANDLES = tuple(dtype.as_datatype_enum for dtype in _WITH_HANDLES)


def capture_concrete(cf: ConcreteFunction) -> Captured:
    """The graph of a traced function, with the ops that its trace made sure would run.

    Captured variables' placeholders are renamed where their name holds a "/", which becomes a ".";
    and they carry the shape and dtype of the variable (`_handle_shapes`, `_handle_dtypes`).
    """
    graph = cf.graph
    graph_def = graph.as_graph_def()
    renamed = annotate_handles(graph_def, cf.inputs)
    operations = graph.get_operations()
    control = [op.name for op in graph.control_outputs]
    return Captured(
        graph_def=graph_def,
        feeds=tuple(f"{renamed.get(tensor.op.name, tensor.op.name)}:0" for tensor in cf.inputs),
        fetches=tuple(tensor.name for tensor in _outputs(cf)),
        control_fetches=unique([*control, *side_effects(operations)]),
        creation_order=tuple(node.name for node in graph_def.node),
        traced=traced_graphs(graph),
    )


def with_places(captured: Captured, cf: ConcreteFunction) -> Captured:
    """`captured`, with the device of each resource that `cf` captured: an op that names none runs where that lies."""
    captures = zip(reversed(captured.feeds), reversed(cf._captured_inputs), strict=False)
    places = {
        op_name(name): tensor.device
        for name, tensor in captures
        if type(tensor) is EagerTensor and tensor.dtype == tf.resource
    }
    graph_def = GraphDef()
    graph_def.CopyFrom(captured.graph_def)
    for node in graph_def.node:
        if node.name in places and not node.device:
            node.device = places[node.name]
    return replace(captured, graph_def=graph_def)


def _outputs(cf: ConcreteFunction) -> list[tf.Tensor]:
    """What `cf` returns. Once it was differentiated, TensorFlow lists behind that what its gradient reads."""
    return list(cf.outputs[: len(cf.function_type.flat_outputs)])


def call_key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable | None:
    """A key that decides which trace a `tf.function` chooses, if every argument is a plain tensor; else None.

    For calls that are made eagerly. Those with equal keys run the same trace. To ask the `tf.function` takes longer
    than a short step runs.
    """
    if kwargs:
        return None
    key: list[Hashable] = [_surroundings()]
    for arg in args:
        if type(arg) is not EagerTensor or arg._datatype_enum() in _HANDLES:
            return None
        key += arg._datatype_enum(), arg._shape_tuple()
    return tuple(key)


def _surroundings() -> Hashable:
    """The context that an eager call's trace depends on, too; None in the usual case, for speed."""
    distributed = ops.get_default_graph()._distribution_strategy_stack
    if distributed or save_context.in_save_context():
        return function_context.make_function_context()
    return None


def call_traced(cf: ConcreteFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """`cf(*args, **kwargs)` for arguments that were traced to `cf`: TensorFlow need not check them again."""
    return cf._call_flat(flat_arguments(cf, args, kwargs), captured_inputs=_captured_by(cf))


def _captured_by(cf: ConcreteFunction) -> list[tf.Tensor]:
    """`cf.captured_inputs`; TensorFlow searches these for structures and for values that each call makes again."""
    captures: list[Any] = cf._captured_inputs
    return list(captures) if set(map(type, captures)) <= {EagerTensor} else cf.captured_inputs


def gradient_order(cf: ConcreteFunction, tensors: Sequence[tf.Tensor]) -> int:
    """The highest order of gradient that a tape may take of a call of `cf` with these tensors.

    It is 0 where no tape records the call, and 2 for several tapes, a persistent tape, or a forward accumulator.
    """
    if not record.could_possibly_record():
        return 0
    for variable in cf.graph.variables:
        resource_variable_ops.variable_accessed(variable)
    return int(gradients_util.PossibleTapeGradientTypes(list(tensors)))


def flat_arguments(cf: ConcreteFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tf.Tensor]:
    """The tensors that a call hands over, without what the function captured; itself where `args` are those.

    A trace takes a value for each of its parameters: see `tfmem.capture.call_arguments.with_defaults`.
    """
    count = len(cf.inputs) - len(cf._captured_inputs)  # `captured_inputs` would make some of them again
    if not kwargs and len(args) == count and all(isinstance(arg, tf.Tensor) for arg in args):
        return list(args)
    return list(cf.function_type.unpack_inputs(cf.function_type.bind(*args, **kwargs)))


def is_distributed(cf: ConcreteFunction) -> bool:
    """Whether it was traced under a distribution strategy, or uses variables of one."""
    return bool(strategies_of(cf))


def strategies_of(cf: ConcreteFunction) -> list[Any]:
    """The distribution strategies under which it was traced, and those of its variables; each perhaps several times."""
    under = [mode.strategy for mode in cf.graph._distribution_strategy_stack]
    of_variables = [getattr(variable, "_distribute_strategy", None) for variable in cf.graph.variables]
    return [each for each in (*under, *of_variables) if each is not None]


def is_for_xla() -> bool:
    """Whether what is being traced is compiled by XLA, which has no kernels for ops of tfmem's.

    Relies on the context in which `tf.function(jit_compile=True)` traces.
    """
    return bool(control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph()))


def is_recorded(cf: ConcreteFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a gradient of this call may be asked for.

    Only the call itself may make captures that each call makes, as an instance key of a collective op.
    """
    if not record.could_possibly_record():
        return False
    captured = [tensor for tensor in cf._captured_inputs if isinstance(tensor, tf.Tensor)]
    return gradient_order(cf, [*flat_arguments(cf, args, kwargs), *captured]) > 0


def asks_for_xla(cf: ConcreteFunction) -> bool:
    """Whether it is of a `tf.function(jit_compile=True)`."""
    return bool(cf._attrs.get("_XlaMustCompile"))


class RestoredFunction(ConcreteFunction):
    """A `ConcreteFunction` whose graph is final: TensorFlow runs it without rewriting it again.

    Called eagerly, in a `tf.function` or as a signature of a SavedModel, Grappler stays off. What Grappler and tfmem
    put into it has no gradient, so the gradient is that of the original, which runs in its place where one may be
    asked for.
    """

    original: ConcreteFunction

    # What the runtime reads of the function, besides the attributes of the trace.
    attributes: ClassVar[Mapping[str, Any]] = {}

    # A function keeps weak references to the variables it uses; these keep them alive with the
    # rewritten one.
    kept_alive: tuple[object, ...] = ()

    # Makes the same function of a graph that can go into other graphs, where this one's cannot.
    make_portable: Callable[[], RestoredFunction] | None = None

    # What eager calls of a portable function run.
    _called_eagerly: RestoredFunction | None = None

    _warned = False

    # What calls were told last: a thread's options, and the attributes that they make.
    _told: tuple[object, tuple[Any, ...]] = (None, ())

    def _call_flat(self, tensor_inputs: Sequence[tf.Tensor], captured_inputs: Sequence[tf.Tensor]) -> Any:
        """Call the function without TensorFlow's Python code around a call, which takes longer than a small graph.

        A call that records gradients, can be cancelled, builds a graph or returns handles needs that code.
        """
        building = not tf.executing_eagerly() or ops.get_default_graph().building_function
        order = gradient_order(self, [*tensor_inputs, *captured_inputs])
        if order > (1 if building else 0):  # a gradient of first order changes the call when it is taken
            self._warn()
            return self.original._call_flat(tensor_inputs, captured_inputs)
        if self._called_eagerly is not None and not building:
            return self._called_eagerly._call_flat(tensor_inputs, captured_inputs)
        if order or building or cancellation.context() is not None or self._returns_handles:
            with without_grappler():
                return super()._call_flat(tensor_inputs, captured_inputs)
        return self.run_flat([*tensor_inputs, *captured_inputs])

    def _get_gradient_function(self) -> Callable[..., Any]:
        return self.original._get_gradient_function()

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            name = tf.compat.as_str(self.original.name)
            warn(
                f"'{name}' is called under a gradient tape, so the original function runs: the optimised one has no "
                "gradient. Optimise the function that takes the gradient, or call this one where no tape records"
            )

    @functools.cached_property
    def portable(self) -> RestoredFunction:
        """This function for other graphs and SavedModels; an eager call of the result calls this function."""
        if self.make_portable is None:
            return self
        portable = self.make_portable()
        portable._called_eagerly = self
        return portable

    @functools.cached_property
    def _returns_handles(self) -> bool:
        return any(output.dtype in _WITH_HANDLES for output in self.function_type.flat_outputs)

    def run_flat(self, tensors: list[tf.Tensor]) -> Any:
        """Run it eagerly on all of its inputs, captured ones last; no gradient is recorded."""
        eager, function = context.context(), self._inference_function
        told, attributes = self._told
        options = eager.function_call_options
        wanted = options.executor_type, options.config_proto_serialized
        if wanted != told:
            attributes = tuple(part for item in options_without_grappler(options).as_attrs().items() for part in item)
            self._told = wanted, attributes
        with atomic_function.InterpolateRuntimeError(function):
            count = len(self.function_type.flat_outputs)
            outputs = execute.execute(function.name.decode(), count, tensors, attributes, eager)
        return self.function_type.pack_output(outputs or None)


class _Gradient(concrete_function._DelayedRewriteGradientFunctions):
    """The gradient of calls of a rewritten function in a graph: when it is taken, they become calls of the original."""

    def __init__(self, function: atomic_function.AtomicFunction, original: ConcreteFunction) -> None:
        super().__init__(function, None)
        self._original = original

    def forward_backward(self, num_doutputs: int | None = None) -> tuple[Any, Any]:
        pair: tuple[Any, Any] = self._original._delayed_rewrite_functions.forward_backward(num_doutputs)
        return pair

    def _rewrite_forward_and_call_backward(self, op: tf.Operation, *doutputs: Any) -> Any:
        return self._original._get_gradient_function()(op, *doutputs)


def restore_concrete(
    cf: ConcreteFunction,
    captured: Captured,
    graph_def: GraphDef,
    feed_shapes: Mapping[str, tuple[int | None, ...]] | None = None,
    kind: type[RestoredFunction] = RestoredFunction,
) -> RestoredFunction:
    """A function that computes `graph_def` and is called as `cf` is.

    Args:
        cf: the function that was captured.
        captured: names the feeds, fetches and control fetches in `graph_def`.
        graph_def: the graph to run. Names of its nodes survive.
        feed_shapes: static shapes of feeds ("x:0"), where tighter than those of `cf`.
        kind: what it becomes; its attributes are those of the function.

    Returns:
        A function with the structured inputs and outputs, the captures and the variables of `cf`.

    Raises:
        GraphError: `graph_def` lacks a fetch, or a shape contradicts the one that `cf` was traced
        with.
    """
    graph = func_graphs.FuncGraph(f"{cf.graph.name}_tfmem")
    inputs = build_graph(graph, captured.feeds, *own_library(graph_def), feed_shapes or {})
    _set_signature(graph, cf, captured, inputs)

    attributes = {**dict(cf._attrs), **NO_GRAPPLER}
    for mark in ("_XlaMustCompile", "forward_function_name", "backward_function_name"):
        attributes.pop(mark, None)
    attributes.update(kind.attributes)
    name = concrete_function._inference_name(graph.name)
    atomic = atomic_function.from_func_graph(name, graph, attributes, cf.function_type)
    restored = kind(atomic)
    restored.original = cf
    restored._delayed_rewrite_functions = _Gradient(atomic, cf)
    restored._arg_keywords = cf._arg_keywords
    restored._num_positional_args = cf._num_positional_args
    restored.set_external_captures(cf._captured_inputs)
    restored.kept_alive = tuple(cf.graph.variables)
    return restored


def _set_signature(
    graph: func_graphs.FuncGraph, cf: ConcreteFunction, captured: Captured, inputs: list[tf.Tensor]
) -> None:
    internal = {id(original): restored for original, restored in zip(cf.inputs, inputs, strict=True)}
    graph.inputs = inputs
    for external, original in cf.graph.captures:
        graph.replace_capture(external, internal[id(original)])
    try:
        graph.outputs = [graph.get_tensor_by_name(name) for name in captured.fetches]
        graph.control_outputs = [graph.get_operation_by_name(name) for name in captured.control_fetches]
    except KeyError as error:
        raise GraphError(f"the rewritten graph lacks an op that the function has to run: {error}") from error
    outputs = {id(old): new for old, new in zip(_outputs(cf), graph.outputs, strict=True)}
    graph.structured_outputs = tf.nest.map_structure(
        lambda old: outputs.get(id(old), old), cf.structured_outputs, expand_composites=True
    )
    graph.structured_input_signature = cf.structured_input_signature
    graph.variables = cf.graph.variables


def input_specs(concrete: Any, given: Mapping[str, Any]) -> tuple[tuple[str, tuple[int | None, ...] | None], ...]:
    """Dtype and shape of each input of a `ConcreteFunction`; None where the rank is not known.

    Args:
        concrete: the function.
        given: shapes of inputs by name, in place of those that it has.
    """
    shapes = [tf.TensorShape(given.get(tensor.name, tensor.shape)) for tensor in concrete.inputs]
    return tuple(
        (tensor.dtype.name, None if shape.rank is None else tuple(shape))
        for tensor, shape in zip(concrete.inputs, shapes, strict=True)
    )

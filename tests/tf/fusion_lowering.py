"""Functions of TensorFlow's ops, lowered and evaluated by the definition in NumPy, beside what TensorFlow makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from custom_ops.expr import reference
from graph_passes.analysis.op_pattern import IN_KERNELS, patterns_of
from graph_passes.graph.ir import Graph, TensorId
from graph_passes.graph.ops import passed
from graph_passes.graph.serde import from_tf_graph
from graph_passes.lower.lower_nodes import LoweredKernel, Value, VariableValue, lower_kernel
from graph_passes.lower.shapes import Shapes

OUTSIDE = ("Placeholder", "Const", "NoOp", "ReadVariableOp")


class Lowered:
    """A function whose ops are one kernel, but for those that read variables.

    With `one_batch` the first dimensions of all arguments that are not known are taken for equal.

    Attributes:
        graph: what was traced.
        kernel: all of its ops that can be members of one.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        variables: Sequence[tf.Variable] = (),
        shapes: Sequence[Sequence[int | None]] | None = None,
        one_batch: bool = False,
    ) -> None:
        known = shapes or [value.shape for value in arguments]
        specs = [tf.TensorSpec(shape, value.dtype) for shape, value in zip(known, arguments, strict=True)]
        self._arguments = arguments
        self._variables = variables
        self._concrete = tf.function(function, autograph=False).get_concrete_function(*specs)
        self.graph: Graph = from_tf_graph(self._concrete.graph)
        placeholders = [tensor.op.name for tensor in self._concrete.inputs]
        self._given = dict(zip(placeholders, map(np.asarray, arguments), strict=False))
        handles = {id(outer): inner.op.name for outer, inner in self._concrete.graph.captures}
        self._held = {handles[id(variable.handle)]: variable.numpy() for variable in variables}
        found = patterns_of(self.graph)
        outside = {name: each for name, each in found.items() if each.pattern not in IN_KERNELS}
        unread = {name: each.reason for name, each in outside.items() if self.graph[name].op not in OUTSIDE}
        assert not unread, unread
        members = [name for name in found if name not in outside]
        outputs = [TensorId(tensor.op.name, tensor.value_index) for tensor in self._concrete.outputs]
        batches = [(TensorId(name), 0) for name in self._given if self.graph.specs[TensorId(name)].shape]
        sizes = Shapes(self.graph, [batches] if one_batch else ())
        self.kernel: LoweredKernel = lower_kernel(self.graph, members, outputs, sizes)

    def tensors(self) -> list[Any]:
        """What the program reads, in the shapes in which it does."""
        return [
            self._value(value).reshape([-1 if size is None else size for size in shape])
            for value, shape in zip(self.kernel.inputs, self.kernel.input_shapes, strict=True)
        ]

    def run(self) -> list[Any]:
        """What the program makes, by its definition: the outputs, then what the variables are given, in their order."""
        results = reference.run(self.kernel.program, self.tensors())
        outputs, given = [], {}
        for value, result in zip(self.kernel.outputs, results, strict=True):
            if isinstance(value, VariableValue):
                handle = self._handle(value)
                given[handle] = result.reshape(self._held[handle].shape)
            else:
                shape = self.graph.specs[value].shape
                outputs.append(result.reshape([-1 if size is None else size for size in shape]))
        return outputs + [given.get(handle, held) for handle, held in self._held.items()]

    def expected(self) -> list[Any]:
        """What TensorFlow makes; its variables are updated."""
        outputs = tf.nest.flatten(self._concrete(*map(tf.constant, self._arguments)))
        return [np.asarray(result) for result in (*outputs, *self._variables) if result is not None]

    def _handle(self, value: VariableValue) -> str:
        return passed(self.graph, self.graph[value.node].inputs[value.index]).node

    def _value(self, value: Value) -> Any:
        if isinstance(value, VariableValue):
            return self._held[self._handle(value)]
        node = self.graph[value.node]
        if node.op == "ReadVariableOp":
            return self._held[passed(self.graph, node.inputs[0]).node]
        if value.node in self._given:
            return self._given[value.node]
        return tf.make_ndarray(node.attrs["value"].tensor)

"""Whole steps as Grappler leaves them, as one region each, beside TensorFlow's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from custom_ops.expr import reference
from custom_ops.fusion.region import Assign, Call, Kernel, Read, Region, View
from graph_passes.analysis.op_pattern import IN_KERNELS, NodePattern, OpPattern, patterns_of
from graph_passes.graph.ir import Graph, TensorId, parse_input
from graph_passes.graph.ops import passed
from graph_passes.graph.order import topological
from graph_passes.graph.serde import attributes, from_graph_def
from graph_passes.passes.fuse.lower_region import Lowered, lower_region
from tfmem.capture.build import shaped_graph
from tfmem.capture.concrete_function import capture_concrete
from tfmem.capture.grappler import run_grappler


class Step:
    """A function of tensors and variables, whose ops are all in one region.

    Attributes:
        graph: after Grappler.
        lowered: the region.
    """

    def __init__(
        self, function: Callable[..., Any], arguments: Sequence[Any], variables: Sequence[tf.Variable]
    ) -> None:
        self._arguments = [tf.constant(argument) for argument in arguments]
        self._variables = variables
        self._concrete = tf.function(function, autograph=False).get_concrete_function(*self._arguments)
        captured = run_grappler(capture_concrete(self._concrete), device="CPU")
        self.graph: Graph = from_graph_def(captured.graph_def, inferred=shaped_graph(captured))
        self._fetches = [parse_input(name)[0] for name in captured.fetches]
        outer = {id(inner): given for given, inner in self._concrete.graph.captures}
        handles = {id(variable.handle): variable for variable in variables}
        self._given: dict[TensorId, Any] = {}
        self._held: dict[TensorId, tf.Variable] = {}
        for name, inner in zip(captured.feeds, self._concrete.inputs, strict=True):
            tensor = parse_input(name)[0]
            if id(inner) in outer:
                self._held[tensor] = handles[id(outer[id(inner)])]
            else:
                self._given[tensor] = self._arguments[len(self._given)].numpy()
        self.lowered: Lowered = lower_region(
            self.graph, planned(self.graph), attributes, [passed(self.graph, fetch) for fetch in self._fetches]
        )

    def run(self) -> tuple[list[Any], list[Any]]:
        """What the region gives: the fetches, and what the variables hold then."""
        held = [self._held[handle].numpy() for handle in self.lowered.variables]
        found = run(self.lowered.region, [self._value(tensor) for tensor in self.lowered.inputs], held)
        results = dict(zip(self.lowered.outputs, found, strict=True))
        kept = {self._held[handle].ref(): value for handle, value in zip(self.lowered.variables, held, strict=True)}
        fetched = [results[passed(self.graph, fetch)] for fetch in self._fetches]
        return fetched, [kept.get(variable.ref(), variable.numpy()) for variable in self._variables]

    def expected(self) -> tuple[list[Any], list[Any]]:
        """TensorFlow's results; it updates the variables."""
        results = [np.asarray(result) for result in tf.nest.flatten(self._concrete(*self._arguments))]
        return results, [variable.numpy() for variable in self._variables]

    def _value(self, tensor: TensorId) -> Any:
        if tensor in self._given:
            return self._given[tensor]
        return tf.make_ndarray(self.graph[tensor.node].attrs["value"].tensor)


def planned(graph: Graph) -> list[list[str]]:
    """All that a region can hold in the order of the products before it: a kernel between two of them."""
    found = patterns_of(graph)
    depth: dict[str, int] = {}
    kernels: dict[int, list[str]] = defaultdict(list)
    others: dict[int, list[list[str]]] = defaultdict(list)
    for name in topological(graph):
        node, kind = graph[name], found[name].pattern
        depth[name] = max((depth[each] for each in graph.predecessors(node)), default=0)
        after_update = any(found[each].pattern is OpPattern.UPDATE for each in node.control)
        if kind in IN_KERNELS or (kind is OpPattern.READ and after_update):
            kernels[depth[name]].append(name)
        elif kind is OpPattern.READ:
            others[depth[name]].append([name])
        elif node.inputs:
            assert kind is not OpPattern.OPAQUE, (node.op, found[name].reason)
            depth[name] += 1
            others[depth[name]].append([name])
    steps: list[list[str]] = []
    for level in sorted({*kernels, *others}):
        steps += others[level]
        computing = [name for name in kernels[level] if not _says_how(graph, found, name)]
        steps += [computing] if computing else []
    return steps


def _says_how(graph: Graph, found: dict[str, NodePattern], name: str) -> bool:
    """Whether a node is a constant, whose number is written into the programs."""
    return found[name].pattern is OpPattern.CONSTANT and graph[name].op == "Const"


def run(region: Region, inputs: Sequence[Any], variables: list[Any]) -> list[Any]:
    """The outputs of a region; `variables` are updated."""
    values = list(inputs)
    for step in region.steps:
        match step:
            case Kernel(program=program, inputs=given):
                values += reference.run(program, [values[place] for place in given])
            case Call(attrs=attrs, inputs=given):
                values += call(attrs, [values[place] for place in given])
            case View(input=given, output=output):
                values.append(values[given].reshape(region.values[output].shape))
            case Read(variable=variable):
                values.append(variables[variable])
            case Assign(variable=variable, value=given):
                variables[variable] = values[given]
    for value, declared in zip(values, region.values, strict=True):
        assert (str(value.dtype), value.shape) == (declared.dtype, declared.shape)
    return [values[place] for place in region.outputs]


def call(attrs: bytes, inputs: Sequence[Any]) -> list[Any]:
    """What TensorFlow's own kernel of an op makes."""
    node = node_def_pb2.NodeDef.FromString(attrs)
    node.name = "called"
    with tf.Graph().as_default():
        given = {f"given{place}": tf.constant(value) for place, value in enumerate(inputs)}
        node.input[:] = given
        tf.graph_util.import_graph_def(graph_pb2.GraphDef(node=[node]), input_map=given, name="")
        operation = tf.compat.v1.get_default_graph().get_operation_by_name("called")
        with tf.compat.v1.Session() as session:
            return session.run(list(operation.outputs))

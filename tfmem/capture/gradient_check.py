"""Whether a gradient loop computes the derivative of its forward loop: one step of both, run on random numbers.

The gradient that takes a loop's place is the derivative of its step. The graph may hold another gradient: a custom
gradient, of which only the result is left (`tf.custom_gradient`, `tf.stop_gradient`), or one that a user's program
edited. So tfmem builds a scratch `tf.Graph`
of one step of the forward loop, TensorFlow's gradient of it, and one step of the gradient loop, which pops what the
forward step pushed. It runs all three on the CPU. tfmem takes two gradients for equal if they agree on random numbers
of several magnitudes; those tell a clipped gradient from a plain one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2

from graph_passes.graph.ir import Function, Graph, Node, TensorId, TensorSpec
from graph_passes.graph.ops import FLOATS, IDENTITIES, LOOPS, UPDATES, passed
from graph_passes.graph.serde import encode
from graph_passes.passes.recurrent.find.plain_steps import MOST_INNER_STEPS
from graph_passes.passes.recurrent.train.loop_pairs import Pair, element_dtype, has_own_gradient
from graph_passes.refusals import Reason, Refusal
from tfmem.capture.error_text import said

ROWS = 3  # what an unknown dimension is, and a number that was computed from one
SCALES = {"float16": (1.0, 1e-1, 30.0), "bfloat16": (1.0, 1e-3, 1e4)}  # of the gradients that a step is given
FULL = (1.0, 1e-3, 1e4)
LARGE_VALUES = (1.0, 1.0)  # two more draws, whose other numbers are LARGE times as large: some custom gradients clip
LARGE = 8.0
TOLERANCES = {"float16": 3e-2, "bfloat16": 1e-1, "float64": 1e-7}
FLOAT32 = 1e-4  # of the largest number of a tensor: one step, mostly by the same kernels
_HARMLESS = (
    "ReadVariableOp",
    "VariableShape",
    "ResourceGather",
    "Random",
    "Stateless",
    "TruncatedNormal",
    "ParameterizedTruncatedNormal",
)
ERRORS = (ValueError, TypeError, LookupError, tf.errors.OpError)

Dims = tuple[int | None, ...] | None


def step_gradient_fault(graph: Graph, pair: Pair) -> Refusal | None:
    """Why the gradient loop of `pair` must not be replaced by the derivative of the forward loop; None if it may.

    Args:
        graph: the graph around both loops.
        pair: the loops, and which variable belongs to which.
    """
    for name in (pair.forward, pair.backward):
        for node in graph.functions[name, "body"].graph:
            if node.op in LOOPS:
                return Reason.INNER_LOOP.of(node, most=MOST_INNER_STEPS)
            if node.stateful and not node.op.startswith(_HARMLESS) and not _assigns_number(graph, pair, node):
                return Reason.CHECK_EFFECTS.of(node)
    error: Exception | None = None
    for rows in _sizes(graph, pair):
        step = _Step(graph, pair, rows)
        try:
            different = step.different()
        except ERRORS as raised:
            error = error or raised
            continue
        if different is None:
            return Reason.CHECK_FINITE()
        if different:
            return _difference(graph.functions[pair.forward, "body"], different)
        return None
    return Reason.CHECK_FAILED(detail=said(error) if error else "nothing ran")


def _assigns_number(graph: Graph, pair: Pair, node: Node) -> bool:
    """Whether `node`, of the forward step, assigns a whole number that the gradient loop does not read."""
    ahead, steps = graph[pair.forward], graph.functions[pair.forward, "body"]
    if node.op not in UPDATES or node.name not in steps.graph.nodes or node is not steps.graph[node.name]:
        return False
    name = passed(steps.graph, node.inputs[0]).node
    source = ahead.inputs[steps.arguments.index(name)] if name in steps.arguments else None
    spec = None if source is None else graph.specs.get(source)
    if source is None or spec is None or spec.behind is None or spec.behind.dtype in FLOATS:
        return False
    read = {passed(graph, tensor) for tensor in graph[pair.backward].inputs}
    return passed(graph, source) not in read


def _difference(steps: Function, different: Sequence[int]) -> Refusal:
    """What the report says: the op with a custom gradient, or the variables whose gradients are others."""
    own = next((node for node in steps.graph if "_gradient_op_type" in node.attrs), None)
    if own is not None:
        return Reason.CUSTOM_GRADIENT.of(own)
    makers = [passed(steps.graph, steps.results[place]).node for place in different]
    made = [name for name in makers if name not in steps.arguments]
    return Reason.CHECK_DIFFERS(what=", ".join(f"'{name}'" for name in made) or "a weight")


def _sizes(graph: Graph, pair: Pair) -> list[int]:
    """What to try for unknown dimensions: a tensor without a known batch may meet one that has it, or an item of a list
    that has it."""
    shapes = [spec.shape for spec in graph.functions[pair.forward, "body"].graph.specs.values()]
    for tensor in graph[pair.forward].inputs:
        made = graph[tensor.node]
        if made.op == "TensorListFromTensor" and (spec := graph.specs.get(made.inputs[0])) and spec.shape:
            shapes.append(spec.shape[1:])
    known = [shape[0] for shape in shapes if shape and len(shape) == 2 and shape[0]]
    return list(dict.fromkeys([ROWS, *sorted(set(known), key=known.count, reverse=True)[:3]]))


class _Step:
    """One step of both loops in a scratch graph."""

    def __init__(self, graph: Graph, pair: Pair, rows: int) -> None:
        self.graph, self.pair, self.rows = graph, pair, rows
        self.ahead, self.back = graph[pair.forward], graph[pair.backward]
        self.steps = graph.functions[pair.forward, "body"]
        self.walks = graph.functions[pair.backward, "body"]
        self.scratch = tf.Graph()
        self.values: dict[TensorId, Any] = {}  # what stands for a tensor of the graph around the loops
        self.fed: list[tuple[Any, bool]] = []  # placeholders, and whether they are gradients
        self.totals: set[int] = set()  # of `fed`, the gradients of what does not change from step to step
        self.variables: list[Any] = []

    def different(self) -> list[int] | None:
        """The forward variables with another gradient; None if no numbers were found at which they have any."""
        with self.scratch.as_default(), tf.device("/device:CPU:0"):
            places = sorted(self.pair.variables.items())
            arguments = [self.argument(place) for place in range(len(self.ahead.inputs))]
            results = imported(self.scratch, "step", self.steps, arguments, without_own_gradients=True)
            given = {place: self.gradient(variable, arguments[variable]) for place, variable in places}
            read = [self.read(place, given, arguments, results) for place in range(len(self.back.inputs))]
            found = imported(self.scratch, "walk", self.walks, read)
            expected = tf.gradients(
                [results[variable] for _, variable in places],
                [arguments[variable] for _, variable in places],
                [given[place] for place, _ in places],
            )
            compared = [
                (self.numbers(variable, found[place]), self.numbers(variable, tensor, given[place]))
                for (place, variable), tensor in zip(places, expected, strict=True)
            ]
        return self.compare([variable for _, variable in places], compared)

    def compare(self, variables: Sequence[int], compared: Sequence[tuple[Any, Any]]) -> list[int] | None:
        different: set[int] = set()
        checked: set[int] = set()
        names = {wanted.dtype.name for _, wanted in compared}
        scales: tuple[float, ...] = next((SCALES[name] for name in sorted(names) if name in SCALES), FULL)
        if any(map(has_own_gradient, self.steps.graph)):
            scales = (*scales, *LARGE_VALUES)
        with tf.compat.v1.Session(graph=self.scratch, config=on_the_host()) as session:
            for draw, scale in enumerate(scales):
                feeds = self.draw(draw, scale)
                session.run([assign for assign, _ in self.variables], feeds)
                for variable, (found, wanted) in zip(variables, session.run(compared, feeds), strict=True):
                    tolerance = TOLERANCES.get(wanted.dtype.name, FLOAT32)
                    a, b = np.asarray(found, "float64"), np.asarray(wanted, "float64")
                    finite = np.isfinite(b)
                    if a.shape != b.shape or not np.array_equal(np.isfinite(a), finite):
                        different.add(variable)
                    elif finite.any() or not b.size:
                        checked.add(variable)
                        if b.size and np.abs(a - b)[finite].max() > tolerance * max(np.abs(b[finite]).max(), 1e-30):
                            different.add(variable)
        return sorted(different) if different or checked == set(variables) else None

    def draw(self, draw: int, scale: float) -> dict[Any, npt.NDArray[Any]]:
        """Random numbers. In the first draw nothing was added up before: a sum hides what is small beside it."""
        dice = np.random.default_rng(draw)
        feeds = {}
        for index, (tensor, is_gradient) in enumerate(self.fed):
            shape = tuple(tensor.shape)
            if tensor.dtype == tf.bool:
                value: npt.NDArray[Any] = dice.random(shape) < 0.7
            elif tensor.dtype.is_integer:
                value = dice.integers(0, 2, shape) if shape else np.asarray(self.rows)
            else:
                value = dice.normal(size=shape)
                value = value * scale if is_gradient else value / np.sqrt(shape[0] if len(shape) > 1 else 1)
                if not is_gradient and draw >= len(FULL):
                    value = value * LARGE
                if not is_gradient and draw == 1:
                    value = np.abs(value) + 0.01  # where a root or a logarithm is finite
                if index in self.totals and draw == 0:
                    value = np.zeros(shape)
            feeds[tensor] = value.astype(tensor.dtype.as_numpy_dtype)
        return feeds

    def placeholder(self, dtype: str, dims: Dims, is_gradient: bool = False) -> Any:
        if dims is None:
            raise ValueError("a tensor of unknown rank goes into it")
        if tf.as_dtype(dtype) in (tf.string, tf.resource, tf.variant):
            raise ValueError(f"a tensor of {dtype} goes into it")
        shape = [self.rows if dim is None else dim for dim in dims]
        self.fed.append((tf.compat.v1.placeholder(dtype, shape), is_gradient))
        return self.fed[-1][0]

    def argument(self, place: int) -> Any:
        """A variable of the forward loop before the step."""
        source = passed(self.graph, self.ahead.inputs[place])
        result, name = self.steps.results[place], self.steps.arguments[place]
        stays = passed(self.steps.graph, result) == TensorId(name)
        if stays and source in self.values:
            return self.values[source]
        spec = self.graph.specs[self.ahead.inputs[place]]
        if spec.dtype == "variant":
            value = self.list_argument(place)
        else:
            specs = (self.steps.graph.specs.get(tensor) for tensor in (TensorId(name), result))
            dims = spec.shape
            for other in specs:
                dims = _merged(dims, other)
            value = self.outside(source, TensorSpec(spec.dtype, spec.itemsize, dims, spec.behind))
        if stays:
            self.values[source] = value
        return value

    def outside(self, source: TensorId, spec: TensorSpec) -> Any:
        """The scratch tensor in place of a tensor that a loop reads."""
        if source.node in self.graph.constants:
            return tf.constant(self.graph.constants[source.node])
        made = self.graph[source.node]
        if made.op == "Shape":
            shape = self.graph.specs[made.inputs[0]].shape
            if shape is not None:
                return tf.constant([self.rows if dim is None else dim for dim in shape], spec.dtype)
        if spec.dtype != "resource":
            return self.placeholder(spec.dtype, spec.shape)
        if spec.behind is None:
            raise ValueError(f"'{source}' is a resource of which nothing is known")
        value = self.placeholder(spec.behind.dtype, spec.behind.shape)
        name = f"variable_{len(self.variables)}"
        handle = tf.raw_ops.VarHandleOp(dtype=value.dtype, shape=value.shape, shared_name=name)
        self.variables.append((tf.raw_ops.AssignVariableOp(resource=handle, value=value), handle))
        return handle

    def list_argument(self, place: int) -> Any:
        if place in self.pair.lists:
            node = self.steps.graph[passed(self.steps.graph, self.steps.results[place]).node]
            dtype = self.steps.graph.specs[node.inputs[1]].dtype
            return tf.raw_ops.EmptyTensorList(element_shape=-1, max_num_elements=-1, element_dtype=dtype)
        dtype, dims = self.items(place)
        return _listed(self.placeholder(dtype, dims))

    def items(self, place: int) -> tuple[str, tuple[int | None, ...]]:
        """The dtype and the shape of a list of the forward loop, stacked."""
        made = self.graph[passed(self.graph, self.ahead.inputs[place]).node]
        if made.op == "TensorListFromTensor":
            spec = self.graph.specs[made.inputs[0]]
            if spec.shape:
                return spec.dtype, (self.items_of(spec.shape[0]), *spec.shape[1:])
        body = self.steps.graph
        for node in body:
            reads = node.inputs and passed(body, node.inputs[0]) == TensorId(self.steps.arguments[place])
            item = {"TensorListGetItem": TensorId(node.name), "TensorListSetItem": TensorId("")}.get(node.op)
            if reads and item is not None:
                spec = body.specs[item if item.node else node.inputs[2]]
                length = self.graph.constants.get(made.inputs[1].node) if made.op == "TensorListReserve" else None
                if spec.shape is not None:
                    return spec.dtype, (self.items_of(None if length is None else int(length)), *spec.shape)
        users = (node for node in body if node.op not in IDENTITIES)
        if not any(
            passed(body, tensor).node == self.steps.arguments[place] for node in users for tensor in node.inputs
        ):
            return element_dtype(made) or "float32", (1,)  # a list that no step reads or writes
        raise ValueError(f"the items of the list '{self.ahead.inputs[place]}' have no known shape")

    def items_of(self, length: int | None) -> int:
        """The number of items of a list; where it is unknown, there is one at the index `rows`, too."""
        return self.rows + 1 if length is None else length

    def gradient(self, variable: int, argument: Any) -> Any:
        """The gradient of a variable of the forward loop after the step."""
        if argument.dtype == tf.variant:
            dtype, dims = self.items(variable)
        elif argument.dtype == tf.resource:
            spec = self.graph.specs[self.ahead.inputs[variable]].behind
            assert spec is not None  # `outside` has asked
            dtype, dims = spec.dtype, cast("tuple[int | None, ...]", spec.shape)
        else:
            dtype, dims = argument.dtype.name, tuple(argument.shape)
        value = self.placeholder(dtype, dims, is_gradient=True)
        result = passed(self.steps.graph, self.steps.results[variable])
        if result == TensorId(self.steps.arguments[variable]):
            self.totals.add(len(self.fed) - 1)
        return _listed(value) if argument.dtype == tf.variant else value

    def read(self, place: int, given: Mapping[int, Any], arguments: Sequence[Any], results: Sequence[Any]) -> Any:
        """A variable of the gradient loop before its step: counters, gradients, and what the forward loop left."""
        spec = self.graph.specs[self.back.inputs[place]]
        if place < 3:
            return tf.constant(min(place, 1), spec.dtype)
        if place in given:
            return given[place]
        source = passed(self.graph, self.back.inputs[place])
        if source.node == self.pair.forward:
            pushed = source.index in self.pair.lists
            stays = passed(self.graph, self.ahead.inputs[source.index]) in self.values and not pushed
            return arguments[source.index] if stays else results[source.index]
        if source not in self.values:
            self.values[source] = self.outside(source, spec)
        return self.values[source]

    def numbers(self, variable: int, tensor: Any, like: Any = None) -> Any:
        """A gradient as a tensor that can be compared; zeros for none."""
        if tensor is None:
            tensor = tf.zeros_like(like)
        tensor = tf.convert_to_tensor(tensor)
        if tensor.dtype != tf.variant:
            return tensor
        dtype, dims = self.items(variable)
        shape = [self.rows if dim is None else dim for dim in dims[1:]]
        sizes = tf.constant(shape, tf.int32)
        return tf.raw_ops.TensorListStack(input_handle=tensor, element_shape=sizes, element_dtype=dtype)


def _listed(tensor: Any) -> Any:
    shape = tf.constant(tensor.shape[1:].as_list(), tf.int32)
    return tf.raw_ops.TensorListFromTensor(tensor=tensor, element_shape=shape)


def _merged(dims: Dims, other: TensorSpec | None) -> Dims:
    """The dimensions that either shape knows."""
    if other is None or other.shape is None or dims is None or len(dims) != len(other.shape):
        return dims if dims is not None or other is None else other.shape
    return tuple(there if here is None else here for here, there in zip(dims, other.shape, strict=True))


def on_the_host() -> Any:
    """A session's settings under which a graph runs as it is, on the CPU."""
    rewriting = rewriter_config_pb2.RewriterConfig(disable_meta_optimizer=True)
    options = config_pb2.GraphOptions(rewrite_options=rewriting)
    return tf.compat.v1.ConfigProto(device_count={"GPU": 0}, graph_options=options)


def imported(
    scratch: Any, prefix: str, function: Function, arguments: Sequence[Any], without_own_gradients: bool = False
) -> list[Any]:
    """The body of a function, imported: its results.

    Args:
        scratch: the graph.
        prefix: of the names.
        function: what is imported.
        arguments: of the function.
        without_own_gradients: whether TensorFlow is to differentiate ops with custom gradients as if they had none, but
            for those of `tf.stop_gradient`, which a cell has, too.
    """
    graph_def = graph_pb2.GraphDef(versions=scratch.graph_def_versions)
    names = {node.name: f"node_{place}" for place, node in enumerate(function.graph)}
    own = set(function.arguments)
    seen_through = {node.name for node in function.graph if node.op == "PreventGradient"} | _around(function)

    def text(tensor: TensorId) -> str:
        return f"{names[tensor.node]}:{tensor.index}"

    for node in function.graph:
        if node.name not in own:
            op = "Identity" if without_own_gradients and node.name in seen_through else node.op
            hidden = ("_class", "_output_shapes", *(("_gradient_op_type",) if without_own_gradients else ()))
            node_def = node_def_pb2.NodeDef(name=names[node.name], op=op)
            node_def.input.extend(text(tensor) for tensor in node.inputs)
            node_def.input.extend(f"^{names[name]}" for name in node.control if name not in own)
            for key, value in node.attrs.items():
                if key not in hidden and not (op != node.op and key == "message"):
                    node_def.attr[key].CopyFrom(encode(value))
            graph_def.node.append(node_def)
    read = {tensor.node for node in function.graph for tensor in node.inputs}
    input_map = {
        f"{names[name]}:0": argument
        for name, argument in zip(function.arguments, arguments, strict=True)
        if name in read
    }
    tf.graph_util.import_graph_def(graph_def, input_map=input_map, name=prefix)
    given = dict(zip(function.arguments, arguments, strict=True))
    return [
        tf.identity(given[result.node])
        if result.node in own
        else scratch.get_tensor_by_name(f"{prefix}/{text(result)}")
        for result in function.results
    ]


def _around(function: Function) -> set[str]:
    """The `StopGradient`s between a result and an argument that it is a copy of: the variable counts as constant."""
    found: set[str] = set()
    for result in function.results:
        stops, tensor = set[str](), result
        while (node := function.graph[tensor.node]).op in IDENTITIES and node.inputs:
            stops |= {node.name} if node.op == "StopGradient" else set()
            tensor = node.inputs[tensor.index]
        found |= stops if tensor.node in function.arguments else set()
    return found

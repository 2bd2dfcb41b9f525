"""A set of memory-intensive ops as one program."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from custom_ops.background import go_on
from custom_ops.errors import ProgramError
from custom_ops.expr.program import Program
from custom_ops.fusion.region import Shape
from graph_passes.graph.ir import Graph, TensorId
from graph_passes.graph.ops import OpPattern, passed
from graph_passes.lower.access import Access
from graph_passes.lower.finish import finished, require_valid
from graph_passes.lower.known_numbers import number_of
from graph_passes.lower.program_writer import LoweringError, ProgramWriter, Steps, Value, VariableValue
from graph_passes.lower.rules import RULES
from graph_passes.lower.shapes import Shapes
from graph_passes.refusals import Reason

__all__ = ["LoweredKernel", "Lowering", "LoweringError", "Value", "VariableValue", "lower_kernel"]


@dataclass(frozen=True)
class LoweredKernel:
    """A program, and what its tensors and outputs are in the graph.

    Attributes:
        program: what the members compute.
        inputs: one for each tensor of the program.
        outputs: one for each output of the program: those that were asked for, then what each variable that is updated
            holds in the end.
        input_shapes, output_shapes: the shapes in which the program reads and writes, of the same numbers as the
            tensors have, mostly in fewer dimensions; None: a size that is not known.
    """

    program: Program
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    input_shapes: tuple[Shape, ...]
    output_shapes: tuple[Shape, ...]


def lower_kernel(
    graph: Graph, members: Sequence[str], outputs: Sequence[TensorId], shapes: Shapes | None = None
) -> LoweredKernel:
    """One program that computes `outputs`, and what updates among the members assign.

    Args:
        graph: the graph, with specs.
        members: names of nodes in topological order, of kinds in `IN_KERNELS`. Numbers that are no member's output are
            read, but constants that are the same number everywhere are written into the program. A `READ` can be a
            member, too: of a variable that a member before it updates it reads what that one gives.
        outputs: tensors that members make.
        shapes: of the graph, if they are at hand.

    Raises:
        LoweringError: the members are no program, say because a reshape between them has no index that the language
            could write, or because it is unknown statically whether two sizes are equal.
    """
    inside, w = _begun(graph, members, shapes)
    wanted: list[Value] = [*outputs, *inside.updated()]
    try:
        found = finished(w, _written(w, inside, outputs, wanted))
    except ProgramError as error:
        raise LoweringError(Reason.PROGRAM(members=", ".join(members[:3]), detail=error)) from error
    return LoweredKernel(
        program=found.program,
        inputs=found.inputs,
        outputs=tuple(wanted),
        input_shapes=tuple(map(_static, found.input_shapes)),
        output_shapes=tuple(map(_static, found.output_shapes)),
    )


class Lowering:
    """Programs of one graph, each made once: those that planning had to make are those of regions, too."""

    def __init__(self, graph: Graph, shapes: Shapes) -> None:
        self.shapes = shapes
        self._graph = graph
        self._known: dict[tuple[tuple[str, ...], tuple[TensorId, ...]], LoweredKernel] = {}

    def kernel(self, members: Sequence[str], outputs: Sequence[TensorId]) -> LoweredKernel:
        """See `lower_kernel`."""
        key = tuple(members), tuple(outputs)
        if key not in self._known:
            self._known[key] = lower_kernel(self._graph, members, outputs, self.shapes)
        return self._known[key]

    def require(self, members: Sequence[str], outputs: Sequence[TensorId]) -> None:
        """Raises as `lower_kernel` does, but does not shorten a program that is valid without that."""
        inside, w = _begun(self._graph, members, self.shapes)
        results = _written(w, inside, outputs, [*outputs, *inside.updated()])
        try:
            require_valid(w, results)
        except ProgramError:
            self.kernel(members, outputs)


def _begun(graph: Graph, members: Sequence[str], shapes: Shapes | None) -> tuple[_Members, ProgramWriter]:
    go_on()
    inside = _Members(graph, members)
    return inside, ProgramWriter(graph, shapes or Shapes(graph), inside.start)


def _written(
    w: ProgramWriter, inside: _Members, outputs: Sequence[TensorId], wanted: Sequence[Value]
) -> list[tuple[int, Access]]:
    """Where each of `wanted` is in what was written, and along which axes."""
    graph = w.graph
    for tensor in outputs:
        if tensor.index in RULES[graph[tensor.node].op].reserved:
            raise LoweringError(Reason.RESERVE_SPACE(tensor=tensor))
    results = {}
    for value in sorted(wanted, key=lambda value: -inside.place[value.node]):
        shown = source(graph, inside.place, value) if isinstance(value, TensorId) else value
        at = _whole(w, shown)
        results[value] = (w.element(shown, at), at)
    for state in w.states:
        if state.node in inside.place:
            raise LoweringError(Reason.RANDOM_SEED(tensor=state))
    return [results[value] for value in wanted]


def _static(shape: Sequence[int]) -> Shape:
    return tuple(None if size < 0 else size for size in shape)


def source(graph: Graph, members: Collection[str], tensor: TensorId) -> TensorId:
    """The tensor that a tensor is a view of, through views among the members: the same numbers in another shape."""
    while (
        tensor.node in members
        and (node := graph[tensor.node])
        and RULES[node.op].pattern_of(graph, node) is OpPattern.VIEW
    ):
        tensor = node.inputs[0]
    return tensor


class _Members:
    """The members of a kernel, and how each value is come by.

    Attributes:
        place: of each member in their order.
    """

    def __init__(self, graph: Graph, members: Sequence[str]) -> None:
        self.place = {name: place for place, name in enumerate(members)}
        self._graph = graph
        self._touched: dict[TensorId, list[VariableValue]] = {}  # by variable, in order: reads, and updates
        for name in members:
            rule = RULES[graph[name].op]
            for index in dict.fromkeys((*rule.reads, *rule.writes)):
                self._touched.setdefault(self._variable(name, index), []).append(
                    VariableValue(name, index, index in rule.writes)
                )

    def updated(self) -> list[VariableValue]:
        """What the variables hold in the end that are written."""
        writes = ([each for each in touched if each.updated] for touched in self._touched.values())
        return [written[-1] for written in writes if written]

    def start(self, w: ProgramWriter, value: Value, at: Access) -> Steps:
        """One element of a value: computed if a member makes it, else read."""
        if isinstance(value, VariableValue) and not value.updated:
            return self._held(w, value, at)
        if value.node in self.place:
            node = self._graph[value.node]
            return RULES[node.op].write(w, node, value.index, at)
        return _given(w, value, at)

    def _variable(self, name: str, index: int) -> TensorId:
        return passed(self._graph, self._graph[name].inputs[index])

    def _held(self, w: ProgramWriter, value: VariableValue, at: Access) -> Steps:
        """What the last member before has given the variable; else the value that its first user finds."""
        touched = self._touched[self._variable(value.node, value.index)]
        before = [each for each in touched if each.updated and self.place[each.node] < self.place[value.node]]
        if before:
            return (yield before[-1], at)
        return w.read(VariableValue(touched[0].node, touched[0].index), at)


def _given(w: ProgramWriter, value: Value, at: Access) -> Steps:
    number = number_of(w.graph, value) if isinstance(value, TensorId) else None
    if number is not None:
        return w.number(w.shapes.dtype(value), number)
    return w.read(value, at)
    yield  # a generator, as rules are, that needs nothing


def _whole(w: ProgramWriter, value: Value) -> Access:
    """Where all of an output is: along axes along which it was read already, or else new ones."""
    shape = w.shapes[value]
    for at in w.demanded.get(value, ()):
        axes = [index.axis for index, size in zip(at, shape, strict=True) if size != 1]
        wide = [size for size in shape if size != 1]
        if len(set(axes)) == len(axes) and all(
            axis is not None and w.symbol(axis) == size for axis, size in zip(axes, wide, strict=True)
        ):
            return at
    return w.everywhere(shape)

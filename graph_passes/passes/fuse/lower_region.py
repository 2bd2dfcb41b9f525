"""Steps that a planner chose, as the region that one op runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from custom_ops.fusion.region import Assign, Call, Kernel, Read, Region, Shape, Step, TensorType, View
from graph_passes.analysis.convolutions import Padded, inferred_sizes, padded, said_sizes
from graph_passes.analysis.op_pattern import OpPattern, pattern_of
from graph_passes.graph.ir import Graph, Literal, Node, TensorId, TensorSpec, Use
from graph_passes.graph.ops import IDENTITIES, passed
from graph_passes.lower.lower_nodes import LoweredKernel, Lowering, source
from graph_passes.lower.margins import with_margins, without_margins
from graph_passes.lower.program_writer import LoweringError, Value, VariableValue
from graph_passes.lower.shapes import Shapes, variable_spec
from graph_passes.refusals import Reason

_ALONE = frozenset({OpPattern.PRODUCT, OpPattern.BATCHED_PRODUCT, OpPattern.CALL, OpPattern.READ, OpPattern.VIEW})


@dataclass(frozen=True)
class Lowered:
    """A region, and what its inputs, variables and outputs are in the graph.

    Attributes:
        region: what the op runs.
        inputs: one for each input.
        variables: the handle of each variable.
        outputs: one for each output: every tensor of a member that something outside of the region reads.
    """

    region: Region
    inputs: tuple[TensorId, ...]
    variables: tuple[TensorId, ...]
    outputs: tuple[TensorId, ...]


# Says the attributes of a `Call`: `custom_ops.fusion.region.Call.attrs`.
Encode: TypeAlias = Callable[[Node], bytes]


def lower_region(
    graph: Graph,
    steps: Sequence[Sequence[str]],
    encode: Encode,
    keep: Collection[TensorId] = (),
    lowering: Lowering | None = None,
    called: Collection[str] = (),
    kernels: Collection[str] = (),
    evenly: Collection[str] = (),
) -> Lowered:
    """The region that runs these steps one after the other.

    Args:
        graph: the graph, with specs.
        steps: names of nodes. One node of kind `PRODUCT`, `BATCHED_PRODUCT`, `CALL`, `READ` or `VIEW` is a step of that
            kind, and so is one `AssignVariableOp`; all else is a kernel, whose members are in topological order.
        encode: writes the attributes of a call (`graph_passes.graph.serde.attributes`).
        keep: tensors that are fetched, and so are outputs in any case.
        lowering: of the graph, if programs of it were made before.
        called: nodes, each a separate step, that TensorFlow's own kernel runs although they could be a kernel.
        kernels: nodes of kernels, among them products that are one by themselves.
        evenly: ops of images whose calls pad both sides alike. Where that differs, a kernel pads what is convolved.

    Raises:
        LoweringError: a step is no kernel; see `lower_kernel`.
    """
    builder = _Builder(
        graph,
        steps,
        encode,
        frozenset(keep),
        frozenset(called),
        frozenset(kernels),
        lowering or Lowering(graph, Shapes(graph)),
        frozenset(evenly),
    )
    for step in steps:
        builder.add(step)
    return builder.finish()


@dataclass(frozen=True)
class _Read:
    """The value that a variable had when step `step` began."""

    variable: int
    step: int


@dataclass(frozen=True)
class _Shaped:
    """A value in another shape, as a kernel reads or writes it."""

    key: _Key
    shape: Shape


@dataclass(frozen=True)
class _Padded:
    """The image of a convolution with what a kernel pads it by, for one call."""

    node: str
    type: TensorType


_Key: TypeAlias = "TensorId | VariableValue | _Read | _Shaped | _Padded"  # what is a value of the region


@dataclass(frozen=True)
class _Draft:
    """A step, and how it is made of the numbers of the values that it reads and makes."""

    given: tuple[_Key, ...]
    made: tuple[_Key, ...]
    step: Callable[[tuple[int, ...], tuple[int, ...]], Step]


class _Builder:
    """The steps so far, over keys; they are numbered at the end, when it is known which of them are inputs."""

    def __init__(
        self,
        graph: Graph,
        steps: Sequence[Sequence[str]],
        encode: Encode,
        keep: frozenset[TensorId],
        called: frozenset[str],
        kernels: frozenset[str],
        lowering: Lowering,
        evenly: frozenset[str] = frozenset(),
    ) -> None:
        self._graph = graph
        self._encode = encode
        self._keep = keep
        self._called = called
        self._kernels = kernels
        self._evenly = evenly
        self._lowering = lowering
        self._members = dict.fromkeys(name for step in steps for name in step)
        self._op_patterns = {name: pattern_of(graph, graph[name]) for name in self._members}
        self._variables: dict[TensorId, int] = {}
        self._specs: list[TensorSpec] = []
        self._held: dict[int, _Key] = {}  # what each variable holds by now, as far as it is known
        self._renamed: dict[TensorId, _Key] = {}  # reads of a variable that was read, or assigned, before
        self._views: set[_Shaped] = set()
        self._drafts: list[_Draft] = []

    def add(self, step: Sequence[str]) -> None:
        """One more step."""
        kind = self._op_patterns[step[0]].pattern if len(step) == 1 else None
        node = self._graph[step[0]]
        if node.name in self._called:
            self._call(node)
        elif kind == OpPattern.READ:
            self._renamed[TensorId(node.name)] = self._value_of(node, 0)
        elif kind == OpPattern.VIEW and node.op in IDENTITIES:
            self._renamed[TensorId(node.name)] = self._key(node.inputs[0])
        elif kind == OpPattern.VIEW:
            self._view(self._key(node.inputs[0]), TensorId(node.name))
        elif kind in _ALONE and node.name not in self._kernels:
            self._call(node)
        elif kind == OpPattern.UPDATE and node.op == "AssignVariableOp":
            self._assign(node, 0, self._key(node.inputs[1]))
        else:
            self._kernel(step)

    def _call(self, node: Node) -> None:
        evenly = node.op in self._evenly
        padding = padded(self._graph, node) if evenly else None
        said = (inferred_sizes if evenly else said_sizes)(self._graph, node)  # which lie in the host's memory
        given = tuple(self._key(tensor) for place, tensor in enumerate(node.inputs) if place not in said)
        made = tuple(self._graph.tensors(node))
        if padding is None:
            self._called_on(node, said, given, made)
        else:
            self._padded_call(node, padding, given, made[0])

    def _padded_call(self, node: Node, padding: Padded, given: Sequence[_Key], made: _Key) -> None:
        """A call of a padded image, which a kernel makes before, or of whose gradient a kernel takes a part."""
        image, large = padding.image, padding.large
        key = _Padded(node.name, _tensor_type(large))
        if node.op.endswith("BackpropInput"):
            self._called_on(padding.call, padding.said, given, [key])
            self._moved(node, without_margins(large, image, padding.paddings), key, made)
        else:
            self._moved(node, with_margins(image, large, padding.paddings), given[0], key)
            self._called_on(padding.call, padding.said, [key, *given[1:]], [made])

    def _moved(self, node: Node, kernel: LoweredKernel, given: _Key, made: _Key) -> None:
        self._computed(kernel, [self._seen(given, kernel.input_shapes[0])], [made], [node.name])

    def _called_on(
        self, node: Node, said: Mapping[int, tuple[int, ...]], given: Sequence[_Key], made: Sequence[_Key]
    ) -> None:
        whole = node.copy()
        whole.attrs |= {f"constant_{place}": Literal("int32", (len(found),), found) for place, found in said.items()}
        attrs = self._encode(whole)
        call = partial(Call, node.op, attrs, members=(node.name,))
        self._drafts.append(_Draft(tuple(given), tuple(made), call))

    def _kernel(self, members: Sequence[str]) -> None:
        written = any(self._op_patterns[name].writes for name in members)
        outputs = [tensor for name in members for tensor in self._graph.tensors(self._graph[name])]
        wanted = [tensor for tensor in outputs if self._is_read(tensor, set(members))]
        shown = {tensor: source(self._graph, set(members), tensor) for tensor in wanted}
        computed = [tensor for tensor in dict.fromkeys(shown.values()) if tensor.node in members]
        if computed or written:
            self._program(members, computed)
        for tensor, seen in shown.items():
            key = self._key(seen)
            if tensor != seen and self._type(tensor) == self._type(key):
                self._renamed[tensor] = key
            elif tensor != seen:
                self._view(key, tensor)

    def _program(self, members: Sequence[str], outputs: Sequence[TensorId]) -> None:
        kernel = self._lowering.kernel(members, outputs)
        given = [
            self._seen(self._value(value), shape)
            for value, shape in zip(kernel.inputs, kernel.input_shapes, strict=True)
        ]
        self._computed(kernel, given, kernel.outputs, members)

    def _computed(
        self, kernel: LoweredKernel, given: Sequence[_Key], made: Sequence[_Key], members: Sequence[str]
    ) -> None:
        """A kernel that reads and makes values, each in the shape in which it does."""
        shaped = [
            key if self._type(key).shape == shape else _Shaped(key, shape)
            for key, shape in zip(made, kernel.output_shapes, strict=True)
        ]
        step = partial(Kernel, kernel.program, members=tuple(members))
        self._drafts.append(_Draft(tuple(given), tuple(shaped), step))
        for key, value in zip(shaped, made, strict=True):
            if isinstance(key, _Shaped):
                self._views.add(key)
                self._view(key, value)
            if isinstance(value, VariableValue):
                self._assign(self._graph[value.node], value.index, value)

    def _view(self, key: _Key, made: _Key) -> None:
        self._drafts.append(_Draft((key,), (made,), lambda given, made: View(given[0], made[0])))

    def _value(self, value: Value) -> _Key:
        """What a kernel reads."""
        return self._key(value) if isinstance(value, TensorId) else self._value_of(self._graph[value.node], value.index)

    def _seen(self, key: _Key, shape: Shape) -> _Key:
        """A value in the shape in which a kernel reads it."""
        if self._type(key).shape == shape:
            return key
        shaped = _Shaped(key, shape)
        if shaped not in self._views:
            self._views.add(shaped)
            self._view(key, shaped)
        return shaped

    def _is_read(self, tensor: TensorId, members: Collection[str]) -> bool:
        """Whether something but these nodes reads the numbers of a tensor."""
        uses = [use for use in self._graph.uses(tensor) if use.node not in members]
        return tensor in self._keep or any(map(self._needs, uses))

    def _needs(self, use: Use) -> bool:
        """Whether an op reads the numbers of an input; outside of the region anything may."""
        inside = use.node in self._members and use.node not in self._called
        return not inside or use.index in self._op_patterns[use.node].operands

    def _key(self, tensor: TensorId) -> _Key:
        return self._renamed.get(tensor, tensor)

    def _variable(self, node: Node, place: int) -> int:
        """The number of the variable whose handle is an input."""
        handle = passed(self._graph, node.inputs[place])
        if handle not in self._variables:
            spec = variable_spec(self._graph, node.name, place)
            if spec is None:
                raise LoweringError(Reason.VARIABLE_UNKNOWN.of(node))
            self._variables[handle] = len(self._specs)
            self._specs.append(spec)
        return self._variables[handle]

    def _value_of(self, node: Node, place: int) -> _Key:
        """What a variable holds now: what it was assigned last, or what is read."""
        variable = self._variable(node, place)
        if variable not in self._held:
            found = self._held[variable] = _Read(variable, len(self._drafts))
            self._drafts.append(_Draft((), (found,), lambda _, made: Read(variable, made[0])))
        return self._held[variable]

    def _assign(self, node: Node, place: int, value: _Key) -> None:
        variable = self._variable(node, place)
        self._drafts.append(_Draft((value,), (), lambda given, _: Assign(variable, given[0])))
        self._held[variable] = value

    def finish(self) -> Lowered:
        """The region, its values numbered."""
        made = [key for draft in self._drafts for key in draft.made]
        outputs = tuple(
            tensor
            for name in self._members
            for tensor in self._graph.tensors(self._graph[name])
            if self._is_read(tensor, self._members)
        )
        read = [key for draft in self._drafts for key in draft.given]
        given = dict.fromkeys([*read, *map(self._key, outputs)])  # an input may be handed on
        here = set(made)
        inputs = tuple(key for key in given if key not in here and isinstance(key, TensorId))
        keys = [*inputs, *made]
        number = {key: place for place, key in enumerate(keys)}

        def numbers(keys: Sequence[_Key]) -> tuple[int, ...]:
            return tuple(number[key] for key in keys)

        region = Region(
            inputs=len(inputs),
            variables=tuple(map(_tensor_type, self._specs)),
            values=tuple(self._type(key) for key in keys),
            steps=tuple(draft.step(numbers(draft.given), numbers(draft.made)) for draft in self._drafts),
            outputs=numbers([self._key(tensor) for tensor in outputs]),
        )
        return Lowered(region, inputs, tuple(self._variables), outputs)

    def _type(self, key: _Key) -> TensorType:
        if isinstance(key, _Read):
            return _tensor_type(self._specs[key.variable])
        if isinstance(key, _Shaped):
            return TensorType(self._type(key.key).dtype, key.shape)
        if isinstance(key, _Padded):
            return key.type
        spec = self._lowering.shapes.spec(key)
        if spec is None:
            raise LoweringError(Reason.TENSOR_UNKNOWN(tensor=key))
        return _tensor_type(spec)


def _tensor_type(spec: TensorSpec) -> TensorType:
    if spec.shape is None:
        raise LoweringError(Reason.TENSOR_RANK())
    return TensorType(spec.dtype, spec.shape)

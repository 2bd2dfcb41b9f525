"""Random ops with a seed of each step: one op that runs TensorFlow's kernel once for each step.

    seeds [time, 2]  --TfmemStepDraws(StatelessRandomGetKeyCounter)-->  keys [time, 1], counters [time, 2]
    keys, counters   --TfmemStepDraws(StatelessRandomUniformV2)-->      numbers [time, batch, units]

So the numbers are those that the loop draws, for any number of steps. Only a CPU has a kernel of the op. For another
device `unrolled` writes TensorFlow's own op for each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graph_passes.graph.ir import AttrValue, DataType, Graph, Node, Shape, TensorId, TensorSpec
from graph_passes.graph.rewrite import Names, NewNode
from graph_passes.graph.writer import Dim, Writer
from graph_passes.passes.recurrent.find.loops import Unreadable
from graph_passes.passes.recurrent.lower.prologue import Hoisted, HoistedForm, Prologue
from graph_passes.passes.recurrent.match import Match, RecurrentNode
from graph_passes.refusals import Reason

STEP_DRAWS = "TfmemStepDraws"
MOST_STEPS = 512  # for which ops are written, or numbers drawn that nothing else is as large as; more were not measured
_KEYS = "StatelessRandomGetKeyCounter"
_KINDS = ("RandomNormal", "RandomUniform", "RandomUniformInt", "RandomUniformFullInt", "TruncatedNormal")
SEEDED = frozenset({_KEYS, *(f"Stateless{kind}{version}" for kind in _KINDS for version in ("", "V2"))})


def drawn_by_steps(
    prologue: Prologue, node: Node, operands: Sequence[Hoisted], outputs: Sequence[TensorSpec]
) -> TensorId:
    """Output 0 of what `node`, which is `SEEDED`, makes in every step, `[time, ...]`.

    Args:
        prologue: takes the new node.
        node: of the body.
        operands: its inputs, outside.
        outputs: what it makes in one step.

    Raises:
        Unreadable: steps draw tensors of other shapes.
    """
    varies = [operand.form is not HoistedForm.FIXED for operand in operands]
    if node.op != _KEYS and varies[0]:
        raise Unreadable(Reason.ROWS_UNALIKE.of(node))
    inputs = [
        prologue.steps(operand) if of_steps else operand.tensor
        for operand, of_steps in zip(operands, varies, strict=True)
    ]
    attrs: dict[str, AttrValue] = {
        "op": node.op,
        "Tin": tuple(DataType(operand.dtype) for operand in operands),
        "Tout": tuple(DataType(spec.dtype) for spec in outputs),
        "of_steps": tuple(varies),
        "shapes": tuple(Shape(spec.shape) for spec in outputs),
        "steps": prologue.time if isinstance(prologue.time, int) else -1,
    }
    return prologue.emit(STEP_DRAWS, inputs, attrs, node.name, len(outputs))


def require_few(body: Graph, nodes: Sequence[NewNode | RecurrentNode], steps: Dim) -> None:
    """Refuse a loop that its states end: numbers are drawn for all steps up to its bound.

    Args:
        body: one step.
        nodes: what takes the loop's place.
        steps: the bound.

    Raises:
        Unreadable: numbers are drawn for too many steps.
    """
    drawing = next(_drawing(body, nodes), None)
    if drawing is not None and not _is_few(steps):
        raise Unreadable(Reason.STEP_DRAWS.of(drawing, most=MOST_STEPS))


def require_room(body: Graph, nodes: Sequence[NewNode | RecurrentNode], steps: Dim, items: Iterator[int]) -> None:
    """Refuse a loop that needs little memory, however many steps it has, where the numbers of all steps need much.

    Args:
        body: one step.
        nodes: what takes the loop's place.
        steps: how many there are.
        items: the ranks of what a step reads of a tensor with an item for each step, or writes to one.

    Raises:
        Unreadable: it is such a loop.
    """
    largest = max(items, default=-1)
    for node in () if _is_few(steps) else _drawing(body, nodes):
        spec = body.specs.get(TensorId(node.name))
        if spec is not None and len(spec.shape or ()) > largest:
            raise Unreadable(Reason.DRAWS_ROOM.of(node, most=MOST_STEPS, shape=spec.shape))


def unrolled(match: Match, names: Names) -> Match:
    """`match` with TensorFlow's op for each step, for a device that has no kernel of `TfmemStepDraws`.

    Raises:
        Unreadable: there are too many steps, or their number is unknown.
    """
    nodes: list[NewNode | RecurrentNode] = []
    instead: dict[TensorId, TensorId] = {}
    for each in match.nodes:
        if not isinstance(each, NewNode):
            nodes.append(each)
            continue
        node = replace(each, inputs=tuple(instead.get(tensor, tensor) for tensor in each.inputs))
        nodes += [node] if node.op != STEP_DRAWS else _unrolled(node, names, instead)
    return replace(match, nodes=tuple(nodes))


def _unrolled(node: NewNode, names: Names, instead: dict[TensorId, TensorId]) -> list[NewNode]:
    """The ops of `node`, one for each step; `instead` takes what is read in place of its outputs, if it has several."""
    attrs: Mapping[str, Any] = node.attrs
    op, steps, given, made = attrs["op"], attrs["steps"], attrs["Tin"], attrs["Tout"]
    if not 0 < steps <= MOST_STEPS:
        raise Unreadable(Reason.STEP_DRAWS(node=node.name, op=op, most=MOST_STEPS))
    writer = Writer(names, node.name, node.device)
    items = [
        writer.unpacked(tensor, kind.name, steps) if of_steps else (tensor,) * steps
        for tensor, kind, of_steps in zip(node.inputs, given, attrs["of_steps"], strict=True)
    ]
    kinds = {"Tseed": given[0]}
    if op != _KEYS:
        kinds = {"dtype": made[0]}
        kinds |= {"Tshape": given[0]} if op.endswith("V2") else {"T": given[0], "Tseed": given[1]}
    drawn = [writer.emit(op, inputs, kinds, "step", len(made)) for inputs in zip(*items, strict=True)]
    packed = [
        writer.packed([TensorId(each.node, index) for each in drawn], kind.name) for index, kind in enumerate(made)
    ]
    if len(packed) == 1:  # a launch may read it: it keeps its name
        return [*writer.nodes[:-1], replace(writer.nodes[-1], name=node.name)]
    instead |= {TensorId(node.name, index): tensor for index, tensor in enumerate(packed)}
    return writer.nodes


def _is_few(steps: Dim) -> bool:
    return isinstance(steps, int) and steps <= MOST_STEPS


def _drawing(body: Graph, nodes: Sequence[NewNode | RecurrentNode]) -> Iterator[Node]:
    """The ops of a step that draw numbers of the loop's size, if such an op is among `nodes`."""
    if any(isinstance(node, NewNode) and node.op == STEP_DRAWS for node in nodes):
        yield from (node for node in body if node.op in SEEDED and node.op != _KEYS)

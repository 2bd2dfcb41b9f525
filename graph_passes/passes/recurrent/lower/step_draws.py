"""Random ops with a seed of each step: one op that runs TensorFlow's kernel once for each step.

    seeds [time, 2]  --TfmemStepDraws(StatelessRandomGetKeyCounter)-->  keys [time, 1], counters [time, 2]
    keys, counters   --TfmemStepDraws(StatelessRandomUniformV2)-->      numbers [time, batch, units]

So the numbers are those that the loop draws, for any number of steps. A GPU's kernel of the op draws for all steps at
once, but no truncated normals: for those `unrolled` writes TensorFlow's own op for each step.
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
    """`match` with TensorFlow's op for each step where a GPU's kernel of `TfmemStepDraws` does not draw.

    Raises:
        Unreadable: there are too many steps, or their number is unknown.
    """
    nodes: list[NewNode | RecurrentNode] = []
    for node in match.nodes:
        nodes += _unrolled(node, names) if isinstance(node, NewNode) and _is_truncated(node) else [node]
    return replace(match, nodes=tuple(nodes))


def _is_truncated(node: NewNode) -> bool:
    attrs: Mapping[str, Any] = node.attrs
    return node.op == STEP_DRAWS and "Truncated" in attrs["op"]


def _unrolled(node: NewNode, names: Names) -> list[NewNode]:
    """The ops of `node`, one for each step; the last has its name, since a launch may read it."""
    attrs: Mapping[str, Any] = node.attrs
    op, steps, given, (made,) = attrs["op"], attrs["steps"], attrs["Tin"], attrs["Tout"]
    if not 0 < steps <= MOST_STEPS:
        raise Unreadable(Reason.STEP_DRAWS(node=node.name, op=op, most=MOST_STEPS))
    writer = Writer(names, node.name, node.device)
    items = [
        writer.unpacked(tensor, kind.name, steps) if of_steps else (tensor,) * steps
        for tensor, kind, of_steps in zip(node.inputs, given, attrs["of_steps"], strict=True)
    ]
    kinds = {"dtype": made} | ({"Tshape": given[0]} if op.endswith("V2") else {"T": given[0], "Tseed": given[1]})
    writer.packed([writer.emit(op, inputs, kinds, "step") for inputs in zip(*items, strict=True)], made.name)
    return [*writer.nodes[:-1], replace(writer.nodes[-1], name=node.name)]


def _is_few(steps: Dim) -> bool:
    return isinstance(steps, int) and steps <= MOST_STEPS


def _drawing(body: Graph, nodes: Sequence[NewNode | RecurrentNode]) -> Iterator[Node]:
    """The ops of a step that draw numbers of the loop's size, if such an op is among `nodes`."""
    if any(isinstance(node, NewNode) and node.op == STEP_DRAWS for node in nodes):
        yield from (node for node in body if node.op in SEEDED and node.op != _KEYS)

"""Layer normalisation as Keras writes it: a batch normalisation over a reshaped batch.

Reshape(x, [1, batch, units, 1]) -> FusedBatchNormV3(training, NCHW) -> Reshape(_, Shape(x))

Shapes are constants where the batch is known, and computed where it is not.
"""

from __future__ import annotations

from dataclasses import dataclass

from graph_passes.graph import slices
from graph_passes.graph.ir import Graph, Node, TensorId, boolean, floating, text
from graph_passes.graph.ops import passed, scalar_value


@dataclass(frozen=True)
class Normalised:
    """`tensor`, each row with mean 0 and variance 1."""

    tensor: TensorId
    epsilon: float


def normalised_operand(body: Graph, node: Node) -> Normalised | None:
    """What the Reshape `node` normalises, if it is the end of such a group."""
    source = passed(body, node.inputs[0])
    norm = body[source.node]
    if node.op != "Reshape" or not norm.op.startswith("FusedBatchNorm") or source.index != 0:
        return None
    before = body[passed(body, norm.inputs[0]).node]
    if before.op != "Reshape":
        return None
    operand = passed(body, before.inputs[0])
    training = boolean(norm.attrs.get("is_training")) and text(norm.attrs.get("data_format")) == "NCHW"
    plain = _filled(body, norm.inputs[1]) == 1 and _filled(body, norm.inputs[2]) == 0
    if not training or not plain or not _has_shape_of(body, node, operand):
        return None
    return Normalised(operand, floating(norm.attrs["epsilon"])) if _is_by_row(body, before, operand) else None


def _filled(body: Graph, tensor: TensorId) -> float | None:
    node = body[passed(body, tensor).node]
    return scalar_value(body, node.inputs[1]) if node.op == "Fill" else None


def _has_shape_of(body: Graph, reshape: Node, operand: TensorId) -> bool:
    """Whether a tensor is given the shape of `operand`, which is a matrix."""
    shape = body[passed(body, reshape.inputs[1]).node]
    if shape.op == "Shape":
        return passed(body, shape.inputs[0]) == operand
    known = body.sizes(operand)
    return known is not None and len(known) == 2 and body.sizes(TensorId(reshape.name)) == known


def _is_by_row(body: Graph, reshape: Node, operand: TensorId) -> bool:
    """Whether the second dimension of the reshaped tensor is the batch."""
    before, after = body.sizes(operand), body.sizes(TensorId(reshape.name))
    if before is not None and after is not None:
        return after == (1, *before, 1)
    pack = body[passed(body, reshape.inputs[1]).node]
    if pack.op != "Pack" or len(pack.inputs) != 4:
        return False
    if scalar_value(body, pack.inputs[0]) != 1 or scalar_value(body, pack.inputs[3]) != 1:
        return False
    return _dimensions(body, pack.inputs[1], operand) == [0] and _dimensions(body, pack.inputs[2], operand) == [1]


def _dimensions(body: Graph, tensor: TensorId, operand: TensorId) -> list[int] | None:
    """The dimensions of `operand` whose product the scalar `tensor` is."""
    node = body[passed(body, tensor).node]
    if node.op == "Prod":
        node = body[passed(body, node.inputs[0]).node]
    if node.op != "StridedSlice":
        return None
    shape, taken = body[passed(body, node.inputs[0]).node], slices.axes(body, node)
    if shape.op != "Shape" or passed(body, shape.inputs[0]) != operand or taken is None or len(taken) != 1:
        return None
    (part,) = taken
    if isinstance(part.begin, TensorId) or isinstance(part.end, TensorId):
        return None
    dimensions = [0, 1][part.begin : part.end]
    return dimensions[:1] if part.single else dimensions

"""Items that a step takes out of a whole tensor at the step's number: `x[t]`, `x[:, t]`, `tf.gather(x, t)`."""

from __future__ import annotations

from collections.abc import Callable

from graph_passes.ir import Graph, Node, TensorId, integer
from graph_passes.recurrent.loops import passed, scalar_value


def item_of(body: Graph, node: Node, is_counter: Callable[[TensorId], bool]) -> tuple[TensorId, int] | None:
    """The tensor and the axis along which `node` takes the step's item; None if it does something else."""
    if node.op == "GatherV2" and is_counter(node.inputs[1]):
        axis = scalar_value(body, node.inputs[2])
        plain = integer(node.attrs.get("batch_dims", 0)) == 0
        return (node.inputs[0], int(axis)) if axis is not None and axis >= 0 and plain else None
    if node.op != "StridedSlice":
        return None
    begin = body[passed(body, node.inputs[1]).node]
    masks = {key: integer(node.attrs.get(f"{key}_mask", 0)) for key in ("begin", "end", "shrink_axis", "new_axis")}
    ellipsis = integer(node.attrs.get("ellipsis_mask", 0))
    if begin.op != "Pack" or masks["new_axis"] or ellipsis:
        return None
    counted = [axis for axis, part in enumerate(begin.inputs) if is_counter(part)]
    if len(counted) != 1 or masks["shrink_axis"] != 1 << counted[0]:
        return None
    others = [1 << axis for axis in range(len(begin.inputs)) if axis != counted[0]]
    steps = body.constants.get(node.inputs[3].node)
    whole = all(masks["begin"] & bit and masks["end"] & bit for bit in others)
    return (node.inputs[0], counted[0]) if whole and steps is not None and (steps == 1).all() else None

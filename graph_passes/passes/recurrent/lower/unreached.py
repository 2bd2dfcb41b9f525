"""Steps that a loop may not reach because its states end it: nothing that is computed for these may fail.

How many steps there are is counted with the bound as their number. What depends on no state is then computed for all
steps up to the bound, where TensorFlow computes it for as many as it runs. An item behind the last one, an index out of
range and a division of whole numbers by 0 would raise an error that TensorFlow never sees.
"""

from __future__ import annotations

from graph_passes.graph.ir import Graph, Node, TensorId
from graph_passes.graph.ops import passed
from graph_passes.passes.recurrent.find.counting import Linear, Numbers, StepNumber, of_key
from graph_passes.passes.recurrent.find.equal_scalars import dimension_key
from graph_passes.passes.recurrent.find.loops import Loop, Unreadable
from graph_passes.passes.recurrent.find.step_items import item_of, list_source, read_item
from graph_passes.passes.recurrent.lower.hoist import FIXED, STEP, Hoister
from graph_passes.refusals import Reason

_GATHERS = frozenset({"GatherV2", "ResourceGather"})
_DIVISIONS = frozenset({"Div", "FloorDiv", "FloorMod", "Mod", "RealDiv", "TruncateDiv", "TruncateMod"})
_WHOLE = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def require_harmless(graph: Graph, loop: Loop, hoister: Hoister, numbers: Numbers, steps: Linear) -> None:
    """Refuse a loop of which a step that is not reached may fail.

    Args:
        graph: around the loop.
        loop: which its states end.
        hoister: of its body.
        numbers: whole numbers of its body.
        steps: the bound.

    Raises:
        Unreadable: it is such a loop.
    """
    body = loop.body.graph
    places = {name: place for place, name in enumerate(loop.body.arguments)}
    for node in body:
        if node.name in places or hoister.level(TensorId(node.name)) != STEP:
            continue
        read, item = read_item(node), item_of(body, node, numbers.place)
        if read is not None:
            variable, at = places.get(passed(body, read.handle).node), numbers.place(read.index)
            tensor = None if variable is None else list_source(graph, loop.initial[variable])
            if tensor is not None and at is not None:  # where it is not known, no reader can take it
                _require_inside(node, tensor, _length(graph, tensor, 0), at, steps)
        elif item is not None and hoister.level(item[0]) == FIXED:
            tensor, axis, at = item
            source = passed(body, tensor)
            around = source.node in places
            length = _length(graph, loop.initial[places[source.node]], axis) if around else _length(body, source, axis)
            _require_inside(node, tensor, length, at, steps)
        elif may_fail(body, node, hoister):
            raise Unreadable(Reason.STEP_FAILS.of(node))


def may_fail(body: Graph, node: Node, hoister: Hoister) -> bool:
    """Whether a node, which may run once for many steps, may raise an error for some of these and not for others."""
    if len(node.inputs) < 2 or hoister.level(node.inputs[1]) == FIXED:  # then it fails in all steps or in none
        return False
    spec = body.specs.get(node.inputs[0])
    whole = spec is None or spec.dtype in _WHOLE
    return node.op in _GATHERS or (whole and (node.op in _DIVISIONS or node.op == "Pow"))


def _length(graph: Graph, tensor: TensorId, axis: int) -> Linear:
    return of_key(dimension_key(graph, tensor, axis))


def _require_inside(node: Node, tensor: TensorId, length: Linear, at: StepNumber, steps: Linear) -> None:
    """Raises Unreadable unless the item at `at` is there in each of so many steps."""
    last = at.start.plus(steps.plus(-1), at.step)
    low, high = (at.start, last) if at.step > 0 else (last, at.start)
    if not (low.is_size and length.plus(high, -1).plus(-1).is_size):
        raise Unreadable(Reason.OTHER_ITEMS.of(node, tensor=tensor))

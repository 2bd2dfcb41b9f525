"""Ops that compute nothing: each element is one of an operand's, or a number that pads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graph_passes.graph.ir import Graph, Node, TensorId, integer
from graph_passes.graph.ops import IDENTITIES, OpPattern, checks_shape
from graph_passes.lower import pick
from graph_passes.lower.access import FIRST, Access, divided, reshaped, shifted
from graph_passes.lower.known_numbers import constant, integers
from graph_passes.lower.program_writer import LoweringError, ProgramWriter, Steps
from graph_passes.lower.rule import Rule, Write, broadcast
from graph_passes.lower.slicing import part_of, taken
from graph_passes.refusals import Reason, Refusal


def _same(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    return (yield node.inputs[output], at)


def _reshape(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    (x, *_) = node.inputs
    shape, source = w.shapes[TensorId(node.name)], w.shapes[x]
    found = reshaped(at, shape, source, w.sizes)
    if found is None and any(index.nodes for index in at) and min((*shape[1:], *source[1:]), default=0) >= 0:
        found = pick.reshaped(w, at, shape, source)
    if found is None:
        raise LoweringError(Reason.RESHAPED.of(node))
    return (yield x, found)


def _broadcast_to(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    x = node.inputs[0]
    return (yield x, broadcast(w, x, w.shapes[TensorId(node.name)], at))


def _transpose(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    order = integers(w.graph, node.inputs[1]) or []
    found = [FIRST] * len(at)
    for index, place in zip(at, order, strict=True):
        found[place % len(at)] = index
    return (yield node.inputs[0], tuple(found))


def _transposes(graph: Graph, node: Node) -> OpPattern:
    """A view where only axes of one element change places, as when a sequence of one token is split into heads."""
    order, shape = integers(graph, node.inputs[1]) or [], graph.specs[TensorId(node.name)].shape or ()
    source = graph.specs[node.inputs[0]].shape or ()
    moved = [place % len(source) for place in order if source[place] != 1]
    return OpPattern.VIEW if moved == sorted(moved) and shape.count(None) <= 1 else OpPattern.LAYOUT


def _slice(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    part = part_of(w.graph, node)
    begin = part.begins if part is not None else integers(w.graph, node.inputs[1]) or []
    return (yield node.inputs[0], tuple(shifted(index, first) for index, first in zip(at, begin, strict=True)))


def _slice_refusal(graph: Graph, node: Node) -> Refusal | None:
    known = part_of(graph, node) is not None or integers(graph, node.inputs[1]) is not None
    return None if known else Reason.NOT_CONSTANT(place=1, op=node.op)


def _strided_slice(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    x = node.inputs[0]
    places = taken(w.graph, node, node.inputs[1:4], w.shapes[x])
    assert places is not None
    moved = (FIRST if each.output is None else pick.times(w, at[each.output], each.step) for each in places)
    return (yield x, tuple(shifted(index, each.begin) for index, each in zip(moved, places, strict=True)))


def _strided_slice_refusal(graph: Graph, node: Node) -> Refusal | None:
    shape = graph.specs[node.inputs[0]].shape or ()
    known = taken(graph, node, node.inputs[1:4], [-1 if size is None else size for size in shape])
    return None if known is not None else Reason.SLICE_BOUNDS()


def _strided_slice_gradient(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    """The gradient where the slice took an element, else 0."""
    gradient = node.inputs[4]
    places = taken(w.graph, node, node.inputs[1:4], w.shapes[TensorId(node.name)])
    assert places is not None
    shape = w.shapes[gradient]
    found, inside = [FIRST] * len(shape), []
    for index, each in zip(at, places, strict=True):
        moved = shifted(index, -each.begin)
        if each.output is None:
            inside += pick.within(w, moved, 0, 1)
        else:
            size = shape[each.output]
            pick.require_known(node, [size])
            if each.step < 0:
                moved = pick.times(w, moved, -1)
            step = abs(each.step)
            inside += pick.within(w, moved, 0, step * (size - 1) + 1)
            moved = pick.clamped(w, moved, step * (size - 1) + 1)
            if step > 1:
                inside.append(pick.is_multiple(w, moved, step))
                moved = pick.quotient(w, moved, step)
            found[each.output] = moved
    element = yield gradient, tuple(found)
    return pick.where_all(w, inside, element, w.like(element, 0))


def _gradient_refusal(graph: Graph, node: Node) -> Refusal | None:
    shape = graph.specs[TensorId(node.name)].shape or ()
    known = taken(graph, node, node.inputs[1:4], [-1 if size is None else size for size in shape])
    return None if known is not None else Reason.SLICE_GRADIENT()


def _concat(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    parts = node.inputs[:-1]
    place = (integers(w.graph, node.inputs[-1]) or [0])[0] % len(at)
    return (yield from pick.joined(w, node, parts, place, at))


def _pack(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    place = integer(node.attrs.get("axis", 0)) % len(at)
    element: int | None = None
    low, high = pick.range_of(w, at[place], len(node.inputs))
    rest = (*at[:place], *at[place + 1 :])
    for number in range(high, low - 1, -1):
        part = yield node.inputs[number], rest
        element = part if element is None else pick.where_below(w, at[place], number + 1, part, element)
    assert element is not None
    return element


def _unpack(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    x = node.inputs[0]
    place = integer(node.attrs.get("axis", 0)) % len(w.shapes[x])
    return (yield x, (*at[:place], shifted(FIRST, output), *at[place:]))


def _unpack_refusal(graph: Graph, node: Node) -> Refusal | None:
    shape = graph.specs[node.inputs[0]].shape
    place = integer(node.attrs.get("axis", 0))
    return None if shape and shape[place] is not None else Reason.UNPACK_COUNT()


def _ensure_refusal(graph: Graph, node: Node) -> Refusal | None:
    """Generated kernels check no shape at run time, so an op that may refuse one stays TensorFlow's."""
    return Reason.CHECKED_SHAPE() if checks_shape(graph, node) else None


def _squeeze_refusal(graph: Graph, node: Node) -> Refusal | None:
    before, after = graph.specs[node.inputs[0]].shape, graph.specs[TensorId(node.name)].shape
    known = before is not None and after is not None and before.count(None) == after.count(None)
    return None if known else Reason.SQUEEZED()


def _split(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    x, dimension = (node.inputs[1], node.inputs[0]) if node.op == "Split" else (node.inputs[0], node.inputs[2])
    place = (integers(w.graph, dimension) or [0])[0] % len(at)
    sizes = [w.shapes[TensorId(node.name, part)][place] for part in range(output)]
    pick.require_known(node, sizes)
    return (yield x, (*at[:place], shifted(at[place], sum(sizes)), *at[place + 1 :]))


def _pad(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    x, paddings = node.inputs[0], integers(w.graph, node.inputs[1]) or []
    shape = w.shapes[x]
    found, inside = [], []
    for index, size, before, after in zip(at, shape, paddings[::2], paddings[1::2], strict=True):
        if before or after:
            pick.require_known(node, [size])
            moved = shifted(index, -before)
            inside += pick.within(w, moved, 0, size)
            found.append(pick.clamped(w, moved, size))
        else:
            found.append(index)
    element = yield x, tuple(found)
    padding = w.like(element, 0)
    if node.op == "PadV2":
        padding = yield node.inputs[2], ()
    return pick.where_all(w, inside, element, padding)


def _tile(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    x = node.inputs[0]
    found = []
    for index, size, wide in zip(at, w.shapes[x], w.shapes[TensorId(node.name)], strict=True):
        pair = (FIRST, FIRST if size == 1 else index) if size in (1, wide) else divided(index, size, w.sizes)
        if pair is None or (size < 0 and size != wide):
            raise LoweringError(Reason.REPEATED.of(node))
        found.append(pair[1])
    return (yield x, tuple(found))


def _reverse(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    x = node.inputs[0]
    found = list(at)
    for place in integers(w.graph, node.inputs[1]) or ():
        size = w.shapes[x][place]
        pick.require_known(node, [size])
        found[place] = shifted(pick.times(w, at[place], -1), size - 1)
    return (yield x, tuple(found))


def _roll(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    """Elements that went over the end of a dimension come first."""
    x = node.inputs[0]
    shifts, places = (integers(w.graph, tensor) or [] for tensor in node.inputs[1:])
    found = list(at)
    for place in {place % len(at): None for place in places}:
        size = w.shapes[x][place]
        pick.require_known(node, [size])
        shift = sum(by for by, other in zip(shifts, places, strict=True) if other % len(at) == place) % size
        found[place] = pick.turned(w, at[place], shift, size)
    return (yield x, tuple(found))


def _range(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    dtype = w.shapes.dtype(TensorId(node.name))
    start, _, step = ((integers(w.graph, tensor) or [0])[0] for tensor in node.inputs)
    position = w.apply("multiply", w.position(at[0], dtype), w.number(dtype, step))
    return w.apply("add", position, w.number(dtype, start))
    yield


def _range_refusal(graph: Graph, node: Node) -> Refusal | None:
    if graph.specs[TensorId(node.name)].dtype not in ("int32", "int64"):
        return Reason.RANGE()
    return _constants(0, 2)(graph, node)


def _band_part(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    """Elements no more than so many places below and above the diagonal; a negative number of them is all."""
    lower, upper = ((integers(w.graph, tensor) or [0])[0] for tensor in node.inputs[1:])
    element = yield node.inputs[0], at
    row, column = w.position(at[-2]), w.position(at[-1])
    outside = [w.apply("greater", w.apply("subtract", row, column), w.like(row, lower))] if lower >= 0 else []
    if upper >= 0:
        outside.append(w.apply("greater", w.apply("subtract", column, row), w.like(row, upper)))
    for condition in outside:
        element = w.apply("select", condition, w.like(element, 0), element)
    return element


def _constants(*places: int) -> Callable[[Graph, Node], Refusal | None]:
    def refusal(graph: Graph, node: Node) -> Refusal | None:
        unknown = [place for place in places if constant(graph, node.inputs[place]) is None]
        return Reason.NOT_CONSTANT(place=unknown[0], op=node.op) if unknown else None

    return refusal


def _layout(write: Write, *constant_inputs: int, operands: tuple[int, int | None] = (0, 1)) -> Rule:
    return Rule(write, OpPattern.LAYOUT, operands, _constants(*constant_inputs))


_VIEWS: Sequence[str] = sorted(IDENTITIES - {"IdentityN"})

RULES = {name: Rule(_same, OpPattern.VIEW, (0, 1)) for name in _VIEWS} | {
    "EnsureShape": Rule(_same, OpPattern.VIEW, (0, 1), _ensure_refusal),
    "IdentityN": Rule(_same, OpPattern.LAYOUT),
    "Reshape": Rule(_reshape, OpPattern.VIEW, (0, 1)),
    "ExpandDims": Rule(_reshape, OpPattern.VIEW, (0, 1)),
    "Squeeze": Rule(_reshape, OpPattern.VIEW, (0, 1), _squeeze_refusal),
    "BroadcastTo": _layout(_broadcast_to),
    "Transpose": Rule(_transpose, _transposes, (0, 1), _constants(1)),
    "Slice": Rule(_slice, OpPattern.LAYOUT, (0, 1), _slice_refusal),
    "StridedSlice": Rule(_strided_slice, OpPattern.LAYOUT, (0, 1), _strided_slice_refusal),
    "StridedSliceGrad": Rule(_strided_slice_gradient, OpPattern.LAYOUT, (4, 5), _gradient_refusal),
    "ConcatV2": _layout(_concat, -1, operands=(0, -1)),
    "Pack": _layout(_pack, operands=(0, None)),
    "Unpack": Rule(_unpack, OpPattern.LAYOUT, (0, 1), _unpack_refusal),
    "Split": _layout(_split, 0, operands=(1, 2)),
    "SplitV": _layout(_split, 2),
    "Pad": _layout(_pad, 1, operands=(0, 1)),
    "PadV2": _layout(_pad, 1, operands=(0, 3)),
    "Tile": Rule(_tile, OpPattern.LAYOUT, (0, 1)),
    "ReverseV2": _layout(_reverse, 1),
    "Roll": _layout(_roll, 1, 2),
    "Range": Rule(_range, OpPattern.LAYOUT, (0, 0), _range_refusal),
    "MatrixBandPart": _layout(_band_part, 1, 2),
}

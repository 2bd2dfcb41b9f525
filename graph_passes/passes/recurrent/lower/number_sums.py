"""What ops that compute with all numbers of a row make of them: sums, the largest, products, choices."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from math import prod

import numpy as np

from custom_ops.recurrent.cell import Product, Term
from graph_passes.graph.ir import Node, TensorId, boolean, integer, text
from graph_passes.graph.ops import FLOATS
from graph_passes.passes.recurrent.find.loops import Unreadable
from graph_passes.passes.recurrent.lower.hoist import FIXED
from graph_passes.passes.recurrent.lower.numbers import NumberReader, Numbers, Row, Rule, each
from graph_passes.passes.recurrent.lower.prologue import Hoisted, HoistedForm
from graph_passes.refusals import Reason

MOST_CHOICES = 64  # rows of a table from which a step takes one
WHOLE = ("int32", "int64")


def _reduced(reader: NumberReader, node: Node, tensor: TensorId) -> Row:
    row, rank = reader.operand(node), len(reader.hoister.shape(node.inputs[0]))
    axes = reader.axes(row, node.inputs[1], node, rank)
    keep = boolean(node.attrs.get("keep_dims"))
    found = _along(row.numbers, axes, _reduction(reader, node.op), keep)
    below = sum(int(axis) % rank < row.batch for axis in reader.constant(node.inputs[1]).reshape(-1))
    return Row(found, row.batch if keep or row.batch < 0 else row.batch - below)


def _along(numbers: Numbers, axes: tuple[int, ...], reduction: Callable[[list[int]], int], keep: bool) -> Numbers:
    rest = [axis for axis in range(numbers.ndim) if axis not in axes]
    count = prod(numbers.shape[axis] for axis in axes)
    flat = np.transpose(numbers, [*rest, *axes]).reshape(-1, count)
    made = np.array([reduction(line.tolist()) for line in flat], object)
    return made.reshape(
        [1 if axis in axes else dim for axis, dim in enumerate(numbers.shape) if keep or axis not in axes]
    )


def _reduction(reader: NumberReader, op: str) -> Callable[[list[int]], int]:
    build = reader.builder

    def mean(line: list[int]) -> int:
        return build.apply("multiply", build.sum(*line), build.constant(1.0 / len(line)))

    def most(name: str) -> Callable[[list[int]], int]:
        def largest(line: list[int]) -> int:
            """The extreme number; its gradient goes to all that are equal to it in equal parts, as TensorFlow's."""
            if len(line) == 1:
                return line[0]
            end = reduce(lambda one, other: build.apply(name, one, other), line)
            equal = [build.apply("equal", each, end) for each in line]
            zero = build.constant(0.0)
            kept = [build.apply("select", flag, each, zero) for flag, each in zip(equal, line, strict=True)]
            return build.apply("divide", build.sum(*kept), build.sum(*equal))

        return largest

    multiplied: Callable[[list[int]], int] = lambda line: reduce(lambda a, b: build.apply("multiply", a, b), line)  # noqa: E731
    added: Callable[[list[int]], int] = lambda line: build.sum(*line)  # noqa: E731
    either: Callable[[list[int]], int] = lambda line: reduce(lambda a, b: build.apply("maximum", a, b), line)  # noqa: E731
    return {"Sum": added, "Mean": mean, "Max": most("maximum"), "Min": most("minimum"), "Prod": multiplied,
            "All": multiplied, "Any": either}[op]  # fmt: skip


def _softmax(reader: NumberReader, node: Node, tensor: TensorId) -> Row:
    row, build = reader.operand(node), reader.builder
    if row.batch == len(reader.hoister.shape(tensor)) - 1:
        raise Unreadable(Reason.ROWS_UNALIKE.of(node))
    axes = (row.numbers.ndim - 1,)
    most = _along(row.numbers, axes, _reduction(reader, "Max"), True)
    centred = each(lambda a, b: build.apply("subtract", a, b), row.numbers, most)
    powers = each(lambda a: build.apply("exp", a), centred)
    total = _along(powers, axes, _reduction(reader, "Sum"), True)
    if node.op == "Softmax":
        return Row(each(lambda a, b: build.apply("divide", a, b), powers, total), row.batch)
    logs = each(lambda a: build.apply("log", a), total)
    return Row(each(lambda a, b: build.apply("subtract", a, b), centred, logs), row.batch)


def _largest(reader: NumberReader, node: Node, tensor: TensorId) -> Row:
    """The index of the largest number."""
    row, build, rank = reader.operand(node), reader.builder, len(reader.hoister.shape(node.inputs[0]))
    axes = reader.axes(row, node.inputs[1], node, rank)

    def index(line: list[int]) -> int:
        best, found = line[0], build.constant(0.0)
        for place, number in enumerate(line[1:], 1):
            better = build.apply("greater", number, best)
            found = build.apply("select", better, build.constant(float(place)), found)
            best = build.apply("maximum", best, number)
        return found

    axis = int(reader.constant(node.inputs[1]).reshape(())) % rank
    return Row(_along(row.numbers, axes, index, False), row.batch - (axis < row.batch))


def _taken(reader: NumberReader, node: Node, tensor: TensorId) -> Row:
    """Rows of a table, at indices that a step computes."""
    table = _table(reader, node)
    axis = int(reader.constant(node.inputs[2]).reshape(())) if len(node.inputs) > 2 else 0
    if table.batch >= 0 or axis != 0 or integer(node.attrs.get("batch_dims", 0)) or len(table.numbers) > MOST_CHOICES:
        raise Unreadable(Reason.CELL_OP.of(node))
    index, build = reader.operand(node, 1), reader.builder

    def choose(place: int) -> Numbers:
        chosen = table.numbers[0]
        for number in range(1, len(table.numbers)):
            same = build.apply("equal", place, build.constant(float(number)))
            chosen = each(lambda a, b, s=same: build.apply("select", s, a, b), table.numbers[number], chosen)
        return chosen

    found = [choose(place) for place in index.numbers.reshape(-1).tolist()]
    return Row(np.array(found, object).reshape(*index.numbers.shape, *table.numbers.shape[1:]), index.batch)


def _table(reader: NumberReader, node: Node) -> Row:
    """What a gather takes rows of, a variable perhaps."""
    if node.op != "ResourceGather":
        return reader.row(node.inputs[0], -1)
    handle = reader.hoister.hoisted(node.inputs[0])
    dtype = node.attrs["dtype"]
    spec = reader.body.specs[node.inputs[0]].behind
    if spec is None or spec.shape is None or None in spec.shape:
        raise Unreadable(Reason.CELL_OP.of(node))
    made = reader.prologue.emit("ReadVariableOp", [handle.tensor], {"dtype": dtype})
    count = prod(dim or 0 for dim in spec.shape)
    flat = reader.prologue.reshape(made, spec.dtype, (count,))
    columns = reader.leaves.columns(Hoisted(flat, HoistedForm.FIXED, (count,), spec.dtype))
    return Row(np.array(columns, object).reshape(tuple(dim or 0 for dim in spec.shape)), -1)


def _cast(reader: NumberReader, node: Node, tensor: TensorId) -> Row:
    before, after = reader.body.specs[node.inputs[0]].dtype, reader.body.specs[tensor].dtype
    known = FLOATS | {"bool", *WHOLE}
    if before not in known or after not in known or (before in FLOATS and after in WHOLE) or after == "bool":
        raise Unreadable(Reason.CELL_CAST.of(node, before=before, after=after))
    return reader.operand(node)


def _finite(reader: NumberReader, node: Node, tensor: TensorId) -> Row:
    row, build = reader.operand(node), reader.builder
    zero = build.constant(0.0)  # infinity less infinity is NaN, and equal to nothing
    return Row(each(lambda a: build.apply("equal", build.apply("subtract", a, a), zero), row.numbers), row.batch)


def _filled(reader: NumberReader, node: Node, tensor: TensorId) -> Row:
    row = reader.operand(node)
    value = reader.builder.constant(float(node.op == "OnesLike"))
    return Row(each(lambda _: value, row.numbers), row.batch)


def _product(reader: NumberReader, node: Node, tensor: TensorId) -> Row:
    ranks = [len(reader.hoister.shape(source)) for source in node.inputs[:2]]
    flags = [
        boolean(node.attrs.get(f"transpose_{side}")) or boolean(node.attrs.get(f"adj_{other}"))
        for side, other in (("a", "x"), ("b", "y"))
    ]
    outer = "uvwxyz"[-max(*ranks, 2) + 2 :] if max(ranks) > 2 else ""
    left = outer[len(outer) - ranks[0] + 2 :] + ("kr" if flags[0] else "rk")
    right = outer[len(outer) - ranks[1] + 2 :] + ("ck" if flags[1] else "kc")
    return _contracted(reader, node, (left, right), f"{outer}rc")


def _einsum(reader: NumberReader, node: Node, tensor: TensorId) -> Row:
    inputs, _, output = (text(node.attrs.get("equation")) or "").replace(" ", "").partition("->")
    parts = tuple(inputs.split(","))
    if "." in inputs or len(parts) != 2 or any(len(set(part)) < len(part) for part in (*parts, output)):
        raise Unreadable(Reason.CELL_OP.of(node))
    return _contracted(reader, node, parts, output)


def _contracted(reader: NumberReader, node: Node, parts: tuple[str, ...], output: str) -> Row:
    """The sum of products, over the letters that `output` does not have."""
    fixed_ones = [reader.hoister.level(source) == FIXED for source in node.inputs[:2]]
    known_rows = [None if fixed else reader.row(source, len(part))
                  for source, part, fixed in zip(node.inputs, parts, fixed_ones, strict=False)]  # fmt: skip
    letters = {part[row.batch] for row, part in zip(known_rows, parts, strict=True) if row and row.batch >= 0}
    rows = [row or reader.row(source, len(part) if part[:1] in letters else -1)
            for row, source, part in zip(known_rows, node.inputs, parts, strict=False)]  # fmt: skip
    batches = {part[row.batch] for row, part in zip(rows, parts, strict=True) if row.batch >= 0}
    alone = [part for row, part in zip(rows, parts, strict=True) if row.batch < 0]
    if len(batches) > 1 or any(letter not in output or letter in "".join(alone) for letter in batches):
        raise Unreadable(Reason.CELL_PRODUCT.of(node))
    batch = next(iter(batches), "")
    names = [part.replace(batch, "") if batch else part for part in parts]
    sizes = {letter: size for row, name in zip(rows, names, strict=True)
             for letter, size in zip(name, row.numbers.shape, strict=True)}  # fmt: skip
    free = [letter for letter in output if letter != batch]
    summed = [letter for letter in sizes if letter not in output]
    fixed = next((place for place in (0, 1) if _is_matrix(reader, node.inputs[place], rows[place])), None)
    matrix = None if fixed is None else matrix_of(reader, node.inputs[fixed])
    found = np.empty([sizes[letter] for letter in free], object)
    for index in np.ndindex(found.shape):
        known = dict(zip(free, index, strict=True))
        pairs: list[list[tuple[int, ...]]] = []
        for inner in np.ndindex(*(sizes[letter] for letter in summed)):
            at = known | dict(zip(summed, inner, strict=True))
            pairs.append([tuple(at[letter] for letter in name) for name in names])
        if matrix is None or fixed is None:
            build = reader.builder
            products = [build.apply("multiply", rows[0].numbers[a], rows[1].numbers[b]) for a, b in pairs]
            found[index] = build.sum(*products)
        else:
            terms = [term_of(reader, rows[1 - fixed].numbers[p[1 - fixed]], *matrix, p[fixed]) for p in pairs]
            found[index] = reader.builder.add(Product(tuple(terms)))
    return Row(found, output.index(batch) if batch else -1)


def _is_matrix(reader: NumberReader, tensor: TensorId, row: Row) -> bool:
    """Whether `tensor` is a weight, whose gradient one product of all steps then makes."""
    spec = reader.body.specs.get(tensor)
    plain = row.batch < 0 and row.numbers.ndim > 1 and spec is not None and spec.dtype == reader.dtype
    return plain and reader.hoister.level(tensor) == FIXED


def matrix_of(reader: NumberReader, tensor: TensorId) -> tuple[int, tuple[int, ...]]:
    """The index of a weight as a matrix with its last dimension as columns, and its shape."""
    value = reader.hoister.hoisted(tensor)
    shape = tuple(dim or 0 for dim in value.shape)
    flat = reader.prologue.reshape(value.tensor, value.dtype, (prod(shape[:-1]), shape[-1]))
    size = (prod(shape[:-1]), shape[-1])
    return reader.leaves.matrix(Hoisted(flat, HoistedForm.FIXED, size, value.dtype)), shape


def term_of(reader: NumberReader, operand: int, matrix: int, shape: tuple[int, ...], index: tuple[int, ...]) -> Term:
    """A number times the weight at `index`."""
    row = int(np.ravel_multi_index(index[:-1], shape[:-1]))
    return Term(reader.widened(operand), matrix, row, index[-1])


SUMS: dict[str, Rule] = {
    **dict.fromkeys(("Sum", "Mean", "Max", "Min", "Prod", "All", "Any"), _reduced),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _softmax),
    "ArgMax": _largest,
    **dict.fromkeys(("GatherV2", "ResourceGather"), _taken),
    "Cast": _cast,
    "IsFinite": _finite,
    **dict.fromkeys(("ZerosLike", "OnesLike"), _filled),
    **dict.fromkeys(("MatMul", "BatchMatMulV2"), _product),
    "Einsum": _einsum,
}

"""C++ of loops that go through marked numbers alone: see `plan/segment_ids.py`."""

from __future__ import annotations

from custom_ops.fusion.codegen.plan.addresses import product
from custom_ops.fusion.codegen.plan.kernel_plan import RowLoop
from custom_ops.fusion.codegen.plan.segment_ids import Segments
from custom_ops.fusion.codegen.write.piece import Elements, PieceWriter
from custom_ops.fusion.codegen.write.values import Names, axis_name


def marked_loop(writer: PieceWriter, loop: RowLoop, found: Segments, row: Names, active: str) -> list[str]:
    """Adds up, in the sums of the loop's roots, the numbers whose ids are positions of the thread's row."""
    pattern, threads = writer.pattern, writer.threads
    name, next_ = axis_name(found.axis), f"next_marked<{threads}>"
    low, high = _positions(writer, found.axis)

    def looked_at(then: str) -> list[str]:
        names = row.new_child()
        made = writer.values.make(writer.values.missing([found.ids], names), names)
        return writer.at_position(
            Elements(loop.axes, 1, "i"), [*made, then.format(writer.values.text(found.ids, names))]
        )

    body = writer.elements(Elements(loop.axes, 1, "i", "", active), loop.roots, row)
    return [
        "{",
        f"const Index size = {product([pattern.size(axis) for axis in loop.axes])};",
        f"const long long low = {low}, high = {high};",
        f"for (Index from = 0; from < size; from += {threads}) {{",
        "const Index i = from + threadIdx.x;",
        "bool near = false;",
        "if (i < size) {",
        *looked_at("near = low <= {0} && {0} <= high;"),
        "}",
        f"if (!mark<{threads}>(near, exchange)) continue;",
        f"for (int k = {next_}(exchange, 0); k < {threads}; k = {next_}(exchange, k + 1)) {{",
        "const Index i = from + k;",
        *["{", *looked_at(f"if ({{0}} != {name}) continue;"), "}"],
        *body,
        "}",
        "}",
        "}",
    ]


def _positions(writer: PieceWriter, axis: int) -> tuple[str, str]:
    """The least and the largest position along an axis of the rows that the CTA computes at once."""
    first, *others = writer.piece.rows
    if first != axis:
        return "0", f"{writer.pattern.size(axis)} - 1"
    last = f"(first + {writer.piece.owner.rows - 1} < rows ? first + {writer.piece.owner.rows - 1} : rows - 1)"
    if not others:
        return "first", last
    each = product([writer.pattern.size(other) for other in others])
    return f"first / ({each})", f"{last} / ({each})"

"""C++ of pieces: what their threads do at a position. `rows.py` and `flat.py` write the loops around it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from custom_ops.expr.nodes import Reduce
from custom_ops.fusion.codegen.plan.addresses import At, offset_along, product
from custom_ops.fusion.codegen.plan.arguments import accumulator, storage
from custom_ops.fusion.codegen.plan.kernel_plan import KernelPlan, Piece, own_values
from custom_ops.fusion.codegen.plan.pattern import Root
from custom_ops.fusion.codegen.plan.shared import array_axes
from custom_ops.fusion.codegen.write.values import Names, ValueWriter, axis_name, positions

BEGIN = "begin"  # the position along the last axis of the first of several elements


@dataclass(frozen=True)
class Elements:
    """Positions that a thread computes one after the other.

    Attributes:
        axes: innermost last.
        width: how many there are, along the last axis; 1: one.
        index: a name, of the first one's index over all axes; "": positions are known.
        left: how many there are where they may be fewer, or "".
        active: what holds if what is computed counts, or "".
        element: the number of the element among a thread's, for values that are kept in registers; "": none are.
        loaded: the text of inputs that were loaded before.
    """

    axes: tuple[int, ...]
    width: int
    index: str
    left: str = ""
    active: str = ""
    element: str = ""
    loaded: Mapping[int, str] = field(default_factory=dict)


class PieceWriter:
    """What all pieces share.

    Attributes:
        own: values that the piece makes for itself: results of reductions, and what it keeps in shared memory.
    """

    def __init__(self, plan: KernelPlan, number: int) -> None:
        self.plan, self.number = plan, number
        self.piece: Piece = plan.pieces[number]
        self.pattern, self.threads = plan.pattern, plan.configuration.threads
        self.own = own_values(plan, self.piece)
        self.arrays: dict[int, str] = {}
        self.values = ValueWriter(self.pattern, self.arrays)

    # ---- Elements

    def elements(
        self, found: Elements, roots: Sequence[Root], outer: Names, kept: Iterable[int] = (), made: Iterable[int] = ()
    ) -> list[str]:
        """What a thread does with its elements: computes values, accumulates, stores.

        Args:
            found: which.
            roots: what for.
            outer: values that were made before.
            kept: values that lie in registers.
            made: those to leave there.
        """
        axis = found.axes[-1]
        chunk = outer.new_child()
        registers = {place: f"kept_{place}[{found.element}]" for place in kept}
        element = chunk.new_child(registers)
        places = self.values.missing(map(self.pattern.start, roots), element)
        outside = [place for place in places if found.width > 1 and not self.values.varies(place, [axis])]

        at = first_of(axis, found.width)
        left = f", {found.left}" if found.left else ""
        packs, packed = self.values.packs(places, axis, found.width, at, left, found.loaded)
        first = [*self.values.make(outside, chunk), *packs]
        body = self.values.make([place for place in places if place not in outside], element, packed)
        body += [f"kept_{place}[{found.element}] = {element[place]};" for place in made]
        last: list[str] = []
        for root in roots:
            if root.output is None:
                body.append(self._taken(root, element, found.active))
            elif found.width > 1 and root.axes[-1] == axis:
                kind = storage(self.values.dtypes[root.node])
                first.append(f"Pack<{kind}, {found.width}> result_{root.output};")
                body.append(f"result_{root.output}.at[j] = {self.values.stored(root.node, element)};")
                to = f"output_{root.output} + {offset_along(self.pattern, root.axes, at)}"
                last.append(if_(found.active, f"store({to}, result_{root.output}{left});"))
            else:
                body.append(if_(found.active, self.write(root, element)))
        if found.width > 1:
            head = [f"if (j >= {found.left}) break;"] if found.left else []
            head += used([f"const Index {axis_name(axis)} = {BEGIN} + j;"], body)
            body = ["#pragma unroll", f"for (int j = 0; j < {found.width}; ++j) {{", *head, *body, "}"]
        lines = [*first, *body, *last]
        at_index = positions(self.pattern, found.axes, found.index, at) if found.index else []
        return [*used(at_index, lines), *lines]

    def at_position(self, found: Elements, body: Sequence[str]) -> list[str]:
        """Lines that use positions, with these."""
        return [*used(positions(self.pattern, found.axes, found.index), body), *body]

    def write(self, root: Root, names: Names) -> str:
        """Stores an output's element."""
        to = f"output_{root.output}[{offset_along(self.pattern, root.axes, axis_name)}]"
        return f"{to} = {self.values.stored(root.node, names)};"

    def _taken(self, root: Root, names: Names, active: str) -> str:
        """Adds an element to what a reduction has, or keeps it in shared memory."""
        node = self.pattern.program.nodes[root.node]
        if not isinstance(node, Reduce) or not root.reduced:
            return f"{self.array(root.node)} = {self.values.text(root.node, names)};"
        over_rows = self.plan.mappings[root.name].over_rows
        text = self.joined(root.node, self.sum_name(root), self.values.text(node.operand, names))
        return if_(active if over_rows else "", text)

    def array(self, place: int) -> str:
        """An element of an array within a row."""
        return f"array_{place}[{offset_along(self.pattern, array_axes(self.plan, self.piece, place), axis_name)}]"

    def joined(self, place: int, total: str, value: str) -> str:
        return f"{total} = {self.values.operation(place)}::join({total}, {value});"

    def sum_name(self, root: Root) -> str:
        """What a reduction accumulates: a number, or one for each element of a row that a thread sees."""
        over_rows = self.plan.mappings[root.name].over_rows
        return f"sums_{root.node}[{self.sum_element}]" if over_rows and root.kept else f"sum_{root.node}"

    sum_element = ""  # see `Elements.element`

    def start(self, place: int) -> str:
        return f"{self.values.operation(place)}::start<{accumulator(self.plan, place)}>()"

    def start_sum(self, place: int) -> str:
        return f"{accumulator(self.plan, place)} sum_{place} = {self.start(place)};"

    # ---- Parts of reductions

    def parts_count(self, place: int) -> str:
        """How many CTAs have left parts of a reduction."""
        number = self.plan.parts[place]
        source = self.plan.pieces[number]
        if source.slabs > 1:
            return str(source.slabs)
        return "1" if source.most == 1 else f"ctas_{number}"

    def combined_number(self, place: int) -> list[str]:
        """Puts together the parts of a reduction that has one result."""
        operation, threads = self.values.operation(place), self.threads
        parts = f"join_parts<{operation}>(parts_{place}, threadIdx.x, {threads}, {self.parts_count(place)}, 1)"
        total = f"reduce_cta<{operation}, {threads}>({parts}, exchange)"
        return [f"const {accumulator(self.plan, place)} value_{place} = {self.values.finished(place, total)};"]

    def combined_element(self, place: int, first: str = "0", step: str = "1") -> str:
        """What a thread puts together of the parts of a result at a position."""
        axes = self.pattern.in_order(self.pattern.program.types[place].axes)  # as CTAs leave them
        at, size = offset_along(self.pattern, axes, axis_name), product([self.pattern.size(axis) for axis in axes])
        operation = self.values.operation(place)
        return (
            f"join_parts<{operation}>(parts_{place} + {at}, {first}, {step}, {self.parts_count(place)}, Index({size}))"
        )

    def parts_of_numbers(self) -> list[str]:
        """Leaves what the CTA has of the reductions over all rows that have one result."""
        lines = []
        for root in self.piece.roots:
            if self.plan.mappings[root.name].over_rows and root.output is None and not root.kept:
                total = f"reduce_cta<{self.values.operation(root.node)}, {self.threads}>(sum_{root.node}, exchange)"
                kind = accumulator(self.plan, root.node)
                lines.append(f"const {kind} total_{root.node} = {total};")
                lines.append(f"if (threadIdx.x == 0) parts_{root.node}[cta] = total_{root.node};")
        return lines

    def save(self, place: int, names: Names) -> str:
        """Stores a reduction's result for later phases."""
        axes = self.pattern.program.types[place].axes
        return f"saved_{place}[{offset_along(self.pattern, axes, axis_name)}] = {names[place]};"


def first_of(axis: int, width: int) -> At:
    """The position along each axis of the first of `width` elements along one of them."""
    return lambda other: BEGIN if other == axis and width > 1 else axis_name(other)


def if_(condition: str, statement: str) -> str:
    return f"if ({condition}) {statement}" if condition else statement


def used(declarations: Sequence[str], body: Sequence[str]) -> list[str]:
    """The `declarations` that `body`, or a later declaration, uses."""
    words = {word for line in body for word in re.findall(r"\w+", line)}
    found: list[str] = []
    for line in reversed(declarations):
        name, _, value = line.partition(" = ")
        if name.split()[-1] in words:
            found.insert(0, line)
            words |= set(re.findall(r"\w+", value))
    return found

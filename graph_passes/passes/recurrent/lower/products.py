"""Products of columns with weights, and the zeros that keep padding out of them and of sums."""

from __future__ import annotations

from dataclasses import dataclass

from custom_ops.recurrent.cell import Product, Term
from custom_ops.recurrent.cell_builder import CellBuilder
from graph_passes.graph.ir import Node
from graph_passes.passes.recurrent.find.loops import Unreadable
from graph_passes.passes.recurrent.lower.layouts import ColumnLayout
from graph_passes.passes.recurrent.lower.leaves import Leaves, spread_out
from graph_passes.passes.recurrent.lower.prologue import Hoisted, HoistedForm, Prologue
from graph_passes.refusals import Reason


@dataclass(frozen=True)
class Products:
    """Writes products into a cell.

    Attributes:
        builder: of the cell.
        leaves: what the cell reads.
        prologue: takes new nodes before the loop.
        units: lanes of a column.
        dtype: of all values.
    """

    builder: CellBuilder
    leaves: Leaves
    prologue: Prologue
    units: int
    dtype: str

    def terms(
        self,
        operands: tuple[int, ...],
        matrix: Hoisted,
        transposed: bool,
        node: Node,
        across: ColumnLayout,
        along: ColumnLayout,
    ) -> tuple[int, ...]:
        """The columns of a product, of those of its operand.

        Args:
            operands: these.
            matrix: what they are multiplied with.
            transposed: whether with its transpose.
            node: the product.
            across: the operand's layout.
            along: the product's.
        """
        rows, columns = matrix.shape[::-1] if transposed else matrix.shape
        if rows != across.width or columns != along.width:
            raise Unreadable(
                Reason.CELL_PRODUCT_SIZE.of(node, count=len(operands), units=self.units, shape=[rows, columns])
            )
        if any(across.is_narrow(width) for width in across.widths) or any(map(along.is_narrow, along.widths)):
            return self._narrow_terms(operands, matrix, transposed, node, across, along)
        tensor, (upper, lower_) = matrix.tensor, ((across, along)[:: -1 if transposed else 1])
        for axis, layout in enumerate((upper, lower_)):
            tensor = spread_out(self.prologue, tensor, matrix.dtype, axis, 2, layout)
        shape = (upper.columns * self.units, lower_.columns * self.units)
        index = self.leaves.matrix(Hoisted(tensor, HoistedForm.FIXED, shape, matrix.dtype))
        operands = self.masked(operands, across)
        products = []
        for column in range(along.columns):
            terms = [
                Term(operand, index, *((column, row) if transposed else (row, column)), transposed)
                for row, operand in enumerate(operands)
            ]
            products.append(self.builder.add(Product(tuple(terms))))
        return self.masked(tuple(products), along)

    def _narrow_terms(
        self,
        operands: tuple[int, ...],
        matrix: Hoisted,
        transposed: bool,
        node: Node,
        across: ColumnLayout,
        along: ColumnLayout,
    ) -> tuple[int, ...]:
        """The columns of a product where a part of an operand or of the product is one number a row."""
        if transposed:
            turned = self.prologue.transposed(matrix.tensor, matrix.dtype, [1, 0])
            matrix = Hoisted(turned, HoistedForm.FIXED, matrix.shape[::-1], matrix.dtype)
        found: tuple[int, ...] = ()
        for out in along.segments():
            columns = self._columns_of(matrix, out.start, out.start + out.width)
            total: list[tuple[int, ...]] = []
            for segment in across.segments():
                part = self.prologue.rows_of(columns, segment.start, segment.start + segment.width, False)
                inner = operands[segment.column : segment.column + segment.columns]
                one, other = ColumnLayout((segment.width,), self.units), ColumnLayout((out.width,), self.units)
                if across.is_narrow(segment.width) or along.is_narrow(out.width):
                    total.append(self._outer(inner, part, one, other))
                else:
                    total.append(self.terms(inner, part, False, node, one, other))
            found += tuple(self.builder.sum(*parts) for parts in zip(*total, strict=True))
        return found

    def _columns_of(self, matrix: Hoisted, start: int, end: int) -> Hoisted:
        made = self.prologue.columns(matrix.tensor, matrix.dtype, start, end, 1, 2)
        return Hoisted(made, HoistedForm.FIXED, (matrix.shape[0], end - start), matrix.dtype)

    def _outer(
        self, operands: tuple[int, ...], matrix: Hoisted, across: ColumnLayout, along: ColumnLayout
    ) -> tuple[int, ...]:
        """A product with a single row or a single column, or with one number."""
        width = across.width if along.width == 1 else along.width
        line = Hoisted(
            self.prologue.reshape(matrix.tensor, matrix.dtype, (width,)), HoistedForm.FIXED, (width,), matrix.dtype
        )
        factors = self.leaves.columns(line, along if across.width == 1 else across)
        if across.width == 1:
            made = tuple(self.builder.apply("multiply", operands[0], factor) for factor in factors)
            return self.masked(made, along)
        parts = [self.builder.apply("multiply", *pair) for pair in zip(operands, factors, strict=True)]
        return (self.builder.sum(*map(self.builder.row_sum, self.masked(tuple(parts), across))),)

    def masked(self, columns: tuple[int, ...], layout: ColumnLayout) -> tuple[int, ...]:
        """`columns` with zeros in the padding."""
        if layout.exact:
            return columns
        found = []
        for column, lanes, narrow in zip(columns, layout.lanes(), layout.narrow(), strict=True):
            valid = None if narrow or lanes == self.units else self._valid(lanes)
            zero = self.builder.constant(0.0)
            found.append(column if valid is None else self.builder.apply("select", valid, column, zero))
        return tuple(found)

    def _valid(self, lanes: int) -> int:
        """1 in so many lanes, 0 in the padding."""
        numbers = [1.0] * lanes + [0.0] * (self.units - lanes)
        tensor = self.prologue.constant(self.dtype, (self.units,), numbers)
        return self.leaves.columns(Hoisted(tensor, HoistedForm.FIXED, (self.units,), self.dtype))[0]

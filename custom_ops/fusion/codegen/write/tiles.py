"""C++ of pieces that transpose: what is read along one axis and written along another goes through shared memory."""

from __future__ import annotations

from custom_ops.expr.cuda import C_TYPES
from custom_ops.fusion.codegen.plan.addresses import offset_along, product
from custom_ops.fusion.codegen.plan.arguments import storage
from custom_ops.fusion.codegen.plan.mapping import TILE, WARP
from custom_ops.fusion.codegen.plan.pattern import Root
from custom_ops.fusion.codegen.plan.shared import SIZES
from custom_ops.fusion.codegen.write.piece import Elements, PieceWriter, used
from custom_ops.fusion.codegen.write.values import Names, axis_name, positions

PITCH = TILE + 1  # so that a column's elements lie in different banks


class TileWriter(PieceWriter):
    """Writes a piece whose outputs go through tiles of shared memory."""

    def lines(self) -> list[str]:
        *others, down, along = self.piece.rows
        names, before = Names(), list[str]()
        for place in self.piece.combined:
            before += self.combined_number(place)
            names[place] = f"value_{place}"
        rows, columns = self.pattern.size(down), self.pattern.size(along)
        body = [
            *positions(self.pattern, others, "other"),
            f"const Index first_row = tile / wide % high * {TILE}, first_column = tile % wide * {TILE};",
            "__syncthreads();",
            *self._loop([*self._at("line", "lane"), f"if (row < {rows} && column < {columns}) {{"]),
            *self.elements(Elements((down, along), 1, ""), self.piece.roots, names),
            "}",
            "}",
            "__syncthreads();",
            *self._loop([*self._at("lane", "line"), f"if (row < {rows} && column < {columns}) {{"]),
            *(self._written(root) for root in self.piece.roots),
            "}",
            "}",
        ]
        count = product([self.pattern.size(axis) for axis in others])
        return [
            *self._tiles(),
            *before,
            f"const int lane = threadIdx.x % {WARP};",
            f"const Index wide = ({columns} + {TILE - 1}) / {TILE}, high = ({rows} + {TILE - 1}) / {TILE};",
            f"const Index tiles = {count} * high * wide;",
            "for (Index tile = cta; tile < tiles; tile += ctas) {",
            *used(["const Index other = tile / (wide * high);"], body),
            *body,
            "}",
        ]

    def _tiles(self) -> list[str]:
        lines, at = [], 0
        for root in self.piece.roots:
            kind = C_TYPES[self.values.dtypes[root.node]]
            lines.append(f"{kind}* const tile_{root.output} = reinterpret_cast<{kind}*>(shared + {at});")
            at += SIZES[kind] * TILE * PITCH
        return lines

    def _at(self, row: str, column: str) -> list[str]:
        *_, down, along = self.piece.rows
        return [
            f"const Index row = first_row + {row}, column = first_column + {column};",
            f"const Index {axis_name(down)} = row, {axis_name(along)} = column;",
        ]

    def _loop(self, lines: list[str]) -> list[str]:
        step = self.threads // WARP
        return [f"for (int line = threadIdx.x / {WARP}; line < {TILE}; line += {step}) {{", *lines]

    def _written(self, root: Root) -> str:
        kind = storage(self.values.dtypes[root.node])
        text = f"tile_{root.output}[lane * {PITCH} + line]"
        text = text if kind == C_TYPES[self.values.dtypes[root.node]] else f"stored<{kind}>({text})"
        return f"output_{root.output}[{offset_along(self.pattern, root.axes, axis_name)}] = {text};"

    def write(self, root: Root, names: Names) -> str:
        """The line that writes a root into the tile."""
        return f"tile_{root.output}[line * {PITCH} + lane] = {self.values.text(root.node, names)};"

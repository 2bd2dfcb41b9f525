"""C++ of elementwise pieces: each thread computes separate positions (FusionStitching's thread composition)."""

from __future__ import annotations

from custom_ops.fusion.codegen.plan.addresses import product
from custom_ops.fusion.codegen.write.piece import Elements, PieceWriter
from custom_ops.fusion.codegen.write.values import Names


class FlatWriter(PieceWriter):
    """Writes a piece whose rows are single positions."""

    def lines(self) -> list[str]:
        piece, values = self.piece, self.values
        names = Names()
        lines = []
        for place in piece.combined:
            if not self.pattern.program.types[place].axes:
                lines += self.combined_number(place)
                names[place] = f"value_{place}"
            else:
                self.arrays[place] = values.finished(place, self.combined_element(place))
        roots = piece.roots
        wanted = [*map(self.pattern.start, roots), *piece.saved]
        scalars = [place for place in values.missing(wanted, names) if not self.pattern.program.types[place].axes]
        lines += values.make(scalars, names)
        lines += [self.start_sum(root.node) for root in roots if root.output is None]
        size = self.pattern.static(piece.rows)
        exact = size is not None and size % piece.vector == 0
        left = "" if piece.vector == 1 or exact or len(piece.rows) > 1 else "size - i"
        found = Elements(piece.rows, piece.vector, "i", left)
        body = self.elements(found, roots, names) if roots else self._saved(found, names)
        width = f" * {piece.vector}" if piece.vector > 1 else ""
        count = product([self.pattern.size(axis) for axis in piece.rows])
        return [
            *lines,
            f"const Index size = {count};",
            f"const Index step = Index(ctas) * {self.threads * piece.vector};",
            f"for (Index i = (Index(cta) * {self.threads} + threadIdx.x){width}; i < size; i += step) {{",
            *body,
            "}",
            *self.parts_of_numbers(),
        ]

    def _saved(self, found: Elements, names: Names) -> list[str]:
        """Reductions whose parts are put together, for later phases."""
        element = names.new_child()
        body = self.values.make(list(self.piece.saved), element)
        body += [self.save(place, element) for place in self.piece.saved]
        return self.at_position(found, body)

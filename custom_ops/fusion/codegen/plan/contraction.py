"""Contractions: the reductions of a pattern that are products of matrices, and the tiles in which kernels compute them.

A `dot` of a product of two values is one. Each of its axes is

    batch     along which both factors and the result vary
    rows      the left factor and the result
    columns   the right factor and the result
    depth     both factors, summed up

so that `[32, 8, 16]` queries times `[32, 8, 16]` keys, summed over the last axis for each of 8 heads, has 32 rows and
32 columns, a batch of 8 and a depth of 16. The result's innermost axis is a column. Factors are any values: what
computes them is the product's prologue. Its epilogue are outputs that read it, along all axes of its result.

A CTA computes a tile of the result (`kernels/contraction.cuh`). In a template

    GRID_c-CTA_8-THREAD_r   rows: of 8 * r each; tensor cores multiply them, where they may
    GRID_c-THREAD_r         rows: of r, all of which each thread has
    GRID_c-CTA_8-THREAD_v   columns: of 8 * v
    GRID_c                  batch
    WARP                    depth: shared out over the CTA's warps

A reduction over all columns, such as those of a softmax, is computed in the tile where it has all of them.

A product of `[32, 512]` and `[512, 2048]` in tiles of 16 times 32 with a bias, the sums of which four warps share:

    reduce_4[GRID_1056-CTA_8-THREAD_2,GRID_1056-CTA_8-THREAD_4,WARP];
    output_0[GRID_1056-CTA_8-THREAD_2,GRID_1056-CTA_8-THREAD_4];
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from custom_ops.errors import KernelError
from custom_ops.expr.nodes import Cast, Elementwise, Reduce
from custom_ops.expr.program import Program
from custom_ops.fusion.codegen.plan.template import Attribute

if TYPE_CHECKING:
    from custom_ops.fusion.codegen.plan.pattern import Pattern

LANES = 8  # groups of lanes that share a tile's columns, and where tensor cores multiply its rows
CHUNK = 16  # of the depth, which a warp multiplies at once
DTYPES = ("float32", "float64")
EACH = (1, 2, 4, 8)  # neighbouring columns of a lane
MOST_COLUMNS = 64  # of a tile, and so of results whose rows are reduced in it
TENSOR_ROWS = (2, 4)  # of a lane: tiles of 16 and 32


@dataclass(frozen=True)
class Contraction:
    """A product of matrices.

    Attributes:
        node: the reduction.
        left, right: its factors.
        batch, rows, columns, depth: its axes, by what they are.
        factors: a dtype of which both factors are numbers, whatever the dtype in which they are multiplied.
    """

    node: int
    left: int
    right: int
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    depth: tuple[int, ...]
    factors: str

    @property
    def form(self) -> tuple[tuple[int, ...], ...]:
        """A key that is equal for contractions whose tiles lie alike."""
        return self.batch, self.rows, self.columns

    @property
    def kept(self) -> frozenset[int]:
        """The axes of the result."""
        return frozenset((*self.batch, *self.rows, *self.columns))


@dataclass(frozen=True)
class Tile:
    """What a CTA computes at once.

    Attributes:
        rows, columns: of it.
        tensor: whether tensor cores multiply what they may.
    """

    rows: int
    columns: int
    tensor: bool

    def attributes(self, ctas: int) -> tuple[str, str]:
        """The schedule's attributes of rows and columns, in at most so many CTAs."""
        rows = f"CTA_{LANES}-THREAD_{self.rows // LANES}" if self.tensor else f"THREAD_{self.rows}"
        return f"GRID_{ctas}-{rows}", f"GRID_{ctas}-CTA_{LANES}-THREAD_{self.columns // LANES}"


def contraction_of(program: Program, place: int, in_order: Callable[[set[int]], tuple[int, ...]]) -> Contraction | None:
    """The contraction that a node is, or None; `in_order`: the axes as loops nest them."""
    node = program.nodes[place]
    if not isinstance(node, Reduce) or node.kind != "dot" or program.types[place].dtype not in DTYPES:
        return None
    product = program.nodes[node.operand]
    if not isinstance(product, Elementwise) or product.op != "multiply":
        return None
    left, right = product.arguments
    axes, others, depth = set(program.types[left].axes), set(program.types[right].axes), set(node.axes)
    if not depth <= axes & others or axes == others:
        return None
    if (axes | others) - depth and in_order((axes | others) - depth)[-1] in axes - others:
        left, right, axes, others = right, left, others, axes
    if not others - axes:  # one row after the other is one column after the other
        left, right, axes, others = right, left, others, axes
    dtypes = {_stored(program, factor) for factor in (left, right)}
    return Contraction(
        place,
        left,
        right,
        in_order((axes & others) - depth),
        in_order(axes - others),
        in_order(others - axes),
        in_order(depth),
        dtypes.pop() if len(dtypes) == 1 else program.types[place].dtype,
    )


def _stored(program: Program, place: int) -> str:
    """A dtype of which a value is a number: a half type that was cast to a wider one."""
    node = program.nodes[place]
    if isinstance(node, Cast) and program.types[node.operand].dtype in ("float16", "bfloat16"):
        return program.types[node.operand].dtype
    return program.types[place].dtype


def tile_of(rows: set[Attribute], columns: set[Attribute], batch: set[Attribute]) -> tuple[Tile, int]:
    """The tile that attributes mean, and how many CTAs there are at most; of no axes there are none.

    Raises:
        KernelError: they mean none.
    """
    most = {levels[0].size for levels in (*rows, *columns, *batch)}
    if max(map(len, (rows, columns, batch))) > 1 or len(most) != 1 or any(len(levels) > 1 for levels in batch):
        raise KernelError(
            "the axes of a tile differ: expected one attribute for rows, one for columns, GRID for others"
        )
    tensor, of_rows = _share(next(iter(rows))) if rows else (False, 1)
    lanes, of_columns = _share(next(iter(columns))) if columns else (True, 1)
    if not lanes or (tensor and of_rows not in TENSOR_ROWS) or of_columns not in EACH or not 1 <= of_rows <= 8:
        raise KernelError(f"no tile: {of_rows} rows and {of_columns} columns of a thread")
    (ctas,) = most
    return Tile(of_rows * LANES if tensor else of_rows, of_columns * LANES, tensor), ctas


def _share(levels: Attribute) -> tuple[bool, int]:
    """Whether lanes share an axis, and how many positions each of them has."""
    kinds = [level.kind for level in levels]
    if kinds == ["GRID", "CTA", "THREAD"] and levels[1].size == LANES:
        return True, levels[2].size
    if kinds == ["GRID", "THREAD"]:
        return False, levels[1].size
    raise KernelError("expected GRID_c-CTA_8-THREAD_r or GRID_c-THREAD_r of a tile's axis")


def is_tiled(attribute: Attribute) -> bool:
    """Whether an attribute is of a tile's rows or columns."""
    return len(attribute) > 1 and attribute[-1].kind == "THREAD"


def refused_product(pattern: Pattern) -> str:
    """Why a pattern's products had better be no part of one kernel, or "": some of it would have to wait until all of
    another part is computed, or a product could not be computed in tiles."""
    made = {root.node for root in pattern.roots if root.reduced and root.name in pattern.tiles}
    for root in pattern.roots:
        node, reads = pattern.program.nodes[root.node], pattern.reads(root)
        if root.reduced and isinstance(node, Reduce) and node.kind == "dot" and root.node not in pattern.products:
            return f"{root.name} is no product of two matrices"
        if root.reduced and root.node in pattern.products:
            if reads:
                return f"{root.name} waits for a reduction, or for another product"
        elif root.name in pattern.tiles and not made.issuperset(reads):
            return f"{root.name} waits for a reduction"
        elif root.name not in pattern.tiles and made.intersection(reads):
            return f"{root.name} waits for a product, and is not computed in its tiles"
    return ""

"""A fusion pattern: an expression program with what is known of its tensors' shapes before it runs, and the parts that
kernels are made of, its sub-roots."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, TypeVar

from custom_ops.errors import KernelError
from custom_ops.expr.nodes import Constant, Input, Reduce, arguments_of
from custom_ops.expr.program import Program
from custom_ops.expr.text import to_text
from custom_ops.fusion.codegen.plan.contraction import MOST_COLUMNS, Contraction, contraction_of
from custom_ops.fusion.codegen.plan.pattern_axes import Groups, collapse, grouped, open_sizes
from custom_ops.fusion.codegen.plan.segment_ids import Segments, segments_of
from custom_ops.jit.cache import digest

Shape = tuple[int | None, ...]  # None: known when the kernel runs
_NONE = frozenset[int]()

Found = TypeVar("Found")


@dataclass(frozen=True)
class Root:
    """What a schedule computes: a reduction, an output, or an elementwise value that is kept in shared memory.

    Attributes:
        name: as templates write it: `reduce_4` is node 4, `output_0` output 0, `exp_3` node 3.
        node: whose value it is.
        output: which output it is, or None.
        axes: of the positions that it looks at, in order; of an output its dimensions.
        reduced: those among them that a reduction runs over.
    """

    name: str
    node: int
    output: int | None
    axes: tuple[int, ...]
    reduced: tuple[int, ...] = ()

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """The axes of what it computes."""
        return tuple(axis for axis in self.axes if axis not in self.reduced)

    def __hash__(self) -> int:
        """The hash of its node, which few roots of a pattern share: roots are in keys of what is found of a kernel."""
        return hash(self.node)


@dataclass(frozen=True)
class Fitted:
    """A pattern for tensors of given shapes.

    Attributes:
        shapes: as the pattern's program has them.
        sizes: of all of its axes.
        positions: the most that an index runs over.
    """

    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    positions: int


@dataclass(frozen=True)
class Pattern:
    """A program over tensors of these shapes. `Pattern.of` makes one.

    Attributes:
        program: with as few axes as there can be (`collapse.py`).
        shapes: of its tensors; None: known when the kernel runs.
        groups: for each tensor how many dimensions, as they are given, each dimension here stands for.
        original: the program that was given.
        found: what other modules found of this pattern and look for again: thousands of kernels of one pattern share
            most of their parts. Several threads may write; each finds the same.

    Raises:
        KernelError: the shapes do not fit the program.
    """

    program: Program
    shapes: tuple[Shape, ...]
    groups: Groups
    original: Program
    found: dict[Hashable, Any] = field(init=False, repr=False, compare=False, default_factory=dict)
    _fitted: dict[tuple[Shape, ...], Fitted] = field(init=False, repr=False, compare=False, default_factory=dict)
    _needed: dict[tuple[int, frozenset[int]], list[int]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    _read: dict[str, list[int]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        found, expected = [len(shape) for shape in self.shapes], [tensor.rank for tensor in self.program.tensors]
        if found != expected:
            raise KernelError(f"expected shapes of ranks {expected}, found {found}")

    @staticmethod
    def of(program: Program, shapes: Sequence[Sequence[int | None]] | None = None) -> Pattern:
        """The pattern of a program over tensors of these shapes; None: of any shapes."""
        if shapes is None:
            shapes = [(None,) * tensor.rank for tensor in program.tensors]
        # Zero is no size to compile for: what is empty is so when the kernel runs.
        known = tuple(tuple(size or None for size in shape) for shape in shapes)
        if [len(shape) for shape in known] != [tensor.rank for tensor in program.tensors]:
            return Pattern(program, known, (), program)  # which raises
        collapsed, merged, groups = collapse(program, known)
        return Pattern(*open_sizes(collapsed, merged), groups, program)

    def merged(self, shapes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """The shapes of given tensors, as `program` has them."""
        return [grouped(shape, groups) for shape, groups in zip(shapes, self.groups, strict=True)]

    @cached_property
    def sizes(self) -> tuple[int | None, ...]:
        """The size of each axis; None: known when the kernel runs."""
        found: list[int | None] = [size or None for size in self.program.axes]
        for node in self.program.nodes:
            if isinstance(node, Input):
                for index, size in zip(node.index, self.shapes[node.tensor], strict=True):
                    if index.axis is not None and found[index.axis] is None:
                        found[index.axis] = size
        return tuple(found)

    @cached_property
    def dimensions(self) -> tuple[tuple[int | str, ...], ...]:
        """The size of each tensor's dimensions, as C++ has it: a number, an axis's `n0`, or the dimension's `d0_1`."""
        plain: dict[tuple[int, int], int] = {}
        for node in self.program.nodes:
            if isinstance(node, Input):
                for dimension, index in enumerate(node.index):
                    # An axis whose size the program fixes may be shorter than the dimension along which it lies.
                    if index.axis is not None and self.program.axes[index.axis] == 0:
                        plain[node.tensor, dimension] = index.axis

        def text(tensor: int, dimension: int) -> int | str:
            known = self.shapes[tensor][dimension]
            if (axis := plain.get((tensor, dimension))) is not None:
                known = self.sizes[axis]
                return known if known is not None else f"n{axis}"
            return known if known is not None else f"d{tensor}_{dimension}"

        return tuple(
            tuple(text(tensor, dimension) for dimension in range(len(shape)))
            for tensor, shape in enumerate(self.shapes)
        )

    @cached_property
    def digest(self) -> str:
        """A digest that is equal for patterns that one kernel computes."""
        return digest(to_text(self.program), repr(self.shapes))

    def size(self, axis: int) -> int | str:
        """The size of an axis, as C++ has it."""
        known = self.sizes[axis]
        return known if known is not None else f"n{axis}"

    def static(self, axes: Iterable[int]) -> int | None:
        """How many positions there are along all of these axes, if that is known."""
        sizes = [self.sizes[axis] for axis in axes]
        return None if None in sizes else prod(size for size in sizes if size is not None)

    @cached_property
    def roots(self) -> tuple[Root, ...]:
        """All reductions that an output depends on, then all outputs: each after those that it needs."""
        program, found = self.program, []
        for place, node in enumerate(program.nodes):
            if isinstance(node, Reduce) and self.reduces(place):
                axes = set(program.types[node.operand].axes) | set(node.axes)
                found.append(Root(f"reduce_{place}", place, None, tuple(sorted(axes)), tuple(sorted(node.axes))))
        for number, output in enumerate(program.outputs):
            found.append(Root(f"output_{number}", output.node, number, output.axes))
        return tuple(found)

    @cached_property
    def products(self) -> dict[int, Contraction]:
        """The contractions, by their nodes."""
        found = (contraction_of(self.program, root.node, self.in_order) for root in self.roots if root.reduced)
        return {each.node: each for each in found if each is not None}

    @cached_property
    def segments(self) -> dict[int, Segments]:
        """The sums of segments, by their nodes."""
        found = ((root.node, segments_of(self.program, root.node)) for root in self.roots if root.reduced)
        return {place: each for place, each in found if each is not None}

    @cached_property
    def spans(self) -> list[tuple[int, ...]]:
        """Axes of positions that one index runs over. No loop goes through results and numbers of a sum of segments at
        once, which together are far more than any tensor has."""
        found = []
        for root in self.roots:
            found += [root.kept, root.reduced] if root.reduced and root.node in self.segments else [root.axes]
        return [axes for axes in found if axes]

    @cached_property
    def tiles(self) -> dict[str, tuple[Contraction, int]]:
        """The roots that can be computed in tiles of a product of matrices: contractions; reductions over the columns
        of their results, where those are few (a softmax); and outputs that read such, along all axes of a result. Each
        with a contraction, and with a number that is the same for those that depend on each other."""
        of = {place: place for place in self.products}  # for what is reduced a contraction on which it depends
        group = dict(of)
        found: dict[str, int] = {}
        for root in self.roots:
            if root.reduced and root.node in self.products:
                found[root.name] = root.node
                continue
            reads = self.reads(root)
            if not reads or not of.keys() >= set(reads) or len({self.products[of[place]].form for place in reads}) > 1:
                continue
            read = {of[place] for place in reads}
            product = self.products[min(read)]
            few = (self.static(product.columns) or MOST_COLUMNS + 1) <= MOST_COLUMNS
            if root.reduced and not (few and set(root.reduced) == set(product.columns)):
                continue
            if set(root.axes) == product.kept:
                found[root.name] = product.node
                joined = {group[place] for place in read}
                group = {place: min(joined) if own in joined else own for place, own in group.items()}
                if root.reduced:
                    of[root.node] = product.node
        return {name: (self.products[place], group[place]) for name, place in found.items()}

    def cached(self, place: int) -> Root:
        """An elementwise value as a root."""
        kind = type(self.program.nodes[place]).__name__.lower()
        name = getattr(self.program.nodes[place], "op", kind)
        return Root(f"{name}_{place}", place, None, self.program.types[place].axes)

    def in_order(self, axes: Iterable[int]) -> tuple[int, ...]:
        """The axes as loops nest them: that one last along which most tensors lie contiguously."""
        return tuple(sorted(axes, key=lambda axis: (self._contiguous[axis], axis)))

    @cached_property
    def _contiguous(self) -> tuple[int, ...]:
        """1 for the axes that are the last dimension of the most tensors, else 0."""
        nodes = [node for place, node in enumerate(self.program.nodes) if self.program.live[place]]
        last = [node.index[-1].axis for node in nodes if isinstance(node, Input) and len(node.index) > 1]
        last += [output.axes[-1] for output in self.program.outputs if len(output.axes) > 1]
        votes = [last.count(axis) for axis in range(len(self.program.axes))]
        most = max(votes, default=0)
        return tuple(int(vote == most and most > 0) for vote in votes)

    def closure(self, starts: Iterable[int], known: Callable[[int], bool] = lambda place: False) -> list[int]:
        """The nodes that the values of `starts` are computed from, themselves included, in order; reductions, and what
        is `known`, are not looked into."""
        nodes, found, waiting = self.program.nodes, set[int](), list(starts)
        while waiting:
            place = waiting.pop()
            if place not in found:
                found.add(place)
                if not self.reduces(place) and not known(place):
                    waiting += arguments_of(nodes[place])
        return sorted(found)

    def reduces(self, place: int) -> bool:
        """Whether a node takes a loop; a reduction along axes along which its operand does not vary takes none."""
        node = self.program.nodes[place]
        if not isinstance(node, Reduce) or not self.program.live[place]:
            return False
        return node.kind == "product" or not set(node.axes).isdisjoint(self.program.types[node.operand].axes)

    def start(self, root: Root) -> int:
        """The value that a root is made of: a reduction's operand."""
        node = self.program.nodes[root.node]
        return node.operand if root.reduced and isinstance(node, Reduce) else root.node

    def needs(self, root: Root, known: Collection[int] = ()) -> list[int]:
        """The values that computing a root takes where those of `known` are there: all but constants."""
        there = frozenset(known) if known else _NONE
        if root.output is None and root.node in there:
            there -= {root.node}
        key = (self.start(root), there)
        if key not in self._needed:
            found = self.closure([self.start(root)], lambda place: place in there)
            self._needed[key] = [place for place in found if not isinstance(self.program.nodes[place], Constant)]
        return self._needed[key]

    def fitted(self, shapes: Sequence[Sequence[int]]) -> Fitted:
        """What follows from the shapes of given tensors; found once for equal ones.

        Raises:
            ProgramError: they do not fit the program.
        """
        key = tuple(map(tuple, shapes))
        if key not in self._fitted:
            self.original.sizes(shapes)  # raises where shapes do not fit each other
            merged = tuple(self.merged(shapes))
            sizes = self.program.sizes(merged)
            axes = [*self.spans, *(output.axes for output in self.program.outputs)]
            counts = [prod(sizes[axis] for axis in each) for each in axes]
            self._fitted[key] = Fitted(merged, sizes, max([*map(prod, shapes), *counts]))
        return self._fitted[key]

    def once(self, key: Hashable, find: Callable[[], Found]) -> Found:
        """What `find` finds, once for equal keys; a key begins with the name of what is found."""
        if key not in self.found:
            self.found[key] = find()
        found: Found = self.found[key]
        return found

    def reads(self, root: Root) -> list[int]:
        """The reductions whose results a root takes."""
        if root.name not in self._read:
            self._read[root.name] = [place for place in self.needs(root) if self.reduces(place)]
        return self._read[root.name]

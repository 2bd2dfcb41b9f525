"""The port of `emit_cuda` for fusion kernels: where values come from, and in which scope they are made.

A kernel's positions are nested scopes: the piece, a row, the elements that a thread sees at once, an element. A value
is made in the outermost scope in which all that it varies along is known, and once.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence

from custom_ops.expr.cuda import C_TYPES, emit_cuda, literal
from custom_ops.expr.nodes import Constant, Input, Position, Random, Reduce
from custom_ops.fusion.codegen.plan.addresses import (
    At,
    in_step,
    index_text,
    is_packed,
    number_of,
    offset_along,
    offset_of,
    product,
)
from custom_ops.fusion.codegen.plan.arguments import storage
from custom_ops.fusion.codegen.plan.pattern import Pattern

Names = ChainMap[int, str]  # of values that were made, scope by scope

OPERATIONS = {"sum": "Sum", "dot": "Sum", "mean": "Sum", "product": "Product", "max": "Max", "min": "Min", "any": "Any"}
OPERATIONS |= {"all": "All"}


def axis_name(axis: int) -> str:
    """The position along an axis."""
    return f"a{axis}"


class ValueWriter:
    """Writes values of a pattern.

    Args:
        pattern: whose values they are.
        arrays: for values that lie in shared memory the text of their element at a position.
    """

    def __init__(self, pattern: Pattern, arrays: Mapping[int, str]) -> None:
        self.pattern, self.program = pattern, pattern.program
        self.dtypes = [type_.dtype for type_ in pattern.program.types]
        self._arrays = arrays

    def varies(self, place: int, axes: Iterable[int]) -> bool:
        return not set(axes).isdisjoint(self.program.types[place].axes)

    def missing(self, wanted: Iterable[int], names: Names) -> list[int]:
        """What `wanted` still takes, in order."""
        found = self.pattern.closure(wanted, lambda place: place in names or place in self._arrays)
        return [place for place in found if place not in names and not isinstance(self.program.nodes[place], Constant)]

    def make(self, places: Sequence[int], names: Names, packs: Mapping[int, str] | None = None) -> list[str]:
        """Declares values, each after those that it takes, and names them in the innermost scope of `names`.

        Args:
            places: which.
            names: of values that were made before.
            packs: the text of the element of inputs that were loaded several at a time.
        """

        def read(place: int) -> str:
            if packs and place in packs and place not in names:
                return f"number({packs[place]})"
            return self.text(place, names)

        lines = []
        for place in places:
            if place in self._arrays:
                lines.append(f"const {C_TYPES[self.dtypes[place]]} value_{place} = {self._arrays[place]};")
            else:
                lines += emit_cuda(self.program.nodes, self.dtypes, (place,), read)
            names[place] = f"value_{place}"
        return lines

    def text(self, place: int, names: Names) -> str:
        """A value that was made, or a constant."""
        return names[place] if place in names else self._read(place, names)

    def stored(self, place: int, names: Names) -> str:
        """A value as its tensor stores it."""
        text, kind = self.text(place, names), storage(self.dtypes[place])
        return text if kind == C_TYPES[self.dtypes[place]] else f"stored<{kind}>({text})"

    def _read(self, place: int, names: Names) -> str:
        match node := self.program.nodes[place]:
            case Constant(dtype=dtype, value=value):
                return literal(value, dtype)
            case Position(dtype=dtype, axis=axis):
                return f"static_cast<{C_TYPES[dtype]}>({axis_name(axis)})"
            case Random(dtype=dtype):
                return f"drawn<{storage(dtype)}>({_state(node)}, {number_of(node, axis_name)})"
            case Input():
                return self._element(node, names)
            case Reduce() if not self.pattern.reduces(place):
                return self._of_equals(node, names)
        return f"saved_{place}[{offset_along(self.pattern, self.program.types[place].axes, axis_name)}]"

    def _of_equals(self, node: Reduce, names: Names) -> str:
        """A reduction of values that are all the same."""
        dtype = self.dtypes[node.operand]
        kind, value = C_TYPES[dtype], self.text(node.operand, names)
        count = f"static_cast<{kind}>({product([self.pattern.size(axis) for axis in node.axes])})"
        if node.kind in ("sum", "dot"):
            text = f"Product::join({value}, {count})"
            return text if storage(dtype) == kind else f"rounded<{storage(dtype)}>({text})"
        empty = literal(math.nan, dtype) if node.kind == "mean" else f"{OPERATIONS[node.kind]}::start<{kind}>()"
        return f"{count} != 0 ? {value} : {empty}"

    def _element(self, node: Input, names: Names) -> str:
        def value(place: int) -> str:
            return self.text(place, names)

        text = f"number(tensor_{node.tensor}[{offset_of(self.pattern, node, axis_name, value)}])"
        # An index that is a value may be anything: outside of the tensor there is zero, as for TensorFlow's gathers.
        checks = [
            f"inside({index_text(index, axis_name, value, 'long long')}, {size})"
            for index, size in zip(node.index, self.pattern.dimensions[node.tensor], strict=True)
            if index.nodes
        ]
        zero = literal(False if (dtype := self.program.tensors[node.tensor].dtype) == "bool" else 0, dtype)
        return f"{' && '.join(checks)} ? {text} : {zero}" if checks else text

    def packs(
        self,
        places: Iterable[int],
        axis: int,
        width: int,
        at: At,
        left: str,
        loaded: Mapping[int, str] | None = None,
    ) -> tuple[list[str], dict[int, str]]:
        """Loads those inputs among `places` several at a time that lie along `axis`, and what earlier phases saved; and
        draws random numbers so. Also the text of their elements. `loaded`: the text of inputs that were loaded before.
        """
        lines, found = [], {}
        for number in places:
            node = self.program.nodes[number]
            if isinstance(node, Input) and is_packed(self.pattern, node, axis, width):
                text = loaded[number] if loaded and number in loaded else self.load(node, width, at, left)
                lines.append(f"const auto pack_{number} = {text};")
                found[number] = f"pack_{number}.at[j]"
            elif isinstance(node, Random) and width > 1 and in_step(node, axis, width):
                state = f"{_state(node)}, {number_of(node, at)}"
                lines.append(f"const auto pack_{number} = drawn<{storage(node.dtype)}, {width}>({state});")
                found[number] = f"pack_{number}.at[j]"
            elif isinstance(node, Reduce) and self._is_saved_along(number, axis, width):
                element = f"saved_{number} + {offset_along(self.pattern, self.program.types[number].axes, at)}"
                lines.append(f"const auto pack_{number} = load<{width}>({element}{left});")
                found[number] = f"pack_{number}.at[j]"
        return lines, found

    def load(self, node: Input, width: int, at: At, left: str = "") -> str:
        """The load of `width` elements of an input, from the positions that `at` says."""
        return f"load<{width}>(tensor_{node.tensor} + {offset_of(self.pattern, node, at, str)}{left})"

    def _is_saved_along(self, place: int, axis: int, width: int) -> bool:
        """Whether a reduction's results lie in device memory, and those at `width` neighbours along `axis` at once."""
        axes = self.program.types[place].axes
        if width == 1 or not axes or axes[-1] != axis or place in self._arrays or not self.pattern.reduces(place):
            return False
        size = self.pattern.sizes[axis]
        return len(axes) == 1 or (size is not None and size % width == 0)

    def finished(self, place: int, text: str) -> str:
        """A reduction's result, of what was accumulated: a mean is divided, a half type rounded."""
        node = self.program.nodes[place]
        assert isinstance(node, Reduce)
        dtype = self.dtypes[place]
        if node.kind == "mean":
            text = f"{text} / static_cast<{C_TYPES[dtype]}>({product([self.pattern.size(axis) for axis in node.axes])})"
        return text if storage(dtype) == C_TYPES[dtype] else f"rounded<{storage(dtype)}>({text})"

    def operation(self, place: int) -> str:
        """The struct of kernels/fusion.cuh that joins a reduction's numbers."""
        node = self.program.nodes[place]
        assert isinstance(node, Reduce)
        return OPERATIONS[node.kind]


def positions(pattern: Pattern, axes: Sequence[int], index: str, name: Callable[[int], str] = axis_name) -> list[str]:
    """Declares the position along each axis, of one index over all of them, the last of which changes first."""
    lines, inner = [], list[int | str]()
    for number, axis in reversed(list(enumerate(axes))):
        text = (
            index
            if not inner
            else f"{index} / {product(inner)}"
            if len(inner) == 1
            else f"{index} / ({product(inner)})"
        )
        if number > 0:
            text = f"{text} % {pattern.size(axis)}"
        lines.append(f"const Index {name(axis)} = {text};")
        inner.insert(0, pattern.size(axis))
    return lines[::-1]


def _state(node: Random) -> str:
    """A generator's state, or the seed of which it is made."""
    tensors = dict.fromkeys((node.key, node.counter))
    return ", ".join(f"tensor_{tensor}" for tensor in tensors)

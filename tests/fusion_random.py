"""Random programs of integers, for which every order of a sum gives the same."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from custom_ops.expr.nodes import AxisTerm, Cast, Constant, Elementwise, Index, Input, Node, Position, Random, Reduce
from custom_ops.expr.program import Output, Program, Tensor, Type

OPS = ("add", "subtract", "multiply", "maximum", "minimum", "negate", "sign", "greater", "select")


class Draw:
    """Makes a program, node by node."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.sizes = draw(st.lists(st.sampled_from([1, 2, 3, 5, 8, 12, 33]), min_size=2, max_size=3))
        self.tensors: list[NDArray[Any]] = []
        self.nodes: list[Node] = []

    def one_of(self, *given: Any) -> Any:
        return self.draw(st.sampled_from(given))

    def some_axes(self, least: int = 0) -> tuple[int, ...]:
        axes = self.draw(st.permutations(range(len(self.sizes))))
        return tuple(axes[: self.draw(st.integers(least, len(axes)))])

    def program(self) -> Program:
        for _ in range(self.draw(st.integers(1, 3))):
            self.nodes.append(self.an_input())
        for _ in range(self.draw(st.integers(4, 14))):
            self.nodes.append(self.a_node())
        types = self.types()
        chosen = {len(self.nodes) - 1, *self.draw(st.lists(st.integers(0, len(self.nodes) - 1), max_size=3))}
        outputs = []
        for node in sorted(chosen):
            axes = {*types[node].axes, *(self.some_axes() if self.draw(st.booleans()) else ())}
            outputs.append(Output(node, tuple(self.draw(st.permutations(sorted(axes))))))
        return self.made(tuple(outputs))

    def made(self, outputs: tuple[Output, ...] = ()) -> Program:
        tensors = tuple(Tensor(str(tensor.dtype), tensor.ndim) for tensor in self.tensors)
        return Program(tuple(self.sizes), tensors, tuple(self.nodes), outputs)

    def types(self) -> tuple[Type, ...]:
        return self.made().types

    def an_input(self) -> Input:
        """As it lies, transposed, in part, reversed or gathered."""
        index, shape = [], []
        for axis in self.some_axes():
            size = self.sizes[axis]
            kind = self.one_of("plain", "plain", "plain", "slice", "reversed", "reshape")
            if kind == "reshape" and size > 1:
                index += [Index(terms=(AxisTerm(axis, 1, 2),)), Index(terms=(AxisTerm(axis, 1, 1, 2),))]
                shape += [(size + 1) // 2, 2]
            else:
                factor, offset, extent = {"slice": (2, 1, 2 * size), "reversed": (-1, size - 1, size)}.get(
                    kind, (1, 0, size)
                )
                index.append(Index(offset, (AxisTerm(axis, factor),)))
                shape.append(extent)
        indices = [place for place, type_ in enumerate(self.types()) if type_.dtype == "int32"] if self.nodes else []
        if indices and self.draw(st.booleans()):
            # Any number, brought within bounds.
            self.nodes.append(Constant("int32", 2))
            self.nodes.append(Elementwise("minimum", (self.one_of(*indices), len(self.nodes) - 1)))
            self.nodes.append(Constant("int32", 0))
            self.nodes.append(Elementwise("maximum", (len(self.nodes) - 2, len(self.nodes) - 1)))
            index.insert(0, Index(0, (), (len(self.nodes) - 1,)))
            shape.insert(0, 3)
        seed = self.draw(st.integers(0, 99))
        self.tensors.append(np.random.default_rng(seed).integers(-4, 5, shape).astype(self.one_of("int32", "int64")))
        return Input(len(self.tensors) - 1, tuple(index))

    def a_random_number(self, dtype: str) -> Random:
        """All bits of it: row by row, and sometimes shifted, stretched or of some axes alone."""
        step, terms = self.one_of(1, 1, 1, 3), []
        for axis in sorted(self.some_axes(), reverse=True):
            terms.append(AxisTerm(axis, step))
            step *= self.sizes[axis]
        state = np.random.default_rng(self.draw(st.integers(0, 99))).integers(0, 1 << 64, 3, np.uint64)
        self.tensors += [state[:1], state[1:]]
        number = Index(self.one_of(0, 0, 0, 4, 5), tuple(terms[::-1]))
        return Random(dtype, len(self.tensors) - 2, len(self.tensors) - 1, number)

    def a_node(self) -> Node:
        types = self.types()
        dtype = self.one_of("int32", "int64")
        alike = [place for place, type_ in enumerate(types) if type_.dtype == dtype][-4:]  # long chains
        kind = self.one_of("op", "op", "op", "reduce", "reduce", "input", "cast", "position", "constant", "random")
        if kind == "random":
            return self.a_random_number(dtype)
        if kind == "position":
            return Position(dtype, self.one_of(*range(len(self.sizes))))
        if kind == "constant":
            return Constant(dtype, self.draw(st.integers(-3, 3)))
        if kind == "input":
            return self.an_input()
        if kind == "cast" or not alike:
            return Cast(dtype, self.one_of(*range(len(types))))
        if kind == "reduce":
            operand = self.one_of(*range(len(types))[-4:])
            names = ("any", "all") if types[operand].dtype == "bool" else ("sum", "max", "min", "product")
            return Reduce(self.one_of(*names), operand, tuple(sorted(self.some_axes(1))))
        op = self.one_of(*OPS)
        arguments = [self.one_of(*alike) for _ in range(1 if op in ("negate", "sign") else 2)]
        if op == "select":
            self.nodes.append(Cast("bool", self.one_of(*range(len(types)))))
            arguments.insert(0, len(self.nodes) - 1)
        return Elementwise(op, tuple(arguments))


@st.composite
def programs(draw: Any) -> tuple[Program, list[NDArray[Any]]]:
    drawn = Draw(draw)
    return drawn.program(), drawn.tensors

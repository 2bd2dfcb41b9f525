"""Programs as text, in the form that `custom_ops.expr.program` describes."""

from __future__ import annotations

import re
from typing import Any

from custom_ops.errors import ProgramError
from custom_ops.expr.nodes import AxisTerm, Cast, Constant, Elementwise, Index, Input, Node, Position, Random, Reduce
from custom_ops.expr.program import Output, Program, Tensor
from custom_ops.expr.table import TABLE
from custom_ops.expr.table_entry import BOOL, INTEGERS
from custom_ops.text_lines import joined, line, read_lines

FORMAT = "program 1"
_AXIS_TERM = re.compile(r"(?:(-?\d+)\*)?a(\d+)(?:/(\d+))?(?:%(\d+))?")


def to_text(program: Program) -> str:
    """The program, ending in a line break."""
    lines = [line("axes", *program.axes)]
    lines += [line("tensor", tensor.dtype, tensor.rank) for tensor in program.tensors]
    lines += [_node_line(node) for node in program.nodes]
    lines += [line("output", output.node, *output.axes) for output in program.outputs]
    return joined(FORMAT, lines)


def from_text(text: str) -> Program:
    """Reads what `to_text` wrote.

    Raises:
        ProgramError: the text is no program of this format; the message holds the line.
    """
    axes: list[tuple[int, ...]] = []
    tensors: list[Tensor] = []
    nodes: list[Node] = []
    outputs: list[Output] = []

    def read(text: str) -> None:
        word, *rest = text.split()
        if word == "axes":
            axes.append(tuple(map(int, rest)))
        elif word == "tensor":
            dtype, rank = rest
            tensors.append(Tensor(dtype, int(rank)))
        elif word == "output":
            outputs.append(Output(int(rest[0]), tuple(map(int, rest[1:]))))
        else:
            nodes.append(_node(word, rest))

    read_lines(text, FORMAT, "a program", ProgramError, read)
    if len(axes) != 1:
        raise ProgramError(f"expected one line 'axes SIZE...', found {len(axes)}")
    return Program(axes[0], tuple(tensors), tuple(nodes), tuple(outputs))


def _node_line(node: Node) -> str:
    match node:
        case Input(tensor=tensor, index=index):
            return line("input", tensor, *map(_index_word, index))
        case Constant(dtype=dtype, value=value):
            return line("constant", dtype, repr(value))
        case Position(dtype=dtype, axis=axis):
            return line("position", dtype, axis)
        case Random(dtype=dtype, key=key, counter=counter, index=number):
            return line("random", dtype, key, counter, _index_word(number))
        case Cast(dtype=dtype, operand=operand):
            return line("cast", dtype, operand)
        case Reduce(kind=kind, operand=operand, axes=axes):
            return line("reduce", kind, operand, *axes)
        case Elementwise(op=op, arguments=arguments):
            return line(op, *arguments)


def _node(word: str, rest: list[str]) -> Node:
    if word == "input":
        return Input(int(rest[0]), tuple(map(_index, rest[1:])))
    if word == "constant":
        dtype, value = rest
        return Constant(dtype, _value(dtype, value))
    if word == "position":
        dtype, axis = rest
        return Position(dtype, int(axis))
    if word == "random":
        dtype, key, counter, number = rest
        return Random(dtype, int(key), int(counter), _index(number))
    if word == "cast":
        dtype, operand = rest
        return Cast(dtype, int(operand))
    if word == "reduce":
        return Reduce(rest[0], int(rest[1]), tuple(map(int, rest[2:])))
    return Elementwise(TABLE[word].name, tuple(map(int, rest)))


def _value(dtype: str, text: str) -> Any:
    if dtype in BOOL:
        return {"True": True, "False": False}[text]
    return int(text) if dtype in INTEGERS else float(text)


def _index_word(index: Index) -> str:
    words = [str(index.offset)] if index.offset or not (index.terms or index.nodes) else []
    words += [f"n{place}" for place in index.nodes]
    for term in index.terms:
        factor = f"{term.factor}*" if term.factor != 1 else ""
        divisor = f"/{term.divisor}" if term.divisor != 1 else ""
        modulus = f"%{term.modulus}" if term.modulus else ""
        words.append(f"{factor}a{term.axis}{divisor}{modulus}")
    return "+".join(words)


def _index(word: str) -> Index:
    offset, terms, nodes = 0, [], []
    for part in word.split("+"):
        if found := _AXIS_TERM.fullmatch(part):
            factor, axis, divisor, modulus = found.groups()
            terms.append(AxisTerm(int(axis), int(factor or 1), int(divisor or 1), int(modulus or 0)))
        elif part.startswith("n"):
            nodes.append(int(part[1:]))
        else:
            offset += int(part)
    return Index(offset, tuple(terms), tuple(nodes))

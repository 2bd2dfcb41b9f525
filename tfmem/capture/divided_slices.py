"""Keras's division of a sparse gradient by a dense tensor: what it is, as found in a graph.

Optimizers such as Adagrad and RMSprop divide the IndexedSlices of an embedding by a tensor of all rows. Keras writes a
condition (`elementwise_division` of keras/src/backend/tensorflow/sparse.py), for a row that no id names is NaN, too, if
its divisor is 0 or NaN:

    if any(bad):                        bad: rows of the divisor with a 0 or a NaN
        rows = where(occurs(ids) or bad)
        values(rows) / divisor[rows], rows
    else:
        values / divisor[ids], ids

The results' sizes depend on data. `values(rows)` are those of Keras to the letter, which are right if no id occurs
twice: the value at the sum of an id's positions; where as many rows as ids are found, all values in the order given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tensorflow.core.framework.node_def_pb2 import NodeDef

from tfmem.capture.body_terms import BodyTerm, Library, full, returned, term

CONDITIONS = frozenset({"If", "StatelessIf"})


@dataclass(frozen=True)
class Division:
    """A condition that divides slices; all are names of tensors of the graph.

    Attributes:
        name, device: of the condition. Its results are the quotients, the rows, and tensors that it hands on.
        predicate: whether a row of the divisor is bad.
        bad: which are, bool [rows].
        ids: of the slices, [ids].
        values: [ids, ...].
        divisor: [rows, ...].
        count: a tensor whose first number is `rows`, or that number.
        handed: results that are an input, by their position.
    """

    name: str
    device: str
    predicate: str
    bad: str
    ids: str
    values: str
    divisor: str
    count: str | int
    handed: Mapping[int, str]


def division(node: NodeDef, library: Library) -> Division | None:
    """The division that a condition is; None if it is none, or waits for other ops."""
    if node.op not in CONDITIONS or len(node.attr["Tout"].list.type) < 2 or any(n.startswith("^") for n in node.input):
        return None
    arguments = [BodyTerm("Argument", (), place) for place in range(len(node.input) - 1)]
    try:
        bodies = [library[node.attr[name].func.name] for name in ("then_branch", "else_branch")]
        then, other = (returned(body, arguments, library) for body in bodies)
        values, divisor, ids = _parts(other)
        bad, count = _expected(then, values, divisor, ids)
    except (KeyError, IndexError, ValueError, RecursionError):
        return None
    handed = dict(enumerate(then[2:], 2))
    if list(handed.values()) != other[2:] or any(each.op != "Argument" for each in handed.values()):
        return None
    tensors = dict(zip(arguments, node.input[1:], strict=True))
    return Division(
        name=node.name,
        device=node.device,
        predicate=node.input[0],
        bad=tensors[bad],
        ids=tensors[ids],
        values=tensors[values],
        divisor=tensors[divisor],
        count=tensors[count.inputs[0]] if count.op == "First" else _number(count),
        handed={place: tensors[each] for place, each in handed.items()},
    )


def _parts(other: list[BodyTerm]) -> tuple[BodyTerm, BodyTerm, BodyTerm]:
    """Values, divisor and ids of the branch without bad rows.

    Raises:
        ValueError: it is another computation.
    """
    quotient, ids = other[:2]
    found = [*_inputs(quotient, "RealDiv"), *_inputs(quotient.inputs[1], "Rows")]
    values, _, divisor, own = found
    _require(own == ids and all(each.op == "Argument" for each in (values, divisor, ids)))
    return values, divisor, ids


def _expected(then: list[BodyTerm], values: BodyTerm, divisor: BodyTerm, ids: BodyTerm) -> tuple[BodyTerm, BodyTerm]:
    """Which rows are bad, and how many rows there are, of the branch that Keras writes for them.

    Raises:
        ValueError: it is another computation.
    """
    quotient, rows = then[:2]
    (found,) = _inputs(_inputs(rows, "Flat")[0], "Where")
    marks = [_inputs(each, "ScatterNd") for each in _inputs(found, "LogicalOr")]
    (given,) = (mark for mark in marks if mark[0] == term("Column", ids))
    (wrong,) = (mark for mark in marks if mark[0].op == "Where")
    (bad,), sizes = wrong[0].inputs, given[2]
    count = sizes.inputs[0] if sizes.op == "Vector" else full(_number(sizes))
    _require(bad.op == "Argument" and (count.op == "Full" or _inputs(count, "First")[0].op == "Argument"))
    # The ids are as many as the marks that are scattered to them.
    number = _inputs(_inputs(given[1], "Filled")[0], "Vector")[0] if given[1].op == "Filled" else full(_size(given[1]))
    _require(number.op == "Full" or number == term("Count", ids))

    def scattered(places: BodyTerm, marked: BodyTerm) -> BodyTerm:
        return term("ScatterNd", places, marked, term("Vector", count))

    def chosen(zeros: BodyTerm) -> BodyTerm:
        either = term("LogicalOr", scattered(term("Column", ids), given[1]), scattered(term("Where", bad), wrong[1]))
        all_rows = term("Flat", term("Where", either))
        positions = term("Range", full(1), term("AddV2", full(1), number), full(1))
        padded = term("ConcatV2", zeros, values, full(0))
        picked = term("Rows", padded, term("Rows", scattered(term("Column", ids), positions), all_rows))
        as_many = term("Equal", number, term("Count", all_rows))
        return term("RealDiv", term("If", as_many, values, picked), term("Rows", divisor, all_rows))

    trues = term("Filled", term("Vector", term("Count", term("Where", bad))), full(True))
    _require(wrong[1] == trues)
    _require(given[1] in (term("Filled", term("Vector", number), full(True)), full(True, _size(given[1]))))
    _require(quotient in [chosen(zeros) for zeros in _zero_rows(quotient, values)])
    return bad, count


def _zero_rows(quotient: BodyTerm, values: BodyTerm) -> list[BodyTerm]:
    """How a row of zeros may be written: of the shape of the values, or a constant."""
    found, waiting = [term("ZerosLike", term("FirstRow", values))], [quotient]
    while waiting:
        each = waiting.pop()
        waiting += each.inputs
        known = each.number
        if known and (known.kind, known.shape[:1], known.number) == ("f", (1,), 0) and each not in found:
            found.append(each)
    return found


def _inputs(found: BodyTerm, op: str) -> tuple[BodyTerm, ...]:
    _require(found.op == op)
    return found.inputs


def _number(found: BodyTerm) -> int:
    """The integer that a constant is."""
    known = found.number
    if known is None or known.kind != "i":
        raise ValueError("another computation")
    return int(known.number)


def _size(found: BodyTerm) -> int:
    """How many numbers a constant of one dimension has; -1 if it is none."""
    return found.number.shape[0] if found.number and len(found.number.shape) == 1 else -1


def _require(held: bool) -> None:
    if not held:
        raise ValueError("another computation")

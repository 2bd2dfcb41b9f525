"""Stateless random ops: each number is a function of the state and of its place (custom_ops/expr/philox.py).

Stateful ones keep their position in their kernels, and stay outside of regions.
"""

from __future__ import annotations

from math import prod

from custom_ops.expr.nodes import Index
from custom_ops.expr.program import STATE
from custom_ops.expr.table_entry import FLOATS, INTEGERS
from graph_passes.graph.ir import Graph, Node, TensorId
from graph_passes.graph.ops import OpPattern, passed
from graph_passes.lower.access import FIRST, Access, added, scaled
from graph_passes.lower.known_numbers import integers
from graph_passes.lower.program_writer import LoweringError, ProgramWriter, Steps
from graph_passes.lower.rule import Rule
from graph_passes.refusals import Reason, Refusal

_DTYPES = {"StatelessRandomUniformV2": FLOATS, "StatelessRandomUniformFullIntV2": INTEGERS}
_KEY, _COUNTER, _ALGORITHM = 1, 2, 3
_SEED = 1
# TensorFlow's numbers of algorithms (rng_alg.h): kernels of CPUs and GPUs choose Philox, and have no other.
_PHILOX = ([1], [3])
_CHOOSES = frozenset({"StatelessRandomGetAlg", "StatelessRandomGetKeyCounterAlg"})


def _draw(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    tensor = TensorId(node.name)
    number = _place(w, tensor, at)
    return w.random(w.shapes.dtype(tensor), node.inputs[_KEY], node.inputs[_COUNTER], number)
    yield  # a generator, as rules are, that needs nothing


def _place(w: ProgramWriter, tensor: TensorId, at: Access) -> Index:
    """The number of an element among all of its tensor's."""
    shape, number = w.shapes[tensor], FIRST
    for place, index in enumerate(at):
        part = scaled(index, prod(shape[place + 1 :]))
        if part is None or index.nodes:
            raise LoweringError(Reason.GATHER_AGAIN(tensor=tensor))
        number = added(number, part, w.sizes)
    return number


def _refusal(graph: Graph, node: Node) -> Refusal | None:
    tensor = TensorId(node.name)
    spec = graph.specs[tensor]
    if spec.dtype not in _DTYPES[node.op]:
        return Reason.OP_DTYPE(op=node.op, dtype=spec.dtype)
    if None in (spec.shape or ())[1:]:
        return Reason.RANDOM_PLACE(tensor=tensor)
    for place, shape in ((_KEY, (1,)), (_COUNTER, (2,))):
        state = graph.specs.get(node.inputs[place])
        if state is None or (state.dtype, state.shape) != (STATE, shape):
            return Reason.RANDOM_STATE(tensor=node.inputs[place], dtype=STATE, shape=list(shape))
    algorithm = passed(graph, node.inputs[_ALGORITHM])
    known = integers(graph, algorithm) in _PHILOX or graph[algorithm.node].op in _CHOOSES
    return None if known else Reason.RANDOM_ALGORITHM()


def _draw_seeded(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    tensor = TensorId(node.name)
    seed = node.inputs[_SEED]
    return w.random(w.shapes.dtype(tensor), seed, seed, _place(w, tensor, at))
    yield  # a generator, as rules are, that needs nothing


def _seeded_refusal(graph: Graph, node: Node) -> Refusal | None:
    tensor, seed = TensorId(node.name), graph.specs.get(node.inputs[_SEED])
    spec = graph.specs[tensor]
    if spec.dtype not in FLOATS:
        return Reason.OP_DTYPE(op=node.op, dtype=spec.dtype)
    if None in (spec.shape or ())[1:]:
        return Reason.RANDOM_PLACE(tensor=tensor)
    if seed is None or (seed.dtype, seed.shape) != ("int64", (2,)):
        return Reason.RANDOM_STATE(tensor=node.inputs[_SEED], dtype="int64", shape=[2])
    return None


RULES = {name: Rule(_draw, OpPattern.ELEMENTWISE, (_KEY, _ALGORITHM), _refusal, states=True) for name in _DTYPES} | {
    "StatelessRandomUniform": Rule(
        _draw_seeded, OpPattern.ELEMENTWISE, (_SEED, _SEED + 1), _seeded_refusal, states=True
    )
}

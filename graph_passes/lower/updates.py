"""Reads and updates of variables, with the arithmetic of TensorFlow's kernels (training_ops.cc).

A rule's output is the input that is the handle of a variable; its element is what the variable holds afterwards.
"""

from __future__ import annotations

from collections.abc import Generator

from graph_passes.graph.ir import Graph, Node, boolean
from graph_passes.graph.ops import OpPattern
from graph_passes.lower.access import Access
from graph_passes.lower.program_writer import Demand, ProgramWriter, Steps, VariableValue
from graph_passes.lower.rule import Rule, Write
from graph_passes.lower.shapes import variable_spec
from graph_passes.refusals import Reason, Refusal


def _read(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    return (yield VariableValue(node.name, 0), at)


def _assign(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    value = yield node.inputs[1], at
    if node.op == "AssignVariableOp":
        return value
    held = yield VariableValue(node.name, 0), at
    return w.apply("add" if node.op == "AssignAddVariableOp" else "subtract", held, value)


def _gradient_descent(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    var = yield VariableValue(node.name, 0), at
    rate = yield node.inputs[1], ()
    gradient = yield node.inputs[2], at
    return w.apply("subtract", var, w.apply("multiply", gradient, rate))


def _momentum(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    rate, gradient, momentum = yield from _rest(node, at, 2, scalars=(2, 4))
    if output == 1:
        slot = yield VariableValue(node.name, 1), at
        kept = w.apply("multiply", slot, momentum)
        if node.op == "ResourceApplyMomentum":
            return w.apply("add", kept, gradient)
        return w.apply("subtract", kept, w.apply("multiply", gradient, rate))
    var = yield VariableValue(node.name, 0), at
    slot = yield VariableValue(node.name, 1, updated=True), at
    nesterov = boolean(node.attrs.get("use_nesterov"))
    ahead, step = w.apply("multiply", slot, momentum), w.apply("multiply", gradient, rate)
    if node.op == "ResourceApplyMomentum":
        step = w.apply("add", step, w.apply("multiply", ahead, rate)) if nesterov else w.apply("multiply", slot, rate)
        return w.apply("subtract", var, step)
    return w.apply("add", var, w.apply("subtract", ahead, step) if nesterov else slot)


def _adam(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    power1, power2, rate, beta1, beta2, epsilon, gradient = yield from _rest(node, at, 3, scalars=range(3, 9))
    one = w.like(gradient, 1)
    if output == 1:
        first = yield VariableValue(node.name, 1), at
        moved = w.apply("multiply", w.apply("subtract", gradient, first), w.apply("subtract", one, beta1))
        return w.apply("add", first, moved)
    if output == 2:
        second = yield VariableValue(node.name, 2), at
        change = w.apply("subtract", w.apply("square", gradient), second)
        return w.apply("add", second, w.apply("multiply", change, w.apply("subtract", one, beta2)))
    var = yield VariableValue(node.name, 0), at
    first = yield VariableValue(node.name, 1, updated=True), at
    second = yield VariableValue(node.name, 2, updated=True), at
    corrected = w.apply("multiply", rate, w.apply("sqrt", w.apply("subtract", one, power2)))
    alpha = w.apply("divide", corrected, w.apply("subtract", one, power1))
    if boolean(node.attrs.get("use_nesterov")):
        part = w.apply("multiply", gradient, w.apply("subtract", one, beta1))
        first = w.apply("add", part, w.apply("multiply", beta1, first))
    scale = w.apply("add", w.apply("sqrt", second), epsilon)
    return w.apply("subtract", var, w.apply("divide", w.apply("multiply", first, alpha), scale))


def _rms_prop(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    rate, rho, momentum, epsilon, gradient = yield from _rest(node, at, 3, scalars=range(3, 7))
    if output == 1:
        squares = yield VariableValue(node.name, 1), at
        change = w.apply("subtract", w.apply("square", gradient), squares)
        return w.apply("add", squares, w.apply("multiply", change, w.apply("subtract", w.like(rho, 1), rho)))
    if output == 2:
        moment = yield VariableValue(node.name, 2), at
        squares = yield VariableValue(node.name, 1, updated=True), at
        step = w.apply("divide", w.apply("multiply", gradient, rate), w.apply("sqrt", w.apply("add", squares, epsilon)))
        return w.apply("add", w.apply("multiply", moment, momentum), step)
    var = yield VariableValue(node.name, 0), at
    moment = yield VariableValue(node.name, 2, updated=True), at
    return w.apply("subtract", var, moment)


def _adagrad(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    second = node.op == "ResourceApplyAdagradV2"
    rate = yield node.inputs[2], ()
    gradient = yield node.inputs[4 if second else 3], at
    if output == 1:
        squares = yield VariableValue(node.name, 1), at
        return w.apply("add", squares, w.apply("square", gradient)) if _updates_slots(node) else squares
    var = yield VariableValue(node.name, 0), at
    squares = yield VariableValue(node.name, 1, updated=True), at
    step = w.apply("multiply", gradient, rate)
    if second:
        epsilon = yield node.inputs[3], ()
        step = w.apply("divide", step, w.apply("add", w.apply("sqrt", squares), epsilon))
    else:
        step = w.apply("multiply", step, w.apply("reciprocal_sqrt", squares))
    return w.apply("subtract", var, step)


def _updates_slots(node: Node) -> bool:
    return "update_slots" not in node.attrs or boolean(node.attrs["update_slots"])


def _rest(node: Node, at: Access, first: int, scalars: range | tuple[int, ...]) -> Generator[Demand, int, list[int]]:
    """One element of each input from `first` on."""
    found = []
    for place in range(first, len(node.inputs)):
        element = yield node.inputs[place], () if place in scalars else at
        found.append(element)
    return found


def _refusal(graph: Graph, node: Node) -> Refusal | None:
    """All that are not scalars have to have the variable's shape and dtype, which a rule takes for granted."""
    spec = variable_spec(graph, node.name, 0)
    if spec is None or spec.shape is None:
        return Reason.VARIABLE_SHAPE()
    for tensor in node.inputs:
        given = graph.specs[tensor]
        given = given.behind or given
        if given.dtype != spec.dtype or given.shape not in (spec.shape, ()):
            return Reason.VARIABLE_TYPE(tensor=tensor, dtype=given.dtype, shape=given.shape)
    return None


def _update(write: Write, variables: int, reads: bool = True) -> Rule:
    places = tuple(range(variables))
    return Rule(write, OpPattern.UPDATE, (variables, None), _refusal, places if reads else (), places)


RULES = {
    "ReadVariableOp": Rule(_read, OpPattern.READ, (0, 0), reads=(0,)),
    "AssignVariableOp": _update(_assign, 1, reads=False),
    "AssignAddVariableOp": _update(_assign, 1),
    "AssignSubVariableOp": _update(_assign, 1),
    "ResourceApplyGradientDescent": _update(_gradient_descent, 1),
    "ResourceApplyMomentum": _update(_momentum, 2),
    "ResourceApplyKerasMomentum": _update(_momentum, 2),
    "ResourceApplyAdam": _update(_adam, 3),
    "ResourceApplyRMSProp": _update(_rms_prop, 3),
    "ResourceApplyAdagrad": _update(_adagrad, 2),
    "ResourceApplyAdagradV2": _update(_adagrad, 2),
}

"""A loop and the loop that TensorFlow made its gradient: which variable of the one belongs to which of the other.

The gradient of a `While` is another one (TensorFlow's while_v2.py). The forward loop pushes what is needed later onto
lists, one more variable for each; the gradient loop starts from

    0, maximum, number of steps, gradients of the forward loop's results ..., lists and whatever else it reads ...

and pops from the lists. Only results that can have a gradient have one, in the order of the forward loop's variables;
but variables that the loop does not change (weights, the input list) may have none, if the program asks for none. Which
are there is found from what the gradients start from, types and shapes; if two answers are possible, there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graph_passes.graph.ir import Function, Graph, Node, TensorId, TensorSpec
from graph_passes.graph.ops import FLOATS, LOOPS, passed
from graph_passes.passes.recurrent.find.loops import COMPLEX, Loop, Unreadable
from graph_passes.passes.recurrent.find.provenance import is_zero
from graph_passes.refusals import Reason

_FLOATS_BY_ENUM = {1: "float32", 2: "float64", 14: "bfloat16", 19: "float16"}  # in DataType
_LISTS = frozenset({"TensorListFromTensor", "TensorListReserve", "EmptyTensorList"})


@dataclass(frozen=True, eq=False)
class Pair:
    """A loop with its gradient.

    Attributes:
        forward, backward: the nodes.
        variables: for each gradient, its position in the backward loop: the forward variable that it is of.
        lists: the forward variables that only serve the gradient: lists that are pushed to.
    """

    forward: str
    backward: str
    variables: dict[int, int]
    lists: frozenset[int]


def gradient_loops(graph: Graph) -> Iterator[tuple[str, str]]:
    """Loops that run as often as another one did and pop what it pushed: (forward, backward)."""
    for node in graph:
        body = graph.functions.get((node.name, "body"))
        if node.op not in LOOPS or body is None or len(node.inputs) < 4:
            continue
        forward = graph[passed(graph, node.inputs[2]).node]
        steps = graph.functions.get((forward.name, "body"))
        if forward.op not in LOOPS or steps is None or passed(graph, node.inputs[2]).index != 0:
            continue
        pushed = _pushed(steps)
        read = {passed(graph, tensor) for tensor in node.inputs}
        if any(TensorId(forward.name, place) in read for place in pushed):
            yield forward.name, node.name


def read_pair(graph: Graph, forward: str, backward: str) -> Pair:
    """Which variable belongs to which.

    Raises:
        Unreadable: the answer is not clear.
    """
    steps = graph.functions[forward, "body"]
    lists = _pushed(steps)
    ahead = _Ahead(graph, graph[forward], steps, lists)
    back = graph[backward]
    places = range(3, _first_capture(graph, forward, back, graph.functions[backward, "body"]))
    found = list(_assignments(ahead, back, list(places), ahead.trainable()))
    if len(found) != 1:
        for place, tensor in enumerate(graph[forward].inputs):
            spec = graph.specs.get(tensor)
            if spec is not None and spec.dtype in COMPLEX:
                maker = passed(steps.graph, steps.results[place]).node
                raise Unreadable(Reason.STATE_COMPLEX(node=maker, dtype=spec.dtype))
        count = "several ways" if found else "no way"
        raise Unreadable(Reason.GRADIENT_UNCLEAR(node=backward, count=count))
    return Pair(forward, backward, found[0], lists)


def without_lists(graph: Graph, pair: Pair) -> Loop:
    """The forward loop without the lists that it keeps for its gradient."""
    node = graph[pair.forward]
    kept = [place for place in range(len(node.inputs)) if place not in pair.lists]

    def cut(function: Function) -> Function:
        arguments = tuple(function.arguments[place] for place in kept)
        results = function.results
        results = tuple(results[place] for place in kept) if len(results) > 1 else results
        return Function(function.graph, arguments, results, function.attrs)

    return Loop(
        name=node.name,
        carrier=node.op,
        body=cut(graph.functions[node.name, "body"]),
        condition=cut(graph.functions[node.name, "cond"]),
        initial=tuple(node.inputs[place] for place in kept),
        finals=tuple(TensorId(node.name, place) for place in kept),
        nodes=(node.name,),
        device=node.device,
        control=tuple(node.control),
    )


def invariants(graph: Graph, forward: str) -> Iterator[tuple[TensorId, TensorId]]:
    """The outputs of a loop that are its inputs: (output, input)."""
    body = graph.functions[forward, "body"]
    for place, result in enumerate(body.results):
        if passed(body.graph, result) == TensorId(body.arguments[place]):
            yield TensorId(forward, place), graph[forward].inputs[place]


def _pushed(steps: Function) -> frozenset[int]:
    found = set()
    for place, result in enumerate(steps.results):
        node = steps.graph[passed(steps.graph, result).node]
        if node.op == "TensorListPushBack" and passed(steps.graph, node.inputs[0]).node == steps.arguments[place]:
            found.add(place)
    return frozenset(found)


def has_own_gradient(node: Node) -> bool:
    """Whether the gradient that TensorFlow takes of `node` may be another than the derivative."""
    return node.op in ("StopGradient", "PreventGradient") or "_gradient_op_type" in node.attrs


def _first_capture(graph: Graph, forward: str, back: Node, body: Function) -> int:
    """Where what the gradient loop reads begins: behind the last variable that is a gradient."""
    for place in range(3, len(back.inputs)):
        source = passed(graph, back.inputs[place])
        result = passed(body.graph, body.results[place])
        popped = body.graph[result.node]
        stays = result == TensorId(body.arguments[place])
        spec = graph.specs.get(source)
        resource = spec is not None and spec.dtype == "resource"
        if stays and (source.node == forward or resource):
            return place
        if popped.op == "TensorListPopBack" and passed(body.graph, popped.inputs[0]).node == body.arguments[place]:
            return place
    return len(back.inputs)


@dataclass(frozen=True, eq=False)
class _Ahead:
    graph: Graph
    node: Node
    body: Function
    lists: frozenset[int]

    def trainable(self) -> list[tuple[int, bool]]:
        """The variables that can have a gradient, and whether each must have one."""
        found = []
        for place, result in enumerate(self.body.results):
            if place not in self.lists and self.kind(place) is not None:
                stays = passed(self.body.graph, result) == TensorId(self.body.arguments[place])
                found.append((place, not stays))
        return found

    def kind(self, place: int) -> TensorSpec | None:
        """What the gradient of a variable is like; None if it cannot have one. Lists have the shape None."""
        tensor = self.node.inputs[place]
        spec = self.graph.specs.get(tensor)
        if spec is None:
            return None
        if spec.dtype == "variant":
            made = self.graph[passed(self.graph, tensor).node]
            while made.op == "TensorListSetItem":  # an item that was written before the loop
                made = self.graph[passed(self.graph, made.inputs[0]).node]
            dtype = element_dtype(made)
            return TensorSpec("variant", 0, None) if dtype is not None else None
        if spec.dtype == "resource":
            behind = spec.behind
            return behind if behind is not None and behind.dtype in FLOATS else None
        if spec.dtype not in FLOATS:
            return None
        out = self.graph.specs.get(TensorId(self.node.name, place), spec)
        return TensorSpec(spec.dtype, spec.itemsize, out.shape)


def element_dtype(node: Node) -> str | None:
    """The dtype of the items of the list that `node` makes, if it is a floating-point one."""
    attribute = node.attrs.get("element_dtype") if node.op in _LISTS else None
    return _FLOATS_BY_ENUM.get(getattr(attribute, "type", 0))


def _assignments(
    ahead: _Ahead, back: Node, places: list[int], trainable: list[tuple[int, bool]]
) -> Iterator[dict[int, int]]:
    """Every way to give the gradients at `places` to variables, in order; those that must have one get one."""
    if not trainable:
        if not places:
            yield {}
        return
    (variable, must), *rest = trainable
    if places and _fits(ahead, back, places[0], variable):
        for others in _assignments(ahead, back, places[1:], rest):
            yield {places[0]: variable, **others}
    if not must and len(rest) >= len(places):
        yield from _assignments(ahead, back, places, rest)


def _fits(ahead: _Ahead, back: Node, place: int, variable: int) -> bool:
    """Whether the gradient at `place` can be of `variable`."""
    graph = ahead.graph
    like = ahead.kind(variable)
    start = passed(graph, back.inputs[place])
    spec = graph.specs.get(start)
    said = _said_to_be(graph, start)
    if said is not None and said.node == ahead.node.name:
        return said.index == variable
    if like is None or spec is None or spec.dtype != like.dtype:
        return False
    return like.dtype == "variant" or compatible(spec.shape, like.shape)


def _said_to_be(graph: Graph, start: TensorId) -> TensorId | None:
    """What zeros were made for: `ZerosLike(x)`, or `Fill(VariableShape(x), 0)`."""
    node = graph[start.node]
    if node.op == "ZerosLike":
        return passed(graph, node.inputs[0])
    if node.op == "Fill" and is_zero(graph, start):
        shape = graph[passed(graph, node.inputs[0]).node]
        if shape.op in ("VariableShape", "Shape"):
            return passed(graph, shape.inputs[0])
    return None


def compatible(a: tuple[int | None, ...] | None, b: tuple[int | None, ...] | None) -> bool:
    """Whether two static shapes can be of one tensor."""
    if a is None or b is None:
        return True
    return len(a) == len(b) and all(x == y or None in (x, y) for x, y in zip(a, b, strict=True))

"""How many steps a loop has, and whether it walks its sequences from their end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graph_passes.graph.ir import DataType, Graph, TensorId
from graph_passes.graph.ops import passed
from graph_passes.graph.rewrite import NewNode
from graph_passes.graph.writer import SHAPE_DTYPE
from graph_passes.passes.recurrent.find.counting import FORWARDS, Linear, Numbers, StepNumber, of_key, steps_until
from graph_passes.passes.recurrent.find.loops import Loop, Unreadable, Variables
from graph_passes.passes.recurrent.find.step_items import item_of, list_source, read_item
from graph_passes.passes.recurrent.lower.hoist import FIXED, Hoister
from graph_passes.passes.recurrent.lower.prologue import Hoisted, Prologue
from graph_passes.passes.recurrent.lower.time_reversal import is_reversed
from graph_passes.passes.recurrent.match import RecurrentNode
from graph_passes.refusals import Reason


@dataclass(frozen=True)
class Counted:
    """How many steps a loop runs that ends when its states say so.

    Attributes:
        nodes: what computes that.
        steps: the number, a scalar of SHAPE_DTYPE.
        drawn: see `Prologue`, for all steps up to the bound.
    """

    nodes: tuple[NewNode | RecurrentNode, ...]
    steps: TensorId
    drawn: Mapping[TensorId, Hoisted]


def count_steps(
    graph: Graph, loop: Loop, variables: Variables, prologue: Prologue, counted: Counted | None = None
) -> None:
    """Tell the prologue how many steps there are: so many as were counted, or the least of the bounds."""
    if counted is not None:
        prologue.drawn = dict(counted.drawn)  # the steps that were counted have drawn these numbers
        prologue.end_after(counted.steps)
        return
    condition = variables.numbers(graph, loop, loop.condition)
    outside = Hoister(graph, loop, variables, prologue, function=loop.condition)
    numbers: list[int] = []
    counts: dict[Linear, TensorId] = {}
    for bound in variables.bounds:
        place = condition.place(bound.limit)
        if place is not None and not place.step:
            limit = place.start
        elif outside.level(bound.limit) == FIXED:
            limit = of_key(outside.hoisted(bound.limit).tensor)
        else:
            raise Unreadable(Reason.LOOP_BOUND.of(loop.condition.graph[bound.limit.node]))
        steps = steps_until(variables.counters[bound.counter], bound.op, limit)
        if steps is None:
            raise Unreadable(Reason.LOOP_CONDITION.of(bound.node))
        if isinstance(steps.key, int):
            numbers.append(max(steps.key, 0))
            continue
        if steps == limit:
            value = outside.hoisted(bound.limit)
            count = prologue.cast(value.tensor, value.dtype, SHAPE_DTYPE)
        else:
            count = prologue.scalar(prologue.sum_of(graph, steps))
        if not steps.is_size:
            count = prologue.once("Maximum", [count, prologue.scalar(0)], {"T": DataType(SHAPE_DTYPE)})
        counts[steps] = count
    if not counts:
        prologue.time = prologue.time_key = min(numbers)
        prologue.time_form = Linear(number=min(numbers))
        return
    parts = list(counts.values())
    if numbers:
        parts.append(prologue.constant(SHAPE_DTYPE, (), [min(numbers)]))
    least = parts[0]
    for part in parts[1:]:
        least = prologue.once("Minimum", [least, part], {"T": DataType(SHAPE_DTYPE)})
    prologue.time = least
    form = next(iter(counts)) if len(parts) == 1 else of_key(least)
    prologue.time_form, key = form, form.key
    prologue.time_key = least if key is None else key


def is_read_backwards(graph: Graph, loop: Loop, numbers: Numbers, steps: Linear) -> bool:
    """Whether every sequence was reversed in time before the loop, or is read from the end."""
    body, found, last = loop.body.graph, list[bool](), StepNumber(steps.plus(-1), -1)
    places = {name: place for place, name in enumerate(loop.body.arguments)}
    for node in body:
        read = read_item(node)
        variable = None if read is None else places.get(passed(body, read.handle).node)
        if read is not None and variable is not None:
            source, place = list_source(graph, loop.initial[variable]), numbers.place(read.index)
            if source is not None:
                turned = is_reversed(graph, source)
                found.append(turned if place == FORWARDS else not turned and place == last)
            continue
        item = item_of(body, node, numbers.place)
        if item is not None:
            found.append(item[2] == last)
    return bool(found) and all(found)

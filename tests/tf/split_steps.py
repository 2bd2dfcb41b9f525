"""Steps in which parts run on pieces of the batch, beside the unmodified ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tfmem
from graph_passes.analysis.batch.separable import Separable, again, convex, levels, separable
from graph_passes.graph import serde
from graph_passes.graph.ir import TensorId
from graph_passes.passes.split.apply import split_graph
from graph_passes.passes.split.plan import Part
from graph_passes.passes.split.split_regions import SplitPlan, plan_of
from tfmem.api import make_engine
from tfmem.steps.trace import Trace


def read(step: Any, arguments: Sequence[Any]) -> Trace:
    """The trace of a `tf.function`, read."""
    trace = Trace(step.get_concrete_function(*arguments), make_engine(tfmem.Options(cache_directory="")))
    trace.read()
    return trace


def separated(trace: Trace, batch: int) -> Separable:
    """Which ops of the trace can work on a piece."""
    step = trace.step
    return separable(step.graph, step.order, batch, {tensor.node for tensor in step.fetches})


def whole(found: Separable) -> tuple[Part, ...]:
    """The largest part of a step that can run as one region."""
    return ((convex(found, found.rules), frozenset()),)


def every(found: Separable) -> tuple[Part, ...]:
    """All separable ops, as one region between each two borders."""
    return tuple((members, frozenset[str]()) for members in levels(found))


def remade(found: Separable) -> tuple[Part, ...]:
    """As `every`, and each piece runs again what makes the rows that it reads."""
    return tuple((members, again(found, members)) for members in levels(found))


def remade_but_products(found: Separable) -> tuple[Part, ...]:
    """As `remade`, but the results of convolutions and matrix products are kept."""
    return tuple((members, again(found, members, products=False)) for members in levels(found))


def divided(trace: Trace, batch: int, count: int, parts: Callable[[Separable], tuple[Part, ...]] = whole) -> Any:
    """(the function that runs the parts in `count` pieces, its plan); (None, a plan) if there are no parts."""
    found = separated(trace, batch)
    plan: SplitPlan = plan_of(found, [part for part in parts(found) if part[0]], count, trace.step.fetches)
    if not plan.regions:
        return None, plan
    graph, _ = split_graph(plan, trace.step.graph)
    return trace.graphs.restore(serde.to_graph_def(graph, trace.optimized().graph_def)), plan


def ran(function: Any, arguments: Sequence[Any], variables: Sequence[tf.Variable]) -> list[Any]:
    """What a step returns and what it leaves in variables, which are then as before."""
    before = [variable.numpy() for variable in variables]
    outputs = [np.asarray(each) for each in tf.nest.flatten(function(*arguments))]
    after = [variable.numpy() for variable in variables]
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value)
    return [*outputs, *after]


def close(found: Sequence[Any], expected: Sequence[Any], tolerance: float = 1e-5) -> None:
    """Fail unless all are equal to rounding."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def rows_of(plan: SplitPlan) -> list[TensorId]:
    """The tensors that leave the regions."""
    return [tensor for region in plan.regions for tensor in region.exits]

"""Prints what each stage of tfmem returns, for one training step and one LSTM; docs/tour.md explains the output.

    python -m examples.tour

Op times and bandwidths are fixed numbers here, so that every run prints the same; `tfmem.optimize` measures them."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import keras
import tensorflow as tf

import tfmem
from graph_passes import pipeline
from graph_passes.analysis.cost.model import MeasuredCosts
from graph_passes.analysis.memory.simulate import Link, usage_under
from graph_passes.graph import serde
from graph_passes.graph.ir import Graph, parse_input
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.recurrent.plan import plan_inference
from tfmem.capture.build import shaped_graph
from tfmem.capture.concrete_function import capture_concrete
from tfmem.capture.grappler import run_grappler
from tfmem.capture.inline import inline_captured

MIB = 1 << 20
BUDGET = 16 * MIB
LINK = Link(offload=2 * MIB, prefetch=2 * MIB)  # bytes a second: an activation takes two seconds either way


def main() -> int:
    """Print both walks."""
    training()
    recurrent()
    return 0


def training() -> None:
    """Four dense layers, whose four activations of 4 MiB wait for the backward pass."""
    step, images = training_step()
    source = capture_concrete(step.get_concrete_function(images))
    captured = run_grappler(source, device="CPU")
    graph = serde.from_graph_def(captured.graph_def, inferred=shaped_graph(captured))
    print(f"nodes: {len(source.graph_def.node)} captured, {len(graph.nodes)} after Grappler\n")

    fetches = [parse_input(name)[0] for name in captured.fetches]
    read = pipeline.Step.read(graph, captured.creation_order, fetches, merging=True)
    timeline = read.timeline(one_second_each(graph))
    plan = pipeline.plan_step(read, timeline, LINK, BUDGET, OffloadOptions(policy="autovm"), timed=True)
    after = usage_under(timeline, plan.moves)
    print("position  op      MiB in use  with the plan")
    for position, each in enumerate(timeline.steps):
        if timeline.made[position] >= MIB:
            now, then = timeline.usage[position] / MIB, after[position] / MIB
            print(f"{position:8}  {graph[each.node].op:6}  {now:10.1f}  {then:13.1f}")
    print(f"\nturning point: {timeline.turn}; peak: {plan.before.peak:,} bytes, with the plan {plan.after.peak:,}\n")
    for move in plan.moves:
        buffer = timeline.buffers[move.buffer]
        print(f"{buffer.tensor}: made at {buffer.start}, read at {', '.join(map(str, buffer.uses))}\n  {move}")
    print()
    for node in pipeline.edit_step(read, timeline, plan, OffloadOptions()):
        if node.op.startswith("MemOp"):
            print(f"{node.op:13} reads {', '.join(map(str, node.inputs))}\n{'':13} after {', '.join(node.control)}")

    losses = [float(step(images)) for _ in range(8)]
    step, images = training_step()  # the same weights again
    step = tfmem.optimize(step, memory_budget="36MiB", policy="autovm", cache_directory="", progress=False)
    same = losses == [float(step(images)) for _ in range(8)]
    print(f"\ndecision: {tfmem.report(step).decision}; losses equal to the bit: {same}")


def training_step() -> tuple[Any, tf.Tensor]:
    """A `tf.function` that trains on its argument, and an argument for it."""
    weights = [tf.Variable(tf.random.stateless_normal([512, 512], [0, n], stddev=0.06)) for n in range(4)]

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            y = x
            for weight in weights:
                y = tf.nn.relu(y @ weight)
            loss = tf.reduce_mean(tf.square(y))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    return step, tf.random.stateless_normal([2048, 512], [1, 1])


def one_second_each(graph: Graph) -> MeasuredCosts:
    """Costs as if each op had been seen to take one second and no workspace, with nothing else in memory."""
    return MeasuredCosts({node.name: 1.0 for node in graph}, {node.name: 0 for node in graph}, 0, None)  # type: ignore[arg-type]


def recurrent() -> None:
    """An LSTM of 8 units: the loop that Keras made, and the cell that is read from it."""
    layer = keras.layers.LSTM(8, name="lstm")
    sentences = tf.random.stateless_normal([2, 5, 3], [0, 0])
    run = tf.function(layer)
    source = inline_captured(capture_concrete(run.get_concrete_function(sentences)), {})
    graph = serde.from_graph_def(source.graph_def, inferred=shaped_graph(source), functions=True)
    keep = [parse_input(name)[0].node for name in source.fetches]
    loop = next(node for node in graph if node.op == "While")
    body = Counter(node.op for node in graph.functions[loop.name, "body"].graph)
    print(f"\nops of the body of '{loop.name}': " + ", ".join(f"{count} {op}" for op, count in sorted(body.items())))

    (match,) = plan_inference(graph, keep).matches
    print(f"\ninserted: {', '.join(getattr(node, 'op', type(node).__name__) for node in match.nodes)}")
    for old, new in match.rewired:
        print(f"rewired: {old} -> {new}")
    print(f"removed: {len(match.removed)} nodes\n\n{match.launches[0].cell.to_text()}")

    optimized = tfmem.optimize(run, passes=("recurrent",), cache_directory="")
    difference = tf.reduce_max(tf.abs(optimized(sentences) - run(sentences)))
    print(f"difference below 1e-6: {bool(difference < 1e-6)}")


if __name__ == "__main__":
    sys.exit(main())

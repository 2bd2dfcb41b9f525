"""What part of a step on a CPU its products are: the step under each system, beside its products alone.

    python -m benchmarks.fusion.cpu_shares --output benchmarks/results/fusion_shares_cpu.json
    python -m benchmarks.fusion.cpu_shares --table benchmarks/results/fusion_shares_cpu.json

*Products alone* is a function of all products of the step, one after the other, on tensors of the same shapes: weights
that a step reads twice are one variable there as well, so that caches hold what they would. It runs by TensorFlow's
kernels, and stitched, by those of a region. Where that is over four fifths of the step, no fusion of other ops could
make the step 1.25 times as fast. Medians, all systems in turn, on as many threads as TensorFlow takes."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import tfmem
from benchmarks.fusion.cases import OF_XLA, SYSTEMS, TEN
from benchmarks.fusion.graphs import PRODUCTS
from benchmarks.fusion.systems import System
from benchmarks.fusion.workloads import make
from benchmarks.fusion.workloads.workload import Workload
from benchmarks.offload.tables import table as markdown
from benchmarks.records import begun, load, save
from graph_passes.decision import Fusion

ALONE = ("products", "products, stitched")
BLOCK = 0.05  # seconds of one system before the next one's turn
FORWARDED = frozenset({"Identity", "ReadVariableOp", "Reshape", "ExpandDims", "Squeeze", "StopGradient"})


def main(arguments: list[str] | None = None) -> int:
    """Measure and write, or print the table of what was written."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fusion.cpu_shares",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=Path("fusion_shares.json"), help="where to write the results")
    parser.add_argument("--only", nargs="+", choices=TEN, default=list(TEN), help="workloads (the ten)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each system (15)")
    parser.add_argument("--table", type=Path, help="results to make a table of, and run nothing")
    options = parser.parse_args(arguments)
    if options.table:
        print(table((load(options.table) or {"cases": {}})["cases"]))
        return 0
    os.environ.setdefault("TF_XLA_FLAGS", "--tf_xla_cpu_global_jit")  # read when XLA is first asked for
    tf.config.optimizer.set_experimental_options({"remapping": False})
    options.resume = None
    results = begun(options)
    for name in options.only:
        results["cases"][name] = measured(name, options.rounds)
        save(results, options.output)
    print(table(results["cases"]))
    return 0


def measured(name: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step by system, of its products alone, and how many products there are."""
    systems: dict[str, System] = {}
    for system in SYSTEMS:
        try:
            systems[system] = System.begun(system, lambda: make(name))
        except Exception as error:  # XLA has no kernel for some ops
            print(f"{name}: {system} refused: {type(error).__name__}", file=sys.stderr)
    workload = systems["graph"].workload
    alone, count = products_of(workload)
    stitched = tfmem.optimize(
        alone, passes=("fusion",), fusion=tfmem.FusionOptions(tune="off"), cache_directory="", memory_budget=None
    )
    runs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        system: (found.enter, found.scalar) for system, found in systems.items()
    }
    runs |= {
        kind: (systems["graph"].enter, partial(number, function))
        for kind, function in zip(ALONE, (alone, stitched), strict=True)
    }
    settled(systems)
    return {"products": count, "ms": {kind: round(1e3 * found, 4) for kind, found in timed(runs, rounds).items()}}


def number(function: Callable[[], Any]) -> float:
    """What a function of no arguments computes, on the host."""
    return float(function())


def settled(systems: dict[str, System]) -> None:
    """tfmem chooses while steps run."""
    deadline = time.perf_counter() + 10
    while "tfmem" in systems and time.perf_counter() < deadline:
        systems["tfmem"].scalar()
        if tfmem.report(systems["tfmem"].function).fusion_state in (Fusion.STITCHED, Fusion.LEFT):
            return


def timed(runs: dict[str, tuple[Callable[[], object], Callable[[], object]]], rounds: int) -> dict[str, float]:
    """The median of each, in seconds; each is entered, and run three times untimed, at each turn."""
    seconds: dict[str, list[float]] = {kind: [] for kind in runs}
    for number in range(rounds):
        for kind in runs if number % 2 == 0 else reversed(runs):
            enter, run = runs[kind]
            enter()
            for _ in range(3):
                run()
            began = time.perf_counter()
            while True:
                start = time.perf_counter()
                run()
                end = time.perf_counter()
                seconds[kind].append(end - start)
                if end - began > BLOCK:
                    break
    return {kind: statistics.median(found) for kind, found in seconds.items()}


def products_of(workload: Workload) -> tuple[Any, int]:
    """A `tf.function` that multiplies what a workload's step multiplies and gives one number, and how many products."""
    graph = workload.step.get_concrete_function(*workload.inputs).graph
    ops = [op for op in pruned(graph) if any(word in op.type for word in PRODUCTS)]
    random = np.random.default_rng(0)
    values: dict[str, tf.Variable] = {}
    for op in ops:
        for tensor in op.inputs:
            shape = tensor.shape.as_list()
            if tensor.dtype.is_floating and source(tensor) not in values:
                number = random.standard_normal(shape) / max(shape[-1:] or [1]) ** 0.5
                values[source(tensor)] = tf.Variable(number.astype(np.float32))

    @tf.function
    def products() -> Any:
        last: list[Any] = []
        results = []
        for op in ops:
            with tf.control_dependencies(last):  # as most of a step's products wait for others
                inputs = [
                    tf.reshape(values[source(tensor)], tensor.shape)
                    if tensor.dtype.is_floating
                    else tf.constant(tf.get_static_value(tensor))
                    for tensor in op.inputs
                ]
                result = again(op, inputs)
            last = [result]
            results.append(tf.reshape(result, [-1])[0])
        return tf.add_n(results)

    return products, len(ops)


def again(op: Any, inputs: list[Any]) -> Any:
    """An op of another graph once more."""
    names = [argument.name for argument in op.op_def.input_arg]
    attributes = {
        attr.name: op.get_attr(attr.name)
        for attr in op.op_def.attr
        if attr.name not in ("T", "Ta", "Tb", "Tout", "grad_a", "grad_b")
    }
    return getattr(tf.raw_ops, op.type)(**dict(zip(names, inputs, strict=True)), **attributes)


def pruned(graph: Any) -> Iterator[Any]:
    """The ops that the graph's results or effects need, as TensorFlow would run them."""
    pending = [tensor.op for tensor in graph.outputs] + list(graph.control_outputs)
    needed = set()
    while pending:
        op = pending.pop()
        if op not in needed:
            needed.add(op)
            pending += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return (op for op in graph.get_operations() if op in needed)


def source(tensor: Any) -> str:
    """What a tensor is the value of: equal for all reads of a variable."""
    while tensor.op.type in FORWARDED and tensor.op.inputs:
        tensor = tensor.op.inputs[0]
    return str(tensor.name)


def table(cases: dict[str, Any]) -> str:
    """The table in Markdown."""
    rows = []
    for name, case in cases.items():
        ms = case["ms"]
        xla = min((ms[system] for system in OF_XLA if system in ms), default=None)
        best = min(ms[system] for system in ms if system not in (*ALONE, "tfmem"))
        theirs, ours = (ms[kind] for kind in ALONE)
        rows.append(
            (
                name,
                str(case["products"]),
                f"{ms['graph']:.3f}",
                "-" if xla is None else f"{xla:.3f}",
                f"{ms['tfmem']:.3f}",
                f"{ms['graph'] / ms['tfmem']:.2f}x",
                f"{best / ms['tfmem']:.2f}x",
                f"{theirs:.3f}",
                f"{ours:.3f}",
                f"{theirs / ms['graph']:.0%}",
                f"{ours / ms['tfmem']:.0%}",
            )
        )
    header = (
        *("workload", "products", "graph, ms", "the better XLA", "tfmem", "over graph", "over the better of the two"),
        *("products alone: TensorFlow's", "tfmem's", "share of the graph's step", "of tfmem's"),
    )
    return markdown("What products take of a step on a CPU", header, rows)


if __name__ == "__main__":
    sys.exit(main())

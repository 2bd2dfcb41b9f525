"""How far what the GPU's kernel computes lies from the definition in float64, and how far the CPU's op in float32 does:
losses, outputs, states, the gradient of each parameter and updates, each twice. Under a minute; the summary comes last,
and the exit status is 1 if two runs differ or the GPU is much further away than the CPU.

python3 -m benchmarks.dynamic.distances --hidden 256 --batch 1 2 8 128

Distances are relative to the largest number of what is compared. They are taken at weights as they begin, and again
when the net has learnt its trees: its gradients are then small differences of numbers near 1 (a probability and 1), and
float32 gives few digits of them on any device. So a distance of learnt weights says something only beside the CPU's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.dynamic.processes import numbered
from benchmarks.dynamic.timing import parts_of, words_of
from custom_ops.dynamic.codegen.gpu_program import DynamicProgram, build
from examples import trees
from tests.dynamic_reference import Run

if TYPE_CHECKING:
    from examples.tree_lstm import TreeLSTM
    from tfmem import dynamic

Arrays = Mapping[str, np.ndarray[Any, Any]]
LEARNT = 8  # sentences of a step by which the net learns
MOST_TIMES = 16.0  # that the GPU may be as far from float64 as the CPU: products split into TF32 have 22 of 24 bits
NEAR = 4e-6  # or so far at any rate, by the largest number at first: one loss of the CPU may be exact by luck


@dataclass(frozen=True)
class Distance:
    """The distance of a result, relative to the largest number of the definition's.

    Attributes:
        what: "losses", "outputs", "state 0", "gradient of pair", "updates".
        largest, first: number that there is, and that there was before the net learnt.
        gpu, cpu: their distances from the definition.
        between: the GPU's from the CPU's.
        moved: how far two runs on the GPU are apart.
    """

    what: str
    largest: float
    first: float
    gpu: float
    cpu: float
    between: float
    moved: float

    @property
    def far(self) -> bool:
        """Whether the GPU's result is not what float32 makes of the definition, or not the same each time."""
        near = max(NEAR * max(self.largest, self.first), MOST_TIMES * self.cpu * self.largest)
        return self.moved != 0 or not self.gpu * self.largest <= near


def compared(exact: Arrays, gpu: Arrays, again: Arrays, cpu: Arrays, first: Arrays | None = None) -> list[Distance]:
    """A distance of each result; `first` is the definition's at first weights, unless these are."""
    found = []
    for what, value in exact.items():
        largest = float(np.abs(value).max(initial=0.0))
        before = largest if first is None else float(np.abs(first[what]).max(initial=0.0))

        def apart(a: np.ndarray, b: np.ndarray, scale: float = largest or 1.0) -> float:
            if np.array_equal(a, b, equal_nan=True):
                return 0.0
            return float(np.abs(a.astype(np.float64) - b).max()) / scale

        both = gpu[what], cpu[what]
        distances = (*(apart(of, value) for of in both), apart(*both), apart(gpu[what], again[what]))
        found.append(Distance(what, largest, before, *distances))
    return found


def names_of(net: TreeLSTM) -> list[str]:
    """Names of the net's parameters, in the order of its handle."""
    names = {id(value): name for name, value in vars(net).items()}
    return [names[id(parameter)] for parameter in net.handle.parameters]


def results(net: TreeLSTM, batch: dynamic.Batch, program: DynamicProgram | None) -> Arrays:
    """What the op computes with a kernel, or without one on the CPU. Updates are those of SGD with rate 1."""
    import tensorflow as tf

    from custom_ops.dynamic.op import forward, forward_backward, step
    from custom_ops.load import load

    ops, spec, parameters = load().ops, net.handle.spec, net.handle.parameters
    with tf.device("/CPU:0") if program is None else contextlib.nullcontext():
        losses, outputs, gradients = forward_backward(ops, spec, parameters, batch, 0, None, program)
        states = forward(ops, spec, parameters, batch, 0, state_of=0, training=True, program=program)[2]
        copies = [tf.Variable(parameter.read_value()) for parameter in parameters]
        step(ops, spec, copies, batch, 0, None, "sgd", tf.constant([1.0]), 1, program)
    found = {"losses": losses, "outputs": outputs[0]}
    found |= {f"state {number}": state for number, state in enumerate(states)}
    found |= {f"gradient of {name}": of for name, of in zip(names_of(net), gradients, strict=True)}
    arrays = {what: tf.convert_to_tensor(value).numpy() for what, value in found.items()}
    taken = [
        before.numpy().astype(np.float64) - after.numpy() for before, after in zip(parameters, copies, strict=True)
    ]
    return arrays | {"updates": _joined(taken)}


def definition(net: TreeLSTM, batch: dynamic.Batch) -> Arrays:
    """The definition's results in float64, node by node."""
    spec, values = net.handle.spec, [parameter.numpy().astype(np.float64) for parameter in net.handle.parameters]
    run = Run(spec.parameters, spec.kinds, values, list(zip(*(of.to_list() for of in batch), strict=True)))
    gradients = run.backward()
    found = {"losses": run.losses, "outputs": np.stack([node.outputs[0] for node in run.nodes])}
    for number in range(len(run.nodes[0].state)):
        found[f"state {number}"] = np.stack([node.state[number] for node in run.nodes])
    found |= {f"gradient of {name}": of for name, of in zip(names_of(net), gradients, strict=True)}
    return found | {"updates": _joined(gradients)}


def _joined(values: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([value.ravel() for value in values])


def learn(net: TreeLSTM, batches: Sequence[dynamic.Batch], steps: int, program: DynamicProgram | None) -> None:
    """Trains by Adam, as the example does."""
    import tensorflow as tf

    from custom_ops.dynamic.op import step
    from custom_ops.load import load

    optimizer = net.handle.optimizer
    assert optimizer is not None  # the example's net has one
    slots = [tf.Variable(tf.zeros_like(p)) for _ in optimizer.slots for p in net.handle.parameters]
    variables = [*net.handle.parameters, *slots]
    for number in range(steps):
        batch, rates = batches[number % len(batches)], optimizer.rates(tf.constant(number + 1, tf.int64))
        step(load().ops, net.handle.spec, variables, batch, 0, None, optimizer.rule, rates, number + 1, program)


def rows_of(
    net: TreeLSTM,
    given: Sequence[list],
    sizes: Sequence[int],
    steps: int,
    programs: Mapping[str, DynamicProgram],
    other: DynamicProgram | None = None,
) -> Iterator[dict]:
    """Rows of weights as they begin, then of those that the net has learnt; of each size and kernel.

    Args:
        programs: kernels by name; the net learns by the first.
        other: in the place of the CPU's op.
    """
    roots = [net.node(tree, {word: word for tree in given for word in words_of(tree)}) for tree in given]
    first: dict[int, Arrays] = {}
    for weights in ("first", "learnt"):
        for size in sizes:
            batch = net.handle.batch(roots[:size])
            exact, cpu = definition(net, batch), results(net, batch, other)
            before = first.setdefault(size, exact)
            for kernel, program in programs.items():
                found = compared(exact, *(results(net, batch, program) for _ in range(2)), cpu, before)
                yield {"weights": weights, "batch": size, "kernel": kernel, "distances": found}
        if weights == "first":
            learn(
                net, [net.handle.batch(part) for part in parts_of(roots, LEARNT)], steps, next(iter(programs.values()))
            )


def tables(rows: Sequence[dict]) -> list[str]:
    """Every distance, and a summary last: the furthest result of each row."""
    lines = []
    summary = [
        "",
        "| hidden | weights | batch | kernel | GPU to float64 | CPU to float64 | GPU to CPU | two runs | furthest |",
        "|" + "---|" * 9,
    ]
    for row in rows:
        about = (str(row["hidden"]), row["weights"], str(row["batch"]), row["kernel"])
        lines += [f"hidden {about[0]}, {about[1]} weights, batch {about[2]}, {about[3]}: largest; GPU, CPU, both, runs"]
        for of in row["distances"]:
            numbers = (of.largest, of.gpu, of.cpu, of.between, of.moved)
            lines.append(f"  {of.what:24s} {' '.join(f'{number:8.1e}' for number in numbers)}{'  FAR' * of.far}")
        worst = max(row["distances"], key=lambda of: (of.far, of.gpu))
        most = [max(getattr(of, key) for of in row["distances"]) for key in ("gpu", "cpu", "between", "moved")]
        cells = (*about, *(f"{number:.1e}" for number in most), worst.what + " FAR" * worst.far)
        summary.append(f"| {' | '.join(cells)} |")
    return lines + summary


def measure(hidden: int, sizes: Sequence[int], steps: int) -> Iterator[dict]:
    """Distances of the example's net on this process's GPU, with products in tiles and without."""
    from benchmarks.dynamic.ours import EMBEDDING
    from custom_ops.jit.cache import Cache
    from custom_ops.jit.device import DeviceContext
    from examples.tree_lstm import TreeLSTM
    from tfmem.kernels.recurrent import kernel_folder
    from tfmem.options import Options

    given = numbered(trees.made(256))
    net = TreeLSTM(1 + max(max(words_of(tree)) for tree in given), EMBEDDING, hidden)
    plan = net.handle.plan
    if plan is None:
        raise SystemExit("there is no GPU, or no kernel for it")
    with DeviceContext(0) as device, kernel_folder(Options().cache_directory) as folder:
        programs = {
            kernel: build(net.handle.spec, device.arch, plan.chip, cache=Cache(folder), tiles=kernel == "tiles")
            for kernel in ("tiles", "rows")
        }
    for row in rows_of(net, given, sizes, steps, programs):
        yield {"hidden": hidden, **row}


def main(given: Sequence[str] | None = None) -> int:
    """Measures and prints; 1 if something is far away."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 8, 128])
    parser.add_argument("--steps", type=int, default=600, help=f"by which the net learns, of {LEARNT} sentences")
    parser.add_argument("--total-seconds", type=float, default=50, help="after which nothing new begins")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    args = parser.parse_args(given)
    end, rows = time.monotonic() + args.total_seconds, []
    for row in (row for hidden in args.hidden for row in measure(hidden, args.batch, args.steps)):
        rows.append(row)
        if time.monotonic() > end:
            break
    print("\n".join(tables(rows)))
    if args.output:
        plain = [{**row, "distances": [asdict(of) for of in row["distances"]]} for row in rows]
        args.output.write_text(json.dumps(plain, indent=1) + "\n")
    return int(any(of.far for row in rows for of in row["distances"]))


if __name__ == "__main__":
    sys.exit(main())

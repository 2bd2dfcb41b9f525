"""Where a step of the Tree-LSTM goes on a GPU: time of the kernel by what its phases do, with products in tiles on
tensor cores and without, sentences a second, and gradients against the CPU's. Two minutes at most; the tables come
last.

python3 -m benchmarks.dynamic.phases --hidden 512 256 --batch 1 2 8 128
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.dynamic.timing import measure as rate
from benchmarks.dynamic.timing import parts_of, words_of
from custom_ops.dynamic.codegen.gpu_program import DynamicProgram, build, kinds_of
from custom_ops.dynamic.codegen.source import numbered_segments
from custom_ops.dynamic.spec import Spec
from examples import trees

if TYPE_CHECKING:
    from examples.tree_lstm import TreeLSTM

STEPS = 8  # of a kernel that are timed
WARM = 3
SECTIONS = ("before levels", "level", "after levels", "back, before levels", "back, level", "back, after levels")
OPS = {2: "gradients and updates", 3: "gradients of tables", 6: "results", 7: "losses"}
RUN, MULTIPLY = 1, 9


@dataclass(frozen=True)
class Phase:
    """What the first processor did between two barriers, in cycles."""

    op: int
    number: int
    wait: int
    work: int


@dataclass(frozen=True)
class Timed:
    """A launch.

    Attributes:
        nanoseconds, cycles: of the first processor, from its first line to its last.
        phases: as they came.
    """

    nanoseconds: int
    cycles: int
    phases: tuple[Phase, ...]


def parsed(lines: Iterable[str]) -> list[Timed]:
    """What timed kernels printed (Clock of custom_ops/kernels/dynamic.cuh)."""
    found: list[tuple[int, int, list[Phase]]] = []
    for line in lines:
        word, *numbers = line.split() or [""]
        if word == "dynamic":
            found.append((int(numbers[0]), int(numbers[1]), []))
        elif word == "phase" and found:
            found[-1][2].append(Phase(*map(int, numbers)))
    return [Timed(nanoseconds, cycles, tuple(phases)) for nanoseconds, cycles, phases in found]


def names_of(spec: Spec) -> dict[int, str]:
    """What segments do, by their numbers."""
    return {
        number: f"{SECTIONS[section]}: {'product' if segment.call else 'all else'}"
        for number, _, section, segment in numbered_segments(kinds_of(spec))
    }


def groups(timed: Timed, names: dict[int, str]) -> dict[str, tuple[int, float]]:
    """How many phases begin with the same, and the microseconds that they take, waits included."""
    scale = timed.nanoseconds / max(1, timed.cycles) / 1000
    found: dict[str, tuple[int, float]] = {}
    for phase in timed.phases:
        name = OPS.get(phase.op, "nothing")
        if phase.op in (RUN, MULTIPLY):
            name = names[phase.number] + " in tiles" * (phase.op == MULTIPLY)
        count, total = found.get(name, (0, 0.0))
        found[name] = (count + 1, total + (phase.wait + phase.work) * scale)
    rest = timed.cycles - sum(phase.wait + phase.work for phase in timed.phases)
    return {"weights to the chip, and the end": (1, rest * scale), **found}


@contextmanager
def captured(wait: Callable[[], object]) -> Iterator[list[str]]:
    """Lines that reach standard output, from Python or C, until `wait` has returned."""
    lines: list[str] = []
    kept = os.dup(1)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 1)
        try:
            yield lines
            wait()
            ctypes.CDLL(None).fflush(None)
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        lines.extend(file)


def launches(run: Callable[[], object], wait: Callable[[], object]) -> list[Timed]:
    """The launches of a timed kernel, after some to warm up."""
    with captured(wait) as lines:
        for _ in range(WARM + STEPS):
            run()
    return parsed(lines)[WARM:]


def middle(found: Sequence[Timed]) -> Timed:
    """The launch of the median time."""
    return sorted(found, key=lambda timed: timed.nanoseconds)[len(found) // 2]


def measure(hidden: int, sizes: Sequence[int], seconds: float) -> Iterator[dict]:
    """Rows of the example's net on this process's GPU."""
    from benchmarks.dynamic.ours import EMBEDDING
    from benchmarks.dynamic.processes import numbered
    from custom_ops.jit.device import DeviceContext
    from examples.tree_lstm import TreeLSTM

    given = numbered(trees.made(256))
    net = TreeLSTM(1 + max(max(words_of(tree)) for tree in given), EMBEDDING, hidden)
    plan, spec = net.handle.plan, net.handle.spec
    if plan is None:
        raise SystemExit("there is no GPU, or no kernel for it")
    with DeviceContext(0) as device:
        began = time.perf_counter()
        programs = {
            kind: build(spec, device.arch, plan.chip, tiles=kind == "tiles", timed=True) for kind in ("tiles", "rows")
        }
        compiled = time.perf_counter() - began
        for row in rows_of(net, given, sizes, seconds, programs, device.driver.cuCtxSynchronize):
            yield {"hidden": hidden, "compiled": compiled, **row}


def rows_of(
    net: TreeLSTM,
    given: Sequence[list],
    sizes: Sequence[int],
    seconds: float,
    programs: Mapping[str, DynamicProgram],
    wait: Callable[[], object],
    other: DynamicProgram | None = None,
) -> Iterator[dict]:
    """Kernels by phases, rates, and the difference of gradients to the CPU's: of the weights that the net begins with,
    since those of a net that has learnt its trees are ill-conditioned (`benchmarks.dynamic.distances`).

    Args:
        programs: timed kernels by name.
        wait: for what the GPU does.
        other: in the place of the CPU's op.
    """
    import tensorflow as tf

    from benchmarks.dynamic.ours import difference
    from custom_ops.dynamic.op import step
    from custom_ops.load import load

    spec, optimizer = net.handle.spec, net.handle.optimizer
    assert optimizer is not None  # the example's net has one
    roots = [net.node(tree, {word: word for tree in given for word in words_of(tree)}) for tree in given]
    names = names_of(spec)
    slots = [tf.Variable(tf.zeros_like(p)) for _ in optimizer.slots for p in net.handle.parameters]
    rates = optimizer.rates(tf.constant(1, tf.int64))
    batches = {size: [net.handle.batch(part) for part in parts_of(roots, size)] for size in sizes}
    differences = {size: difference(net, parts[0], other) for size, parts in batches.items()}
    for size, parts in batches.items():
        found = rate([(part, size) for part in parts], _train(net.handle), lambda losses: losses.numpy(), seconds)
        row: dict = {"batch": size, "rate": found["sentences"] / found["wall"]}
        row |= {"host": host_time(_train(net.handle), parts[0]), "difference": differences[size]}
        for kind, program in programs.items():

            def run(program: DynamicProgram = program, batch: object = parts[0]) -> object:
                variables = [*net.handle.parameters, *slots]
                return step(load().ops, spec, variables, batch, 0, None, optimizer.rule, rates, 1, program)[0]

            timed = launches(run, wait)
            row[kind] = statistics.median(launch.nanoseconds for launch in timed) / 1000
            row[f"{kind} phases"] = groups(middle(timed), names)
        yield row


def host_time(train: Callable[[object], object], batch: object) -> float:
    """Microseconds until a step is enqueued, while the GPU has nothing else to do: the median of pairs of steps."""
    times = []
    for _ in range(20):
        began = time.perf_counter()
        losses = [train(batch) for _ in range(2)]
        times.append((time.perf_counter() - began) / 2)
        losses[-1].numpy()  # type: ignore[attr-defined]
    return 1e6 * statistics.median(times)


def _train(handle: object) -> Callable[[object], object]:
    return lambda batch: handle.step(batch).losses  # type: ignore[attr-defined]


def tables(rows: Sequence[dict]) -> list[str]:
    """Phases of each size, and a summary last."""
    lines = []
    for row in rows:
        lines += [f"hidden {row['hidden']}, batch {row['batch']}: phases, microseconds in tiles; without tiles"]
        both = row["tiles phases"], row["rows phases"]
        for name in dict.fromkeys([*both[0], *both[1]]):
            shown = [f"{of[name][0]:3d} {of[name][1]:9.1f}" if name in of else f"{'-':>13}" for of in both]
            lines.append(f"  {name:45s} {shown[0]} ; {shown[1]}")
    lines += [
        "",
        "| hidden | batch | sentences a second | host, us | kernel, us | without tiles, us | gradients to the CPU's |",
    ]
    lines.append("|" + "---|" * 7)
    for row in rows:
        times = [f"{row[key]:.0f}" for key in ("rate", "host", "tiles", "rows")]
        lines.append(f"| {row['hidden']} | {row['batch']} | {' | '.join(times)} | {row['difference']:.1e} |")
    return lines


def main(given: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[512, 256])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 8, 128])
    parser.add_argument("--seconds", type=float, default=1.0, help="of a measured rate")
    parser.add_argument("--total-seconds", type=float, default=110, help="after which nothing new begins")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    args = parser.parse_args(given)
    end, rows = time.monotonic() + args.total_seconds, []
    for hidden in args.hidden:
        if time.monotonic() > end:
            break
        for row in measure(hidden, args.batch, args.seconds):
            rows.append(row)
            if args.output:
                args.output.write_text(json.dumps(rows, indent=1) + "\n")
            if time.monotonic() > end:
                break
    print("\n".join(tables(rows)))


if __name__ == "__main__":
    main()

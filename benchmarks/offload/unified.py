"""Chapter 4 of the AutoVM thesis: how a GPU's unified memory behaves. Needs a GPU, and 1 GiB of its memory.

    python -m benchmarks.offload.unified --output benchmarks/results/offload_unified_h100.json
    python -m benchmarks.offload.unified --table benchmarks/results/offload_unified_h100.json

Each experiment is one of the thesis's listings, with buffers of 256 MiB: all of them together take less than half of
what the GPU has free, since demand paging under pressure can hang a card.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from benchmarks.offload.unified_cuda import CudaMemory
from benchmarks.records import begun, save
from benchmarks.runs import asked, command_line
from custom_ops.errors import KernelError

OUTPUT = "benchmarks/results/offload_unified.json"
MIB = 1 << 20
REPEATS = 5
OUT, BESIDE = 0, 1  # the two streams of an experiment


class Memory(Protocol):
    """Buffers of unified memory, all of one size, on a device with two streams."""

    @property
    def size(self) -> int:
        """Bytes of a buffer."""

    def allocate(self) -> int:
        """A buffer, none of whose pages is anywhere yet; freed by `free_all`."""

    def free_all(self) -> None:
        """Free all buffers."""

    def to_device(self, buffer: int, stream: int) -> None:
        """Enqueue the migration of a buffer's pages to the GPU."""

    def to_host(self, buffer: int, stream: int) -> None:
        """Enqueue the migration of a buffer's pages to the host."""

    def advise_host(self, buffer: int) -> None:
        """Say that a buffer's pages are best on the host."""

    def touch(self, buffer: int) -> None:
        """Write a buffer on the host."""

    def compute(self, read: int, written: int, stream: int) -> None:
        """Enqueue a kernel that reads one buffer and writes another (Listing 4.1)."""

    def wait(self, stream: int | None = None) -> None:
        """Wait for a stream, or for both."""


@dataclass(frozen=True)
class Case:
    """An experiment: what it measures, in milliseconds by name."""

    name: str
    run: Callable[[Memory], Mapping[str, float]]


def main(arguments: list[str] | None = None) -> int:
    """Measure what is asked for, or print the table."""
    parser = command_line("offload.unified", __doc__, OUTPUT)
    parser.add_argument("--mib", type=int, default=256, help="MiB of a buffer (256)")
    options, cases = asked(parser, arguments, CASES, table)
    if not cases:
        return 0
    results = begun(options)
    with ExitStack() as stack:
        try:
            memory = stack.enter_context(CudaMemory.opened(options.mib * MIB))
        except KernelError as error:
            print(f"nothing was measured: {error}", file=sys.stderr)
            return 1
        for case in cases:
            results["cases"][case.name] = {"mib": options.mib, "ms": measured(memory, case)}
            save(results, options.output)
    print("\n".join(table(results["cases"])))
    return 0


def measured(memory: Memory, case: Case) -> dict[str, float]:
    """The medians of some runs, the first of which does not count."""
    runs = []
    for _ in range(REPEATS + 1):
        runs.append(case.run(memory))
        memory.free_all()
    return {name: round(statistics.median(run[name] for run in runs[1:]), 3) for name in runs[0]}


def timed(memory: Memory, what: Callable[[], None], stream: int | None = None) -> float:
    """Milliseconds until what is enqueued has run."""
    began = time.perf_counter()
    what()
    memory.wait(stream)
    return 1e3 * (time.perf_counter() - began)


def advise(memory: Memory) -> dict[str, float]:
    """4.1: a migration moves pages at once, an advice moves none (Listing 4.2)."""
    first, second = memory.allocate(), memory.allocate()
    memory.compute(first, second, OUT)
    memory.wait()
    return {
        "migration": timed(memory, lambda: memory.to_host(first, OUT)),
        "advice": timed(memory, lambda: memory.advise_host(second)),
    }


def _after_first_kernel(memory: Memory) -> tuple[int, int, int]:
    """Three buffers, after a kernel that read the first and wrote the second; the third's pages are nowhere."""
    first, second, third = (memory.allocate() for _ in range(3))
    memory.to_device(first, OUT)
    memory.to_device(second, OUT)
    memory.wait()
    memory.compute(first, second, OUT)
    return first, second, third


def migration_first(memory: Memory) -> dict[str, float]:
    """4.2.1: the second kernel is launched after the migration (Listing 4.4)."""
    first, second, third = _after_first_kernel(memory)
    memory.wait(OUT)
    memory.to_host(first, OUT)
    return {"kernel": timed(memory, lambda: memory.compute(second, third, BESIDE))}


def kernel_first(memory: Memory) -> dict[str, float]:
    """4.2.2: the second kernel is launched before the migration (Listing 4.5)."""
    first, second, third = _after_first_kernel(memory)
    memory.wait()

    def enqueue() -> None:
        memory.compute(second, third, BESIDE)
        memory.to_host(first, OUT)

    return {"kernel": timed(memory, enqueue, BESIDE)}


def pre_access(memory: Memory) -> dict[str, float]:
    """4.2.3: the pages that the second kernel writes are mapped before, or by its page faults (Listing 4.6)."""
    found = {}
    for name, mapped in (("with", True), ("without", False)):
        _, second, third = _after_first_kernel(memory)
        memory.wait()

        def enqueue(second: int = second, third: int = third, mapped: bool = mapped) -> None:
            if mapped:
                memory.to_device(third, OUT)
            memory.compute(second, third, BESIDE)

        found[name] = timed(memory, enqueue)
        memory.free_all()
    return found


def both(memory: Memory) -> dict[str, float]:
    """4.2.4: the first buffer leaves, and the third's pages are mapped, before the second kernel (Listing 4.7)."""
    first, second, third = _after_first_kernel(memory)
    memory.wait()

    def enqueue() -> None:
        memory.to_host(first, OUT)
        memory.to_device(third, BESIDE)
        memory.compute(second, third, BESIDE)

    return {"kernel": timed(memory, enqueue)}


def rates(memory: Memory) -> dict[str, float]:
    """4.3: migrations both ways, and page faults of a kernel whose input is on the host."""
    first, second = memory.allocate(), memory.allocate()
    memory.compute(first, second, OUT)
    memory.wait()
    resident = timed(memory, lambda: memory.compute(first, second, OUT))
    out = timed(memory, lambda: memory.to_host(first, OUT))
    back = timed(memory, lambda: memory.to_device(first, OUT))
    memory.touch(first)
    faults = timed(memory, lambda: memory.compute(first, second, OUT))
    return {"out": out, "back": back, "faults": faults - resident}


CASES: Sequence[Case] = (
    Case("advise", advise),
    Case("migration_first", migration_first),
    Case("kernel_first", kernel_first),
    Case("pre_access", pre_access),
    Case("both", both),
    Case("rates", rates),
)


def table(cases: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Markdown: milliseconds, and GB/s of the migrations."""
    rows = ["| experiment | what | ms | GB/s |", "| --- | --- | --- | --- |"]
    for name, found in cases.items():
        nbytes, times = float(str(found["mib"])) * MIB, found["ms"]
        assert isinstance(times, Mapping)
        for what, milliseconds in times.items():
            rate = f"{nbytes / max(milliseconds, 1e-3) / 1e6:.1f}" if name == "rates" else ""
            rows.append(f"| {name} | {what} | {milliseconds:.3f} | {rate} |")
    return rows


if __name__ == "__main__":
    sys.exit(main())

"""Measures a GPU once: the parameters of GRNN's performance model (Figure 10), and those of clusters and tensor cores.

Each figure is a difference: the time of a kernel that does its work many times, less the time of one that does it a few
times. All of it takes a second or two."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product

from custom_ops.machine import SCHEDULERS, WARP, Curve, Machine

WARPS = (1, 2, 4, 8)  # on each scheduler
SUMS = (1, 2, 4, 8)  # columns, or rows, of a thread
SHARES = (0.25, 0.5, 1.0)  # of the multiprocessors
LANES = (1, 8, 16, 32)
POSITIONS = 8  # as microbenchmark.cuh has it
SHUFFLES = 5  # of a reduction
FEW, MANY, REPEATS = 32, 288, 3  # times a kernel does its work; launches of each
SMALL, LARGE = 256, 4096  # floats of state


@dataclass(frozen=True)
class Point:
    """One kernel in one launch shape.

    Attributes:
        kernel: its name in the generated source.
        threads: of a block.
        blocks: how many.
        cluster: blocks of a cluster.
        size: floats of state, or what else the kernel takes.
    """

    kernel: str
    threads: int
    blocks: int
    cluster: int = 1
    size: int = 0


Launch = Callable[[Point, int], float]  # (point, iterations) -> nanoseconds of one launch


def source(arch: int) -> str:
    """CUDA source that only instantiates kernels/microbenchmark.cuh: an entry for each kernel that is measured."""
    shapes = {(columns, rows) for columns, rows in product(SUMS, SUMS) if 1 in (columns, rows)} | {(4, 4)}
    bodies = {f"products_{columns}_{rows}": f"products<{columns}, {rows}>(data, n)" for columns, rows in sorted(shapes)}
    bodies |= {f"reductions_{width}": f"reductions<{width}>(data, n)" for width in SUMS}
    bodies |= {name: f"{name}(data, n)" for name in ("activations", "block_barrier")}
    bodies |= {name: f"{name}(data, n, size)" for name in ("shared_loads", "state_load", "grid_exchange")}
    bodies["grid_barrier"] = "grid_barrier(counter, n)"
    if arch >= 80:
        bodies |= {f"tensor_{tiles}": f"tensor_products<{tiles}>(data, n)" for tiles in (1, 4)}
    if arch >= 90:
        bodies["cluster_barrier"] = "cluster_barriers(n)"
        bodies["cluster_exchange"] = "cluster_exchange(data, n, size)"
    parameters = "float* data, unsigned* counter, int n, int size"
    return '#include "microbenchmark.cuh"\n\n' + "".join(
        f'extern "C" __global__ void __launch_bounds__({_threads(name)}) {name}({parameters}) {{\n'
        f"  tfmem::microbenchmark::{body};\n}}\n"
        for name, body in bodies.items()
    )


def fit(launch: Launch, name: str, arch: int, clusters: Curve) -> Machine:
    """The machine that explains what `launch` measures.

    Args:
        launch: runs one point and times it. Data is zeroed before each launch.
        name: of the device.
        arch: 10 * major + minor.
        clusters: for each size how many run at once; (1, multiprocessors) is the first.
    """
    multiprocessors = int(clusters[0][1])

    def each(kernel: str, warps: int = 2, blocks: int = multiprocessors, cluster: int = 1, size: int = 0) -> float:
        """Nanoseconds of one iteration."""
        point = Point(kernel, warps * WARP * SCHEDULERS, blocks, cluster, size)
        few, many = (statistics.median(launch(point, count) for _ in range(REPEATS)) for count in (FEW, MANY))
        return max(many - few, 1.0) / (MANY - FEW)

    def line(kernel: str, **shape: int) -> tuple[float, float]:
        """Nanoseconds for no state at all, and bytes a nanosecond."""
        small, large = (each(kernel, size=size, **shape) for size in (SMALL, LARGE))
        bandwidth = 4 * (LARGE - SMALL) / max(large - small, 1.0)
        return max(small - 4 * SMALL / bandwidth, 1.0), bandwidth

    one_sum = each("products_1_1", warps=1)
    fma = one_sum / POSITIONS

    def speedup(columns: int, rows: int, warps: int) -> float:
        """What is finished in a nanosecond, over what one warp with one sum finishes."""
        return columns * rows * warps * one_sum / each(f"products_{columns}_{rows}", warps=warps)

    by_warps = _curve((warps, speedup(1, 1, warps)) for warps in WARPS)
    by_columns = _curve((columns, speedup(columns, 1, 1)) for columns in SUMS)
    by_rows = _curve((rows, speedup(1, rows, 1)) for rows in SUMS)
    one_reduction = each("reductions_1", warps=1)
    shuffle = one_reduction / SHUFFLES
    loads = {share: line("state_load", blocks=max(1, round(share * multiprocessors))) for share in SHARES}
    largest = int(clusters[-1][0])
    together = {"blocks": largest * int(clusters[-1][1]), "cluster": largest}
    cluster_handoff, cluster_bandwidth = line("cluster_exchange", **together) if largest > 1 else (0.0, 1.0)
    grid_handoff, grid_bandwidth = line("grid_exchange")
    return Machine(
        name=name,
        arch=arch,
        multiprocessors=multiprocessors,
        clusters=clusters,
        fma=fma,
        warps_speedup=by_warps,
        columns_speedup=by_columns,
        rows_speedup=by_rows,
        peak_speedup=max(speedup(4, 4, 2), *(y for curve in (by_warps, by_columns, by_rows) for _, y in curve)),
        # 16 warps of a multiprocessor take turns
        shared_load=_curve(
            (lanes, each("shared_loads", warps=4, size=lanes) / (POSITIONS * 4 * SCHEDULERS)) for lanes in LANES
        ),
        shuffle=shuffle / fma,
        shuffle_speedup=_curve(
            (warps * width, warps * width * one_reduction / each(f"reductions_{width}", warps=warps))
            for warps, width in ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8))
        ),
        activation=each("activations", warps=1) / 2,
        tensor_chain=each("tensor_1", warps=1) if arch >= 80 else 0.0,
        tensor_rate=each("tensor_4", warps=2) / (2 * 4) if arch >= 80 else 0.0,
        load_latency=loads[0.5][0],
        load_bandwidth=_curve((share, bandwidth) for share, (_, bandwidth) in loads.items()),
        block_barrier=each("block_barrier"),
        cluster_barrier=each("cluster_barrier", **together) if largest > 1 else 0.0,
        cluster_handoff=cluster_handoff,
        cluster_bandwidth=cluster_bandwidth,
        grid_barrier=each("grid_barrier"),
        grid_handoff=grid_handoff,
        grid_bandwidth=grid_bandwidth,
    )


def _curve(points: Iterable[tuple[float, float]]) -> Curve:
    return tuple((float(x), round(y, 4)) for x, y in points)


def _threads(kernel: str) -> int:
    """The most that a kernel is launched with: wide products need the registers of few threads."""
    sums = [int(word) for word in kernel.split("_") if word.isdigit()]
    return (2 if kernel.startswith("products") and sums != [1, 1] else max(WARPS)) * WARP * SCHEDULERS

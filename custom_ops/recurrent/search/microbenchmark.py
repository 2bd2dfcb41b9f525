"""Measures a GPU once: the parameters of GRNN's performance model (Figure 10), and those of clusters and tensor cores.

Each figure is a difference: the time of a kernel that does its work many times, less the time of one that does it a few
times. All of it takes a second or two; the result is kept under all that it depends on."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product

from custom_ops.errors import KernelError
from custom_ops.jit import nvrtc
from custom_ops.jit.cache import MALFORMED, Cache, UnusableError, digest
from custom_ops.jit.device import DeviceContext
from custom_ops.jit.image import KernelImage
from custom_ops.jit.launch import LoadedKernel, Module
from custom_ops.machine import SCHEDULERS, WARP, Curve, Machine, from_json, shared_memory

WARPS = (1, 2, 4, 8)  # on each scheduler
SUMS = (1, 2, 4, 8)  # columns, or rows, of a thread
SHARES = (0.25, 0.5, 1.0)  # of the multiprocessors
LANES = (1, 8, 16, 32)
POSITIONS, LOADS = 32, 8  # as microbenchmark.cuh has them
SHUFFLES = 5  # of a reduction
FEW, MANY, REPEATS = 32, 1056, 3  # times a kernel does its work; launches of each
WARM_UP = 100  # launches, in which the clock rises
CLUSTER_STATE = (256, 4096)  # floats
STATE = (1024, 8192)  # one load of a thread, and eight: more than are on their way at once


@dataclass(frozen=True)
class Point:
    """One kernel in one launch shape.

    Attributes:
        kernel: its name in the generated source.
        threads: of a CTA.
        ctas: how many.
        cluster: CTAs of a cluster.
        size: floats of state, or what else the kernel takes.
    """

    kernel: str
    threads: int
    ctas: int
    cluster: int = 1
    size: int = 0


FORMAT = "machine 4"
BUFFER_BYTES = 2 * 4 * max(STATE)  # two copies of the state
STATIC_SHARED = 33 << 10  # bytes of shared memory, no less than a kernel of microbenchmark.cuh has
WHOLE_PROCESSOR = 120 << 10  # and so many more: two such CTAs fit no multiprocessor
CLUSTERS = (2, 4, 8, 16)
IN_CLUSTERS = "cluster_exchange"  # the one kernel that is launched in clusters

Launch = Callable[[Point, int], float]  # (point, iterations) -> nanoseconds of one launch


def measure(device: DeviceContext, cache: Cache) -> Machine:
    """The machine that `device` is, measured now or before.

    Raises:
        KernelError: the compiler is missing, or a kernel cannot be run.
    """
    text = source(device.arch)
    about = (device.name, str(device.driver_version()), nvrtc.compiler_version())
    key = digest(FORMAT, *about, text, *nvrtc.header_texts())

    def made() -> bytes:
        bench = TimedKernels(device, nvrtc.compile_source(text, device.arch))
        machine = fit(bench, device.name, device.arch, bench.clusters())
        return json.dumps(machine.to_json(), indent=1).encode()

    def parsed(data: bytes) -> Machine:
        try:
            return from_json(json.loads(data))
        except (*MALFORMED, KernelError) as error:
            raise UnusableError(str(error)) from error

    return cache.read(key, made, parsed)


class TimedKernels:
    """The kernels of `source`, loaded; calling it launches one and returns the nanoseconds it took."""

    def __init__(self, device: DeviceContext, code: bytes) -> None:
        self._device, self._code = device, code
        self._module = Module(code, device.driver)
        self._kernels: dict[KernelImage, LoadedKernel] = {}
        self._buffer = device.allocate(BUFFER_BYTES)

    def __call__(self, point: Point, iterations: int) -> float:
        device = self._device
        launch = self._kernel(point).prepare((point.ctas, 1), (self._buffer, iterations, point.size))
        device.fill(self._buffer, BUFFER_BYTES, 0)
        return 1e6 * device.elapsed(lambda: launch(device.stream))

    def clusters(self) -> Curve:
        """How many clusters of each size run at once."""
        found = [(1.0, float(self._device.processors))]
        whole = min(WHOLE_PROCESSOR, shared_memory(self._device.arch) - STATIC_SHARED)
        for size in CLUSTERS if self._device.arch >= 90 else ():
            try:
                kernel = self._kernel(Point(IN_CLUSTERS, 2 * WARP * SCHEDULERS, size, size), shared=whole)
            except KernelError:  # larger than the device has any
                break
            found.append((float(size), float(kernel.resident // size)))
        return tuple(found)

    def _kernel(self, point: Point, shared: int = 0) -> LoadedKernel:
        alone = point.cluster == 1  # a grid's exchange asks for all CTAs at once; no launch here has more than fit
        image = KernelImage(self._device.arch, point.kernel, point.threads, self._code, shared, point.cluster, alone)
        if image not in self._kernels:
            self._kernels[image] = LoadedKernel(image, self._module)
        return self._kernels[image]


def source(arch: int) -> str:
    """CUDA source that only instantiates kernels/microbenchmark.cuh: an entry for each kernel that is measured."""
    shapes = {(columns, rows) for columns, rows in product(SUMS, SUMS) if 1 in (columns, rows)} | {(4, 4)}
    bodies = {f"products_{columns}_{rows}": f"products<{columns}, {rows}>(data, n)" for columns, rows in sorted(shapes)}
    bodies |= {f"reductions_{width}": f"reductions<{width}>(data, n)" for width in SUMS}
    bodies |= {name: f"{name}(data, n)" for name in ("activations", "block_barrier")}
    bodies |= {name: f"{name}(data, n, size)" for name in ("shared_loads", "state_load", "grid_exchange")}
    if arch >= 80:
        bodies |= {f"tensor_{tiles}": f"tensor_products<{tiles}>(data, n)" for tiles in (1, 4)}
    if arch >= 90:
        bodies[IN_CLUSTERS] = "cluster_exchange(data, n, size)"
    parameters = "float* data, int n, int size"
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

    def each(kernel: str, warps: int = 2, ctas: int = multiprocessors, cluster: int = 1, size: int = 0) -> float:
        """Nanoseconds of one iteration."""
        point = Point(kernel, warps * WARP * SCHEDULERS, ctas, cluster, size)
        few, many = (statistics.median(launch(point, count) for _ in range(REPEATS)) for count in (FEW, MANY))
        return max(many - few, 1.0) / (MANY - FEW)

    def line(kernel: str, sizes: tuple[int, int], **shape: int) -> tuple[float, float]:
        """Nanoseconds for no state at all, and bytes a nanosecond."""
        small, large = (each(kernel, size=size, **shape) for size in sizes)
        bandwidth = 4 * (sizes[1] - sizes[0]) / max(large - small, 1.0)
        return max(small - 4 * sizes[0] / bandwidth, 1.0), bandwidth

    for _ in range(WARM_UP):
        launch(Point("products_1_1", 2 * WARP * SCHEDULERS, multiprocessors), MANY)
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
    loads = {share: line("state_load", STATE, ctas=max(1, round(share * multiprocessors))) for share in SHARES}
    largest = int(clusters[-1][0])
    together = {"ctas": largest * int(clusters[-1][1]), "cluster": largest}
    in_cluster = line(IN_CLUSTERS, CLUSTER_STATE, **together) if largest > 1 else (0.0, 1.0)
    counts = (max(1, multiprocessors // 8), max(1, multiprocessors // 2), multiprocessors)
    in_grid = {ctas: line("grid_exchange", STATE, ctas=ctas) for ctas in counts}
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
            (lanes, each("shared_loads", warps=4, size=lanes) / (LOADS * 4 * SCHEDULERS)) for lanes in LANES
        ),
        shuffle=shuffle / fma,
        shuffle_speedup=_curve(
            (warps * width, warps * width * one_reduction / each(f"reductions_{width}", warps=warps))
            for warps, width in ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8))
        ),
        activation=each("activations", warps=1) / 2,
        tensor_chain=each("tensor_1", warps=1) if arch >= 80 else 0.0,
        tensor_rate=each("tensor_4", warps=2) / (2 * 4) if arch >= 80 else 0.0,
        load_bandwidth=_curve((share, bandwidth) for share, (_, bandwidth) in loads.items()),
        block_barrier=each("block_barrier"),
        cluster_handoff=in_cluster[0],
        cluster_bandwidth=in_cluster[1],
        grid_handoff=_curve((ctas, handoff) for ctas, (handoff, _) in in_grid.items()),
        grid_bandwidth=_curve((ctas, bandwidth) for ctas, (_, bandwidth) in in_grid.items()),
    )


def _curve(points: Iterable[tuple[float, float]]) -> Curve:
    return tuple((float(x), round(y, 4)) for x, y in points)


def _threads(kernel: str) -> int:
    """The most that a kernel is launched with: wide products need the registers of few threads."""
    sums = [int(word) for word in kernel.split("_") if word.isdigit()]
    return (2 if kernel.startswith("products") and sums != [1, 1] else max(WARPS)) * WARP * SCHEDULERS

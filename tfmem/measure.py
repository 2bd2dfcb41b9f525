"""A profile of a device, in the form of `custom_ops/devices/*.json`: `python -m tfmem devices --measure`."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import tensorflow as tf

from custom_ops.errors import KernelError
from custom_ops.expr.cpp import CPU, cpu_costs
from custom_ops.expr.text import from_text
from custom_ops.fusion.programs import FusionProgram
from custom_ops.fusion.region import Kernel, Region, TensorType
from custom_ops.fusion.text import to_text
from custom_ops.image_functions import named
from custom_ops.jit.cache import Cache
from custom_ops.jit.cores import usable_cores
from custom_ops.jit.device import DeviceContext
from custom_ops.load import load
from custom_ops.recurrent.search.microbenchmark import measure as measure_kernels
from graph_passes.analysis.cost.device_costs import region_costs
from graph_passes.analysis.memory.simulate import Link
from graph_passes.passes.fuse.options import FusionOptions
from tfmem.devices import Target
from tfmem.kernels.fusion_needs import LOCAL
from tfmem.kernels.fusion_programs import Programs, gpu_programs
from tfmem.kernels.recurrent import kernel_folder
from tfmem.options import Options

REPEATS = 9
ROUNDS = 1000  # of two processes that wake each other
CHAIN = 200  # small ops, one behind the other
KERNELS = 32  # of a region
DOUBLED = "program 1\naxes 0\ntensor float32 1\ninput 0 a0\nadd 0 0\noutput 1 0\n"
WAKE_NS = 1.8e4  # `wake_ns` on a machine like that of custom_ops/devices/cpu.json: the median of 15 calls, all idle
# Costs of threads grow with what it takes to wake one, the others with what a multiplication takes.
OF_THREADS = frozenset({"thread_ns", "waking_ns", "shared_phase_ns", "dealt_products_ns", "dealt_share_ns", "claim_ns"})


def profile(target: Target, link: Link, cache_directory: str) -> dict[str, Any]:
    """Measure what a profile says of a device, in a process that does nothing else and has one thread for each op."""
    side = 4096 if target.is_gpu else 1024
    with tf.device(target.name):
        x, large = tf.random.normal([side, side]), tf.zeros([side * side * 4])
        measured = {
            "flops": 2.0 * side**3 / _seconds(tf.matmul, x, x) * (1 if target.is_gpu else usable_cores()),
            "bandwidth": 2.0 * 4 * side * side * 4 / _seconds(tf.negative, large),
            "launch": _seconds(_chain, tf.zeros([4])) / CHAIN,
            "offload": link.offload,
            "prefetch": link.prefetch,
        }
    found: dict[str, Any] = {name: float(f"{value:.3g}") for name, value in measured.items()}
    if not target.is_gpu:
        return found | {"kernels": cpu_kernels(wake_ns()), "regions": regions(target, found["launch"])}
    found["memory"] = target.memory
    try:
        with DeviceContext(target.ordinal) as device, kernel_folder(cache_directory) as folder:
            found["recurrent"] = measure_kernels(device, Cache(folder)).to_json()
        options = Options(cache_directory=cache_directory, fusion=FusionOptions(tune="off"))
        found["regions"] = regions(target, found["launch"], gpu_programs(target, options))
    except KernelError as error:
        found["_note"] = f"kernels were not measured: {error}"
    return found


def regions(target: Target, dispatch: float, programs: Programs | None = None) -> dict[str, Any]:
    """Measure what an op, a region and a kernel of a region take where they compute next to nothing, in seconds.

    All else is what the profile of this device says, or the one that stands for it; a note names what was measured.

    Args:
        target: the device.
        dispatch: what TensorFlow takes for an op on it.
        programs: makes the kernels of a region; None: the device needs none.

    Raises:
        KernelError: no kernel can be made.
    """
    one, many = (_regions_seconds(count, target, programs) for count in (1, KERNELS))
    launch = max(many - one, 0.0) / (KERNELS - 1)
    measured = {"launch": launch, "dispatch": dispatch, "region": max(one - launch, 0.0)}
    note = {"_note": f"{', '.join(measured)} are measured, the others those of a like device"}
    return note | region_costs(target.profile) | {name: float(f"{value:.2g}") for name, value in measured.items()}


def _regions_seconds(kernels: int, target: Target, programs: Programs | None) -> float:
    """What a region of so many small kernels takes in a chain of such regions."""
    numbers = TensorType("float32", (4,))
    steps = tuple(Kernel(from_text(DOUBLED), (place,), (place + 1,)) for place in range(kernels))
    region = Region(1, (), (numbers,) * (kernels + 1), steps, (kernels,))
    text = to_text(region)
    made: Sequence[FusionProgram] = programs(region, LOCAL + target.name) if programs is not None else ()
    described = [program.to_text() for program in made]

    def chain(value: tf.Tensor) -> tf.Tensor:
        images = named([program.image.code for program in made])
        for _ in range(CHAIN):
            (value,) = load().ops.tfmem_fusion(
                args=[value], variables=[], T_out=[tf.float32], region=text, programs=described, images=images
            )
        return value

    with tf.device(target.name):
        return _seconds(chain, tf.zeros([4])) / CHAIN


def cpu_kernels(wake_ns: float) -> dict[str, Any]:
    """Scale what `custom_ops/devices/cpu.json` says of loops and threads to this machine.

    Two are measured, and give the scale of the others; a note says so. The op library has these numbers compiled in: it
    takes others when it is built again.

    Args:
        wake_ns: what waking a process takes here.
    """
    reference = cpu_costs()
    rows, side = 240, 1024
    square, thin = _product_seconds(rows, side), _product_seconds(1, side)
    multiplications = rows * side * side / (square * 1e9)
    numbers = side * side / (thin * 1e9)
    faster = multiplications / reference["multiplications_per_ns"]
    slower_to_wake = wake_ns / WAKE_NS
    scaled = {
        name: value * slower_to_wake if name in OF_THREADS else value / faster for name, value in reference.items()
    }
    measured = {"multiplications_per_ns": multiplications, "numbers_per_ns": numbers}
    note = {"_note": f"{' and '.join(measured)} are measured, the others scaled from {CPU.name}"}
    return note | {name: float(f"{value:.2g}") for name, value in (scaled | measured).items()}


def wake_ns() -> float:
    """Nanoseconds until a process that waits for another one runs again."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    other = multiprocessing.get_context("fork").Process(target=_answer, args=(theirs,))
    other.start()
    begin = time.perf_counter()
    for _ in range(ROUNDS):
        ours.send_bytes(b" ")
        ours.recv_bytes()
    seconds = time.perf_counter() - begin
    other.join()
    return seconds / ROUNDS / 2 * 1e9


def _answer(connection: Connection) -> None:
    for _ in range(ROUNDS):
        connection.send_bytes(connection.recv_bytes())


def _chain(value: tf.Tensor) -> tf.Tensor:
    for _ in range(CHAIN):
        value = tf.sin(value)
    return value


def _product_seconds(rows: int, side: int) -> float:
    """Time a product on one of the CPU's threads, which TensorFlow's library computes as fast as tfmem's loops."""
    return _seconds(tf.matmul, tf.random.normal([rows, side]), tf.random.normal([side, side]))


def _seconds(what: Callable[..., tf.Tensor], *given: tf.Tensor) -> float:
    """The median time of a call, as a graph, the first one not counted."""
    run, times = tf.function(what, autograph=False), []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        run(*given)
        tf.test.experimental.sync_devices()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])

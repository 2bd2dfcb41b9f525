"""What the micro-benchmark makes of times, on a machine that is made up."""

import ctypes
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from custom_ops.errors import KernelError
from custom_ops.jit.device import DeviceContext
from custom_ops.machine import from_json, read, shared_memory
from custom_ops.recurrent.search import microbenchmark
from custom_ops.recurrent.search.microbenchmark import Point, fit
from graph_passes.analysis.cost.device_costs import machine as machine_of
from tests.cuda_on_cpu.driver import Driver

LAUNCH = 3000.0  # nanoseconds of every launch, whatever it does
CLUSTERS = ((1.0, 100.0), (16.0, 6.0))


def one_iteration(point: Point) -> float:
    """Nanoseconds: FMAs of 2 ns, four of which overlap; shuffles of 10 ns; state at 8 and 4 bytes a nanosecond."""
    warps = point.threads / 128
    kind, *sums = point.kernel.rsplit("_", 2) if point.kernel.startswith("products") else (point.kernel,)
    if kind == "products":
        independent = warps * math.prod(map(int, sums))
        return microbenchmark.POSITIONS * 2.0 * max(1.0, independent / 4)
    if kind.startswith("reductions"):
        return 5 * 10.0 * max(1.0, warps * int(kind.split("_")[1]) / 8)
    if kind in ("state_load", "cluster_exchange", "grid_exchange"):
        latency = {"state_load": 300.0, "cluster_exchange": 200.0, "grid_exchange": 600.0}[kind]
        return latency + 4 * point.size / (8.0 if point.ctas < 100 else 4.0)
    if kind == "shared_loads":
        return microbenchmark.LOADS * 16 * 0.5 * max(1.0, point.size / 8)
    return {"activations": 60.0, "block_barrier": 15.0}.get(kind, 17.0)


@pytest.fixture(scope="module")
def machine():
    return fit(lambda point, iterations: LAUNCH + iterations * one_iteration(point), "made up", 90, CLUSTERS)


def test_launches_are_left_out(machine):
    assert machine.fma == pytest.approx(2)
    assert machine.shuffle == pytest.approx(5)  # FMAs
    assert machine.block_barrier == pytest.approx(15)
    assert machine.activation == pytest.approx(30)


def test_speed_ups_are_of_throughput_and_level_off(machine):
    for curve in (machine.warps_speedup, machine.columns_speedup, machine.rows_speedup):
        assert [read(curve, x) for x in (1, 2, 4, 8)] == pytest.approx([1, 2, 4, 4], rel=1e-3)
    assert machine.peak_speedup == pytest.approx(4, rel=1e-3)
    assert read(machine.shuffle_speedup, 8) == pytest.approx(8, rel=1e-3)
    assert read(machine.shuffle_speedup, 32) == pytest.approx(8, rel=1e-3)


def test_state_costs_a_latency_and_its_bytes(machine):
    assert [read(machine.load_bandwidth, share) for share in (0.5, 1.0)] == pytest.approx([8, 4], rel=1e-3)
    assert (machine.cluster_handoff, machine.cluster_bandwidth) == pytest.approx((200, 8), rel=1e-3)
    assert [read(machine.grid_handoff, ctas) for ctas in (12, 100)] == pytest.approx([600, 600])
    assert [read(machine.grid_bandwidth, ctas) for ctas in (12, 100)] == pytest.approx([8, 4])


def test_shared_memory_serves_eight_threads_at_once(machine):
    assert [read(machine.shared_load, lanes) for lanes in (1, 8, 32)] == pytest.approx([0.5, 0.5, 2.0], rel=1e-3)


def test_a_measured_machine_can_be_kept(machine):
    assert from_json(machine.to_json()) == machine


def test_old_devices_are_asked_for_no_tensor_cores_and_no_clusters():
    asked = set()

    def launch(point, iterations):
        asked.add(point.kernel)
        return LAUNCH + iterations * one_iteration(point)

    old = fit(launch, "old", 75, ((1.0, 100.0),))
    assert (old.tensor_rate, old.cluster_handoff) == (0, 0)
    assert all(f" {name}(" in microbenchmark.source(75) for name in asked)
    assert "tensor" not in microbenchmark.source(75)
    assert "cluster" not in microbenchmark.source(75)


class FakeDriver(Driver):
    """A device that has no clusters beyond a size, and keeps what is launched."""

    def __init__(self, largest: int) -> None:
        super().__init__()
        self.largest, self.shared = largest, 0
        self.launched: list[tuple[Any, ...]] = []

    def cuModuleLoadData(self, image: bytes) -> tuple[int, Any]:  # noqa: N802
        return 0, image

    def cuModuleGetFunction(self, module: Any, name: bytes) -> tuple[int, Any]:  # noqa: N802
        return 0, name.decode()

    def cuFuncSetAttribute(self, kernel: str, name: str, value: int) -> tuple[int]:  # noqa: N802
        self.shared = value if "SHARED" in name else self.shared
        return (0,)

    def cuOccupancyMaxActiveClusters(self, kernel: str, config: Any) -> tuple[Any, ...]:  # noqa: N802
        size = config.attrs[0].value.clusterDim.x
        assert config.sharedMemBytes in (0, self.shared)
        return ("invalid cluster size",) if size > self.largest else (0, 24 // size)

    def cuLaunchKernelEx(self, config: Any, kernel: str, parameters: int, extra: int) -> tuple[Any]:  # noqa: N802
        places = (ctypes.c_void_p * 3).from_address(parameters)
        types = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
        values = [kind.from_address(place).value for kind, place in zip(types, places, strict=True)]
        (attribute,) = config.attrs
        together = attribute.value.cooperative or attribute.value.clusterDim.x
        self.launched.append((kernel, config.gridDimX, config.blockDimX, together, *values))
        return (0,)


def bench_of(driver: FakeDriver, arch: int = 90) -> microbenchmark.TimedKernels:
    device = SimpleNamespace(
        arch=arch, processors=24, stream=0, driver=driver, allocate=lambda size: 4096, fill=lambda *_: None,
        elapsed=lambda enqueue: enqueue() or 0.5,
    )  # fmt: skip
    return microbenchmark.TimedKernels(cast(DeviceContext, device), b"code")


@pytest.mark.parametrize(("arch", "largest"), [(90, 16), (120, 8)])
def test_clusters_are_counted_as_far_as_a_device_has_them(arch: int, largest: int) -> None:
    driver = FakeDriver(largest)
    sizes = (1, 2, 4, 8, 16)
    assert bench_of(driver, arch).clusters() == tuple((size, 24 // size) for size in sizes if size <= largest)
    cta = driver.shared + microbenchmark.STATIC_SHARED  # one fits, two do not
    assert cta <= shared_memory(arch) < 2 * cta


def test_a_launch_passes_every_argument() -> None:
    driver = FakeDriver(16)
    bench = bench_of(driver)
    assert bench(Point("grid_exchange", 256, 24, size=1024), 32) == 0.5e6
    bench(Point("cluster_exchange", 128, 8, cluster=4, size=256), 7)
    assert driver.launched == [
        ("grid_exchange", 24, 256, 1, 4096, 32, 1024),
        ("cluster_exchange", 8, 128, 4, 4096, 7, 256),
    ]


@pytest.mark.parametrize(
    ("field", "wrong"),
    [(field, wrong) for field in ("fma", "arch", "name") for wrong in (None, [], math.nan, math.inf, True)]
    + [("shared_load", wrong) for wrong in (None, [], 3, [1, 2], [[1]], [[1, "2"]], [[2, 1], [1, 1]], [[0, 1]])]
    + [("grid_handoff", [[1, math.nan]]), ("arch", "90"), ("arch", 90.0), ("multiprocessors", -1)],
)
def test_a_description_with_something_else_in_it_is_refused(field: str, wrong: Any) -> None:
    values = machine_of("unit").to_json()
    assert from_json(values) == machine_of("unit")
    with pytest.raises(KernelError, match=f"{field}.*measure the machine again"):
        from_json({**values, field: wrong})


def test_a_name_ends_where_the_driver_ends_it() -> None:
    assert DeviceContext(driver=Driver()).name == "CPU"

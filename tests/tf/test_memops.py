"""The MemOps on the CPU: data, order, memory, threads, bad input and faults."""

import gc
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from custom_ops import reference
from custom_ops.errors import OpLibraryError
from custom_ops.load import Counters, Library, find_library, load

MIB = 1 << 20


@pytest.fixture(name="library")
def fixture_library() -> Iterator[Library]:
    library = load()
    library.trim()
    library.reset_counters()
    yield library
    for kind in ("copy_out", "copy_in", "allocate"):
        library.inject_fault(kind, times=0)
    library.trim()


def round_trip(library: Library, tensor: tf.Tensor, **attributes: object) -> tf.Tensor:
    """Out, released, and back: in this order."""
    handle = library.offload(tensor, **attributes)
    released = library.release(tensor, handle)
    # In a graph an Operation; within a tf.function, automatic control dependencies would do.
    with tf.control_dependencies([] if released is None else [released]):
        fetched = library.prefetch(handle, tensor.dtype, tensor.shape)
    return library.await_(fetched, handle)


def settled(library: Library) -> Counters:
    """The counters, once the I/O threads have let go of the last step."""
    for _ in range(200):
        counters = library.counters()
        if counters.live_tickets == 0 and counters.spill_bytes_in_use == 0:
            break
        time.sleep(0.01)
    return counters


def values(dtype: tf.DType, shape: tuple[int, ...]) -> tf.Tensor:
    """All kinds of bit patterns that are values of `dtype`, special ones included."""
    generator = np.random.default_rng(7)
    if dtype == tf.bool:
        return tf.constant(generator.integers(0, 2, shape).astype(bool))
    if dtype.is_floating or dtype.is_complex or dtype.size > 1:
        raw = generator.integers(0, 256, (*shape, dtype.size), np.uint8)
        return tf.constant(raw.reshape(-1).view(dtype.as_numpy_dtype).reshape(shape), dtype)
    return tf.cast(tf.constant(generator.integers(0, 7, shape)), dtype)


DTYPES = [
    tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.dtypes.experimental.float8_e4m3fn,
    tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64,
    tf.bool, tf.complex64, tf.complex128,
]  # fmt: skip
SHAPES = [(), (0,), (3, 0, 5), (1,), (7,), (3, 5, 7), (1023, 513)]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_round_trip_keeps_every_bit(library: Library, dtype: tf.DType) -> None:
    function = tf.function(lambda tensor: round_trip(library, tensor))
    for shape in SHAPES:
        tensor = values(dtype, shape)
        ticket = reference.offload(tensor.numpy())
        expected = reference.await_(reference.prefetch(ticket), ticket)
        result = function(tensor)
        assert result.dtype == dtype
        assert result.shape == expected.shape
        assert result.numpy().tobytes() == expected.tobytes()


def test_round_trip_keeps_nan_payloads_and_infinities(library: Library) -> None:
    bits = np.array([0x7FC00001, 0x7F800001, 0xFFC12345, 0x7F800000, 0xFF800000, 1], np.uint32)
    result = tf.function(lambda tensor: round_trip(library, tensor))(bits.view(np.float32))
    assert np.array_equal(result.numpy().view(np.uint32), bits)


def test_round_trip_in_eager_mode_and_of_unknown_shape(library: Library) -> None:
    tensor = tf.random.normal([33, 65])
    assert np.array_equal(round_trip(library, tensor), tensor)
    signature = [tf.TensorSpec([None, None], tf.float32)]
    function = tf.function(lambda tensor: round_trip(library, tensor), input_signature=signature)
    assert np.array_equal(function(tensor), tensor)


def test_one_ticket_can_be_prefetched_several_times(library: Library) -> None:
    @tf.function
    def function(tensor: tf.Tensor) -> list[tf.Tensor]:
        handle = library.offload(tensor)
        library.release(tensor, handle)
        fetched = [library.prefetch(handle, tensor.dtype, tensor.shape) for _ in range(3)]
        return [library.await_(tensor, handle) for tensor in fetched]

    tensor = tf.random.normal([100, 1000])
    for result in function(tensor):
        assert np.array_equal(result, tensor)
    assert settled(library).bytes_in == 3 * 4 * 100 * 1000


def test_works_in_a_session(library: Library) -> None:
    graph = tf.Graph()
    with graph.as_default():
        tensor = tf.random.stateless_normal([300, 300], [1, 2])
        result = round_trip(library, tensor)
        # Nothing uses its handle: a session runs it when it is asked for it.
        alone = library.offload(tensor)
    with tf.compat.v1.Session(graph=graph) as session:
        before, after = session.run([tensor, result])
        session.run(alone.op)
    assert np.array_equal(before, after)
    assert settled(library).live_tickets == 0


def test_counters_and_probes(library: Library) -> None:
    @tf.function
    def function(tensor: tf.Tensor) -> tf.Tensor:
        library.probe(run=3, index=0)
        result = round_trip(library, tensor)
        with tf.control_dependencies([result]):
            library.probe(run=3, index=1)
        return result

    library.clear_probes()
    function(tf.zeros([MIB // 4]))
    counters = settled(library)
    assert (counters.offloads, counters.prefetches) == (1, 1)
    assert (counters.bytes_out, counters.bytes_in) == (MIB, MIB)
    assert counters.stall_ns > 0
    assert counters.spill_bytes_allocated == MIB
    assert (counters.open_spill_files, counters.open_events, counters.open_streams) == (1, 0, 0)
    rows = library.probes(3)
    assert [row.index for row in rows] == [0, 1]
    assert rows[0].host_ns <= rows[1].host_ns
    assert [row.device_ns for row in rows] == [-1, -1]
    library.clear_probes(3)
    assert library.probes(3) == []
    library.reset_counters()
    library.trim()
    assert library.counters() == Counters(*[0] * len(Counters._fields))


# --- memory ---------------------------------------------------------------------------------


def counts_memory(library: Library) -> bool:
    return int(library.stats()[0]) >= 0


def test_rooms_are_behind_walls_and_fillings_take_what_they_say(library: Library) -> None:
    walls = library.rooms([256, 4096])
    assert [wall.shape for wall in walls] == [(1,), (1,)]
    assert library.ops.mem_op_fill(bytes=1000).shape == (1000,)
    with pytest.raises(tf.errors.InvalidArgumentError, match="count"):
        library.ops.mem_op_rooms(sizes=[256], count=2)
    chunks = library.chunks().numpy()
    assert chunks.shape[1] == 3  # no rows, but where TensorFlow's CPU allocator is of a GPU's kind


def test_stats_follow_the_allocator(library: Library) -> None:
    """TensorFlow's CPU allocator counts blocks from 256 KiB on, if oneDNN is on; else nothing."""
    if not counts_memory(library):
        assert library.stats().numpy().tolist() == [-1, -1, -1]
        pytest.skip("this TensorFlow's CPU allocator keeps no statistics (oneDNN is off)")
    model = reference.Allocator(limit=int(library.stats(reset=True)[2]))
    model.allocate(int(library.stats()[0]))
    block = tf.fill([MIB], 1.0)  # 4 MiB
    model.allocate(4 * MIB)
    assert library.stats(reset=True).numpy().tolist() == model.stats(reset=True).tolist()
    del block
    model.allocate(-4 * MIB)
    assert library.stats(reset=True).numpy().tolist() == model.stats(reset=True).tolist()
    assert library.stats(reset=True).numpy().tolist() == model.stats(reset=True).tolist()


def test_spilling_lowers_the_peak(library: Library) -> None:
    """A tensor waits, unused, while a larger one comes and goes: the peak falls by its size."""
    if not counts_memory(library):
        pytest.skip("this TensorFlow's CPU allocator keeps no statistics (oneDNN is off)")
    size = 16 * MIB // 4  # 16 MiB

    def run(spill: bool) -> tuple[float, int]:
        @tf.function
        def function(seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            start = library.stats(reset=True)
            with tf.control_dependencies([start]):
                first = tf.random.stateless_uniform([size], seed)
            handle = library.offload(first) if spill else None
            used = tf.reduce_sum(first)
            before = [used]
            if spill:
                with tf.control_dependencies([used]):
                    before = [library.release(first, handle)]
            with tf.control_dependencies(before):
                second = tf.random.stateless_uniform([2 * size], seed)
            middle = tf.reduce_sum(second)
            if spill:
                with tf.control_dependencies([middle]):
                    fetched = library.prefetch(handle, first.dtype, first.shape)
                first = library.await_(fetched, handle)
            with tf.control_dependencies([middle]):
                last = tf.reduce_max(first)
            with tf.control_dependencies([last]):
                end = library.stats()
            return used + middle + last, end[1] - start[0]

        seed = tf.constant([1, 2])
        function(seed)
        total, peak = function(seed)
        return float(total), int(peak)

    kept, kept_peak = run(spill=False)
    spilled, spilled_peak = run(spill=True)
    assert kept == spilled
    assert kept_peak == 48 * MIB
    assert spilled_peak == 32 * MIB


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_thousand_steps_leak_nothing(library: Library, tmp_path: Path) -> None:
    @tf.function
    def function(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return [round_trip(library, t, spill_directory=str(tmp_path)) for t in tensors]

    tensors = [tf.random.normal([size]) for size in (16384, 16384, 40000)]
    for _ in range(20):
        function(tensors)
    settled(library)
    gc.collect()
    files, memory = open_files(), resident_bytes()
    for _ in range(1000):
        results = function(tensors)
    del results
    counters = settled(library)
    gc.collect()
    assert counters.offloads == counters.prefetches == 3 * 1020
    assert counters.live_tickets == counters.spill_bytes_in_use == 0
    # The pool never holds more than what one step needs at once.
    assert counters.spill_bytes_allocated <= 4 * (16384 + 16384 + 40000)
    assert counters.open_spill_files <= 3
    assert open_files() <= files + 3
    assert resident_bytes() < memory + 8 * MIB
    assert list(tmp_path.iterdir()) == []  # unlinked at once: a crash would leave nothing
    library.trim()
    assert library.counters().spill_bytes_allocated == library.counters().open_spill_files == 0


# --- threads --------------------------------------------------------------------------------


def test_two_threads_and_two_functions_at_once(library: Library) -> None:
    one = tf.function(lambda tensor: round_trip(library, tensor) + 1.0)
    other = tf.function(lambda tensor: round_trip(library, tensor) * 2.0)
    failures: list[str] = []

    def work(function: Callable, expected: Callable, seed: int) -> None:
        generator = np.random.default_rng(seed)
        for _ in range(50):
            tensor = generator.normal(size=(50, int(generator.integers(1, 4)))).astype(np.float32)
            if not np.array_equal(function(tensor), expected(tensor)):
                failures.append(function.__name__)

    jobs = [
        (one, lambda tensor: tensor + np.float32(1), 0),
        (one, lambda tensor: tensor + np.float32(1), 1),
        (other, lambda tensor: tensor * np.float32(2), 2),
    ]
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    counters = settled(library)
    assert (counters.offloads, counters.live_tickets) == (150, 0)


# --- bad input ------------------------------------------------------------------------------


def test_strings_are_refused_while_the_graph_is_built(library: Library) -> None:
    with tf.Graph().as_default(), pytest.raises(ValueError, match="fixed-size types, got string"):
        library.offload(tf.constant(["a"]))


@pytest.mark.parametrize("mechanism", ["copy", "managed"])
def test_gpu_mechanisms_are_refused_on_the_cpu(library: Library, mechanism: str) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="needs a GPU; on the CPU use"):
        library.offload(tf.zeros([3]), mechanism=mechanism)


def test_wrong_handles_types_and_tensors_are_refused(library: Library) -> None:
    tensor = tf.zeros([2, 3])
    handle = library.offload(tensor, label="activation:0")
    invalid = tf.errors.InvalidArgumentError
    with pytest.raises(invalid, match=r"'activation:0' was offloaded as float.*prefetched as int32"):
        library.prefetch(handle, tf.int32, tensor.shape)
    with pytest.raises(invalid, match=r"offloaded as float\[2,3\], but is prefetched as float\[7"):
        library.prefetch(handle, tensor.dtype, [7])
    with pytest.raises(invalid, match="not one that was prefetched from 'activation:0'"):
        library.await_(tensor, handle)
    not_a_handle = tf.raw_ops.EmptyTensorList(element_shape=[-1], max_num_elements=1, element_dtype=tf.float32)
    with pytest.raises(invalid, match="expected the output of a MemOpOffload"):
        library.release(tensor, not_a_handle)


def test_spill_budget(library: Library) -> None:
    function = tf.function(lambda tensor: round_trip(library, tensor, label="big:0", spill_budget=MIB))
    exhausted = tf.errors.ResourceExhaustedError
    with pytest.raises(exhausted, match=f"'big:0' needs {MIB + 4} bytes, but 0 of the {MIB}"):
        function(tf.zeros([MIB // 4 + 1]))
    # An idle file of another size makes room, as often as it must.
    for size in (MIB // 4, MIB // 8, MIB // 4):
        tensor = tf.random.normal([size])
        assert np.array_equal(function(tensor), tensor)
        assert settled(library).spill_bytes_allocated <= MIB
    assert settled(library).live_tickets == 0


def spill_to(library: Library, directory: Path, size: int = 1024) -> None:
    tensor = tf.zeros([size], tf.uint8)
    tf.function(lambda: round_trip(library, tensor, spill_directory=str(directory), label="t:0"))()


def test_missing_spill_directory(library: Library, tmp_path: Path) -> None:
    with pytest.raises(tf.errors.NotFoundError, match=r"nowhere': No such file.*create it"):
        spill_to(library, tmp_path / "nowhere")
    assert settled(library).spill_bytes_allocated == 0


@pytest.fixture(name="mount")
def fixture_mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tiny file system; skips where that is not allowed."""

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(tmp_path)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("needs the right to mount a file system")
        return tmp_path

    yield mount
    load().trim()  # idle spill files keep the file system busy
    subprocess.run(["umount", str(tmp_path)], capture_output=True, check=False)


def test_read_only_spill_directory(library: Library, mount: Callable[[str], Path]) -> None:
    with pytest.raises(tf.errors.PermissionDeniedError, match="Read-only file system; set spill"):
        spill_to(library, mount("size=1m,ro"))


def test_unwritable_spill_directory(library: Library, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere; see test_read_only_spill_directory")
    tmp_path.chmod(0o500)
    with pytest.raises(tf.errors.PermissionDeniedError, match="Permission denied; set spill"):
        spill_to(library, tmp_path)


def test_full_spill_directory(library: Library, mount: Callable[[str], Path]) -> None:
    directory = mount("size=1m")
    message = f"is full: 't:0' needs {2 * MIB} bytes, {MIB} are free"
    with pytest.raises(tf.errors.ResourceExhaustedError, match=message):
        spill_to(library, directory, 2 * MIB)
    counters = settled(library)
    assert (counters.spill_bytes_allocated, counters.open_spill_files) == (0, 0)
    spill_to(library, directory, MIB // 2)  # what fits, fits


def test_limited_file_size(library: Library, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(tf.errors.ResourceExhaustedError, match="raise the limit on the size"):
            spill_to(library, tmp_path, 2 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert settled(library).spill_bytes_allocated == 0


def test_no_library_for_another_tensorflow(tmp_path: Path) -> None:
    (tmp_path / "_tfmem_ops.tf2.21.so").touch()
    with pytest.raises(OpLibraryError) as caught:
        find_library("2.18.1", tmp_path)
    for part in ("TensorFlow 2.18.1", "found: _tfmem_ops.tf2.21.so", "--no-build-isolation"):
        assert part in str(caught.value)
    assert find_library("2.21.0-rc1", tmp_path).name == "_tfmem_ops.tf2.21.so"


def test_a_library_that_does_not_load(tmp_path: Path) -> None:
    """In a process of its own, which takes the wrong file for its library."""
    program = f"""
import pathlib, tensorflow as tf
from custom_ops import load
from custom_ops.errors import OpLibraryError
path = pathlib.Path({str(tmp_path)!r}, "_tfmem_ops.so")
path.write_bytes(b"not a library")
load.find_library = lambda version: path
try:
    load.load()
except OpLibraryError as error:
    assert tf.__version__ in str(error) and "--no-build-isolation" in str(error), error
else:
    raise SystemExit("loaded")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_bandwidth(library: Library, tmp_path: Path) -> None:
    bandwidth = library.spill_bandwidth(str(tmp_path), MIB)
    assert bandwidth.write > 0
    assert bandwidth.read > 0
    with pytest.raises(OpLibraryError, match="nowhere': No such file"):
        library.spill_bandwidth(str(tmp_path / "nowhere"))


# --- faults ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["copy_out", "copy_in", "allocate"])
def test_a_fault_fails_one_step(library: Library, kind: str) -> None:
    function = tf.function(lambda tensor: round_trip(library, tensor, label="conv1:0"))
    tensor = tf.random.normal([1000])
    library.inject_fault(kind, times=1)
    with pytest.raises(tf.errors.InternalError, match=f"injected fault: {kind} of 'conv1:0'"):
        function(tensor)
    assert settled(library).live_tickets == 0
    assert np.array_equal(function(tensor), tensor)
    counters = settled(library)
    assert (counters.live_tickets, counters.spill_bytes_in_use) == (0, 0)


def test_a_fault_can_come_late(library: Library) -> None:
    function = tf.function(lambda tensor: round_trip(library, tensor))
    tensor = tf.zeros([10])
    library.inject_fault("copy_in", after=2, times=1)
    function(tensor)
    function(tensor)
    with pytest.raises(tf.errors.InternalError, match="copy_in"):
        function(tensor)
    function(tensor)


@pytest.mark.parametrize("point", ["offloaded", "released", "prefetched"])
def test_an_aborted_step_leaves_nothing(library: Library, point: str) -> None:
    @tf.function
    def function(tensor: tf.Tensor, limit: tf.Tensor) -> tf.Tensor:
        def check(here: str, after: tf.Tensor | tf.Operation) -> list[tf.Operation]:
            if here != point:
                return []
            with tf.control_dependencies([after]):
                return [tf.debugging.assert_less(tf.reduce_max(tensor), limit)]

        handle = library.offload(tensor)
        with tf.control_dependencies(check("offloaded", handle)):
            released = library.release(tensor, handle)
        with tf.control_dependencies(check("released", released)):
            fetched = library.prefetch(handle, tensor.dtype, tensor.shape)
        with tf.control_dependencies(check("prefetched", fetched)):
            return library.await_(fetched, handle)

    tensor = tf.random.uniform([4 * MIB])
    function(tensor, 2.0)
    in_use = int(library.stats()[0])
    for _ in range(5):
        with pytest.raises(tf.errors.InvalidArgumentError, match="assertion failed"):
            function(tensor, 0.0)
    counters = settled(library)
    assert (counters.live_tickets, counters.spill_bytes_in_use) == (0, 0)
    assert counters.open_spill_files <= 2
    assert int(library.stats()[0]) == in_use
    assert np.array_equal(function(tensor, 2.0), tensor)

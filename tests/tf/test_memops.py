"""The MemOps on the CPU: data, order, memory and threads."""

import gc
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from custom_ops.load import Counters, Library, load
from tests import memops, memory_reference
from tests.tf.memop_trips import MIB, round_trip, settled
from tests.tf.optimized_runs import in_a_process


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_round_trip_keeps_every_bit(library: Library, dtype: tf.DType) -> None:
    function = tf.function(lambda tensor: round_trip(library, tensor))
    for shape in SHAPES:
        tensor = values(dtype, shape)
        ticket = memory_reference.offload(tensor.numpy())
        expected = memory_reference.await_(memory_reference.prefetch(ticket), ticket)
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
        handle = memops.offload(library, tensor)
        memops.release(library, tensor, handle)
        fetched = [memops.prefetch(library, handle, tensor.dtype, tensor.shape) for _ in range(3)]
        return [memops.await_(library, tensor, handle) for tensor in fetched]

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
        alone = memops.offload(library, tensor)
    with tf.compat.v1.Session(graph=graph) as session:
        before, after = session.run([tensor, result])
        session.run(alone.op)
    assert np.array_equal(before, after)
    assert settled(library).live_tickets == 0


def test_counters_and_probes(library: Library) -> None:
    @tf.function
    def function(tensor: tf.Tensor) -> tf.Tensor:
        memops.probe(library, run=3, index=0)
        result = round_trip(library, tensor)
        with tf.control_dependencies([result]):
            memops.probe(library, run=3, index=1)
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


def test_reserved_chunks_are_behind_guards_and_padding_take_what_they_say(library: Library) -> None:
    guards = library.reserve([256, 4096])
    assert [guard.shape for guard in guards] == [(1,), (1,)]
    assert library.ops.mem_op_fill(bytes=1000).shape == (1000,)
    with pytest.raises(tf.errors.InvalidArgumentError, match="count"):
        library.ops.mem_op_reserve(sizes=[256], count=2)
    chunks, growth = library.chunks()
    assert chunks.shape[1] == 3  # no rows, but where TensorFlow's CPU allocator is of a GPU's kind
    assert growth.shape == ()


def test_sharing_tells_of_no_address(library: Library) -> None:
    one, other = tf.ones([1000]), tf.ones([1000])
    assert library.sharing([one, other, tf.identity(one), other, tf.zeros([0])]).numpy().tolist() == [0, 1, 0, 1, 4]
    assert not hasattr(library.ops, "mem_op_addresses")


def stats_around_a_block() -> list[list[int]]:
    """The allocator's numbers before a block of 4 MiB, while it lives, after it, and once more."""
    library = tfmem.load_ops()
    library.stats(reset=True)
    read = [library.stats().numpy().tolist()]
    block = tf.fill([MIB], 1.0)  # 4 MiB
    read.append(library.stats(reset=True).numpy().tolist())
    del block
    return [*read, *(library.stats(reset=True).numpy().tolist() for _ in range(2))]


def test_stats_follow_the_allocator(library: Library) -> None:
    """TensorFlow's CPU allocator counts blocks from 256 KiB on, if oneDNN is on; else nothing.

    In a separate process: what other tests left running here allocates at any time.
    """
    if not counts_memory(library):
        assert library.stats().numpy().tolist() == [-1, -1, -1]
        pytest.skip("this TensorFlow's CPU allocator keeps no statistics (oneDNN is off)")
    before, *after = in_a_process(stats_around_a_block)
    model = memory_reference.Allocator(limit=before[2])
    model.allocate(before[0])
    model.allocate(4 * MIB)
    assert after[0] == model.stats(reset=True).tolist()
    model.allocate(-4 * MIB)
    assert after[1:] == [model.stats(reset=True).tolist() for _ in range(2)]


def peaks_of_a_tensor_that_waits() -> list[tuple[float, int]]:
    """What a function computes and its peak, where a tensor waits in memory, and where it waits elsewhere."""
    library = tfmem.load_ops()
    size = 16 * MIB // 4  # 16 MiB

    def run(spill: bool) -> tuple[float, int]:
        @tf.function
        def function(seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            start = library.stats(reset=True)
            with tf.control_dependencies([start]):
                first = tf.random.stateless_uniform([size], seed)
            handle = memops.offload(library, first) if spill else None
            used = tf.reduce_sum(first)
            before = [used]
            if spill:
                with tf.control_dependencies([used]):
                    before = [memops.release(library, first, handle)]
            with tf.control_dependencies(before):
                second = tf.random.stateless_uniform([2 * size], seed)
            middle = tf.reduce_sum(second)
            if spill:
                with tf.control_dependencies([middle]):
                    fetched = memops.prefetch(library, handle, first.dtype, first.shape)
                first = memops.await_(library, fetched, handle)
            with tf.control_dependencies([middle]):
                last = tf.reduce_max(first)
            with tf.control_dependencies([last]):
                end = library.stats()
            return used + middle + last, end[1] - start[0]

        seed = tf.constant([1, 2])
        function(seed)
        total, peak = function(seed)
        return float(total), int(peak)

    return [run(spill=False), run(spill=True)]


def test_spilling_lowers_the_peak(library: Library) -> None:
    """A tensor waits, unused, while a larger one comes and goes: the peak falls by its size.

    In a separate process: the allocator counts whole chunks, whose sizes depend on what ran before.
    """
    if not counts_memory(library):
        pytest.skip("this TensorFlow's CPU allocator keeps no statistics (oneDNN is off)")
    (kept, kept_peak), (spilled, spilled_peak) = in_a_process(peaks_of_a_tensor_that_waits)
    assert kept == spilled
    assert kept_peak == 48 * MIB
    assert spilled_peak == 32 * MIB


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_thousand_steps_leak_nothing(tmp_path: Path) -> None:
    """In a separate process: what other tests left running here opens files and takes memory at any time."""
    in_a_process(a_thousand_steps, tmp_path)


def a_thousand_steps(tmp_path: Path) -> None:
    library = load()

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

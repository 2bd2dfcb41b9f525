"""The MemOps on the CPU: bad input and faults."""

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.errors import OpLibraryError
from custom_ops.load import Library, find_library, load
from tests import memops
from tests.tf.memop_trips import MIB, round_trip, settled
from tests.tf.optimized_runs import in_a_process
from tests.tf.python_server import run_python

# --- bad input ------------------------------------------------------------------------------


def test_strings_are_refused_while_the_graph_is_built(library: Library) -> None:
    with tf.Graph().as_default(), pytest.raises(ValueError, match="fixed-size types, got string"):
        memops.offload(library, tf.constant(["a"]))


STRANGE = {
    "string": lambda: tf.constant([["a"] * 100]),
    "resource": lambda: tf.Variable(1.0).handle,
    "variant": lambda: tf.raw_ops.EmptyTensorList(element_shape=-1, max_num_elements=-1, element_dtype=tf.float32),
}


@pytest.mark.parametrize("dtype", STRANGE)
def test_they_are_refused_eagerly_too(library: Library, dtype: str) -> None:
    """No shapes are inferred then."""
    tensor = STRANGE[dtype]()
    handle = memops.offload(library, tf.zeros([3]))
    refused = pytest.raises(tf.errors.InvalidArgumentError, match=f"fixed-size types, got {dtype}")
    with refused:
        memops.offload(library, tensor)
    with refused:
        memops.prefetch(library, handle, tensor.dtype)
    del handle  # it holds its ticket, for which tests wait
    assert settled(library).offloads == 1


@pytest.mark.parametrize("mechanism", ["copy", "managed"])
def test_gpu_mechanisms_are_refused_on_the_cpu(library: Library, mechanism: str) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="needs a GPU; on the CPU use"):
        memops.offload(library, tf.zeros([3]), mechanism=mechanism)


def test_wrong_handles_types_and_tensors_are_refused(library: Library) -> None:
    tensor = tf.zeros([2, 3])
    handle = memops.offload(library, tensor, label="activation:0")
    invalid = tf.errors.InvalidArgumentError
    with pytest.raises(invalid, match=r"'activation:0' was offloaded as float.*prefetched as int32"):
        memops.prefetch(library, handle, tf.int32, tensor.shape)
    with pytest.raises(invalid, match=r"offloaded as float\[2,3\], but is prefetched as float\[7"):
        memops.prefetch(library, handle, tensor.dtype, [7])
    with pytest.raises(invalid, match="not one that was prefetched from 'activation:0'"):
        memops.await_(library, tensor, handle)
    not_a_handle = tf.raw_ops.EmptyTensorList(element_shape=[-1], max_num_elements=1, element_dtype=tf.float32)
    with pytest.raises(invalid, match="expected the output of a MemOpOffload"):
        memops.release(library, tensor, not_a_handle)


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
        if subprocess.run(command, capture_output=True, check=False, timeout=20).returncode != 0:
            pytest.skip("needs the right to mount a file system")
        return tmp_path

    yield mount
    load().trim()  # idle spill files keep the file system busy
    subprocess.run(["umount", str(tmp_path)], capture_output=True, check=False, timeout=20)


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
    """In a separate process, which takes the wrong file for its library."""
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
    done = run_python(["-c", program])
    assert done.returncode == 0, done.stderr


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
def test_an_aborted_step_leaves_nothing(point: str) -> None:
    """In a separate process: what other tests left running here allocates at any time."""
    in_a_process(aborted_steps, point)


def aborted_steps(point: str) -> None:
    library = load()

    @tf.function
    def function(tensor: tf.Tensor, limit: tf.Tensor) -> tf.Tensor:
        def check(here: str, after: tf.Tensor | tf.Operation) -> list[tf.Operation]:
            if here != point:
                return []
            with tf.control_dependencies([after]):
                return [tf.debugging.assert_less(tf.reduce_max(tensor), limit)]

        handle = memops.offload(library, tensor)
        with tf.control_dependencies(check("offloaded", handle)):
            released = memops.release(library, tensor, handle)
        with tf.control_dependencies(check("released", released)):
            fetched = memops.prefetch(library, handle, tensor.dtype, tensor.shape)
        with tf.control_dependencies(check("prefetched", fetched)):
            return memops.await_(library, fetched, handle)

    tensor = tf.random.uniform([4 * MIB])
    function(tensor, 2.0)
    settled(library)  # until then the I/O threads have the file, and another step takes its own
    in_use = int(library.stats()[0])
    for _ in range(5):
        with pytest.raises(tf.errors.InvalidArgumentError, match="assertion failed"):
            function(tensor, 0.0)
        counters = settled(library)
        assert (counters.live_tickets, counters.spill_bytes_in_use, counters.open_spill_files) == (0, 0, 1)
    assert int(library.stats()[0]) == in_use
    assert np.array_equal(function(tensor, 2.0), tensor)

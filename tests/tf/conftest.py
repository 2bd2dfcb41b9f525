"""A small convolutional net, its training steps, and what moved while they ran; the op library, counting from zero."""

from __future__ import annotations

import gc
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from custom_ops import build_flags
from custom_ops.load import Counters, Library, load
from graph_passes.analysis.memory.simulate import Link
from graph_passes.errors import InfeasibleBudgetError
from tests.tf import native_programs
from tests.tf.memop_trips import settled
from tfmem import api
from tfmem.steps import replicas

IMAGES = np.random.default_rng(0).normal(size=(16, 32, 32, 2)).astype("float32")
LABELS = np.arange(16) % 5
KIB = 1 << 10


class Net(NamedTuple):
    """Five convolutions, whose outputs take 512 KiB each.

    The CPU's allocator counts blocks of 256 KiB and more; everything else here is smaller, so that it cannot disturb.
    """

    variables: list[Any]
    loss: Callable[..., Any]

    def step(self, x: Any, y: Any) -> Any:
        """Gradient descent."""
        with tf.GradientTape() as tape:
            loss = self.loss(x, y)
        for variable, gradient in zip(self.variables, tape.gradient(loss, self.variables), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss


def make_net() -> Net:
    filters = [
        tf.Variable(tf.random.stateless_normal([3, 3, channels, 8], [place, 1], stddev=0.15))
        for place, channels in enumerate([2, 8, 8, 8, 8])
    ]
    biases = [tf.Variable(tf.zeros([8])) for _ in filters]
    variables = [*filters, *biases, tf.Variable(tf.random.stateless_normal([8, 5], [9, 9]))]

    def loss(x: Any, y: Any, values: Sequence[Any] | None = None) -> Any:
        values = values or variables
        for weights, bias in zip(values[:5], values[5:10], strict=True):
            x = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, weights, 1, "SAME"), bias))
        logits = tf.reduce_mean(x, [1, 2]) @ values[10]
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))

    return Net(variables, loss)


@pytest.fixture(scope="module", autouse=True)
def fixture_collected() -> None:
    """What an earlier file's steps left in cycles is freed: it would count towards the budgets of this file.

    What is left, nearly half a million objects of TensorFlow's modules, is left out of this file's collections, and of
    those of later files. To look at them took 0.4 s a file, and a third of the tests' time in collections of tests.
    """
    _wait_for_threads()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixture_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """All links have the same bandwidth, so that a plan depends on no disk's speed; see `test_links_together.py`."""
    for module in (api, replicas):
        monkeypatch.setattr(module, "links_together", lambda targets, *_: tuple(Link(1e9, 1e9) for _ in targets))


@pytest.fixture(autouse=True)
def fixture_waited() -> None:
    """No thread of an earlier test's steps still runs, which would take memory or give it back meanwhile."""
    if _wait_for_threads():
        gc.collect()


def _wait_for_threads() -> bool:
    """Whether there were any."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("tfmem ")]
    for thread in threads:
        thread.join(timeout=60)
    return bool(threads)


@pytest.fixture(name="new_net")
def fixture_new_net() -> Callable[[], Net]:
    """Makes the net, with the same weights each time."""
    return make_net


@pytest.fixture(name="batch")
def fixture_batch() -> tuple[tf.Tensor, tf.Tensor]:
    return tf.constant(IMAGES), tf.constant(LABELS)


class Flow:
    """What the op library moved since this was made."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.start = library.counters()

    @property
    def moved(self) -> int:
        """Bytes that left and came back."""
        now: Counters = self.library.counters()
        return min(now.bytes_out - self.start.bytes_out, now.bytes_in - self.start.bytes_in)


@pytest.fixture(name="flow")
def fixture_flow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Flow]:
    """Counts what moves; no profile of another test or of the user is read or written."""
    monkeypatch.setenv("TFMEM_CACHE_DIR", "")
    gc.collect()  # tensors of earlier tests would count as memory in use, until Python gets to them
    library = load()
    settled(library)  # an earlier test's I/O thread may still hold a tensor
    yield Flow(library)
    for kind in ("copy_out", "copy_in", "allocate"):
        library.inject_fault(kind, times=0)
    library.trim()


@pytest.fixture(name="library")
def fixture_library() -> Iterator[Library]:
    library = load()
    settled(library)  # a file that an earlier test's I/O thread still holds would not be closed
    library.trim()
    library.reset_counters()
    yield library
    for kind in ("copy_out", "copy_in", "allocate"):
        library.inject_fault(kind, times=0)
    library.trim()


@pytest.fixture(name="smallest")
def fixture_smallest() -> Callable[[Callable[[int], Any]], int]:
    return smallest_budget


def smallest_budget(run_within: Callable[[int], Any]) -> int:
    """Asks for the impossible: what the tensors alone need. Nothing runs.

    What the error calls the smallest budget is more: it has room for chunks that tensors do not fill.
    """
    gc.collect()  # what Python frees between this and the test's step would be room that the test did not mean
    with pytest.raises(InfeasibleBudgetError) as caught:
        run_within(1000)
    least = int(caught.value.least)
    del caught  # its traceback holds the step that was refused, and so its variables
    gc.collect()
    return least


@pytest.fixture(name="on_fake_driver")
def fixture_on_fake_driver() -> Callable[[str], None]:
    """Runs a C++ program of this folder that calls the op library, on the fake CUDA driver."""
    if shutil.which(build_flags.compiler()) is None:
        pytest.skip("needs a C++ compiler")

    def run(program: str) -> None:
        binary = native_programs.build(program)
        environment = native_programs.environment()
        result = subprocess.run(
            [str(binary)], env=environment, capture_output=True, text=True, check=False, timeout=280
        )
        assert result.returncode == 0, result.stdout + result.stderr

    return run

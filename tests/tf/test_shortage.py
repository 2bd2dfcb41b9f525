"""Only a lack of memory makes a step run again under another plan; what a user's code raises is the user's."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tfmem
from tfmem.runtime.measured_call import Meter
from tfmem.runtime.out_of_memory import lacks_memory

SPARE = 256 << 10
SCRATCH = "CUDNN failed to allocate the scratch space for the runner or to find a working no-scratch runner."
ERRORS = tf.errors
SHORTAGES = {
    "allocator": (ERRORS.ResourceExhaustedError, "OOM when allocating tensor with shape[9] and type float on GPU:0"),
    "scratch": (ERRORS.UnknownError, SCRATCH),
    "autotuning": (ERRORS.NotFoundError, "No algorithm worked!  Error messages:\n  Profiling failure on engine eng1{}"),
    "algorithm": (ERRORS.UnknownError, "Failed to get convolution algorithm. This is probably because cuDNN failed"),
    "no scratch": (ERRORS.InternalError, "No-scratch fallback runner requires nonzero scratch space"),
    "cuBLAS": (ERRORS.InternalError, "failed to create cublas handle: CUBLAS_STATUS_ALLOC_FAILED"),
    "driver": (ERRORS.ResourceExhaustedError, "cuMemHostAlloc failed: CUDA_ERROR_OUT_OF_MEMORY, out of memory"),
    "host": (ERRORS.ResourceExhaustedError, "host memory is exhausted: 'x:0' needs 9 pinned bytes, 3 are available"),
}


@pytest.mark.parametrize("name", SHORTAGES)
def test_what_speaks_of_memory(name):
    kind, message = SHORTAGES[name]
    assert lacks_memory(kind(None, None, f"Detected at node 'Conv2D' defined at ...\n\n{message}"))
    assert not lacks_memory(tf.errors.InvalidArgumentError(None, None, message))
    assert not lacks_memory(RuntimeError(message))


def raised(function, *args):
    with pytest.raises(ERRORS.OpError) as caught:
        tf.function(function)(*args)
    return caught.value


@pytest.mark.long  # TensorFlow waits ten seconds for memory
def test_what_tensorflow_itself_raises_without_memory():
    assert lacks_memory(raised(lambda n: tf.fill([n, n], 1.0), tf.constant(1 << 24)))


def test_what_tensorflow_itself_raises():
    missing = raised(lambda: tf.io.read_file("/nonexistent"))
    assert isinstance(missing, ERRORS.NotFoundError)
    assert not lacks_memory(missing)
    assert not lacks_memory(ERRORS.InternalError(None, None, "injected fault: allocate of 'x:0'"))
    assert not lacks_memory(ERRORS.ResourceExhaustedError(None, None, "the queue of the user is full"))


WHAT = [
    RuntimeError("broken"),
    MemoryError("out of memory"),
    tf.errors.NotFoundError(None, None, "No algorithm worked!"),
    tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor"),
]


@pytest.mark.parametrize("what", WHAT, ids=lambda what: type(what).__name__)
@pytest.mark.parametrize("wrap", [tf.py_function, tf.numpy_function])
def test_what_a_python_function_raises(what, wrap):
    def fail(value):
        raise what

    error = raised(lambda: wrap(fail, [1.0], tf.float32))
    assert isinstance(error, ERRORS.UnknownError | ERRORS.ResourceExhaustedError)
    assert not lacks_memory(error)


class Failing:
    """A step with a Python function that fails in one of its calls."""

    def __init__(self, net, call, what):
        self.net, self.call, self.what, self.calls = net, call, what, 0

    def __call__(self, x, y):
        def watch(value):
            self.calls += 1
            if self.calls == self.call:
                raise self.what
            return value

        return self.net.step(tf.reshape(tf.numpy_function(watch, [x], tf.float32), x.shape), y)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("what", [RuntimeError("broken"), MemoryError("broken")], ids=["unknown", "memory"])
def test_an_error_of_the_user_reaches_the_user(call, what, new_net, batch, flow, smallest):
    plain = tf.function(new_net().step)
    expected = [float(plain(*batch)) for _ in range(6)]
    least = smallest(lambda size: tfmem.optimize(tf.function(Failing(new_net(), 0, what)), memory_budget=size)(*batch))
    step = Failing(new_net(), call, what)
    function = tfmem.optimize(tf.function(step), memory_budget=least + SPARE)
    losses = [float(function(*batch)) for _ in range(call - 1)]
    with pytest.raises((ERRORS.UnknownError, ERRORS.ResourceExhaustedError), match="broken"):
        function(*batch)
    assert step.calls == call  # it was not run again
    losses += [float(function(*batch)) for _ in range(7 - call)]
    assert losses == expected
    report = tfmem.report(function)
    assert report.decision == "moved"
    assert not any("ran out of memory" in note for note in report.notes)


@pytest.mark.parametrize("name", ["allocator", "scratch", "autotuning"])
def test_a_step_without_memory_is_run_again_and_says_that_random_ops_drew(
    name, new_net, batch, flow, smallest, monkeypatch
):
    kind, message = SHORTAGES[name]

    def make():
        net = new_net()
        return tf.function(lambda x, y: (net.step(x, y), tf.random.normal([], seed=3)))

    plain = make()
    expected = [[float(value) for value in plain(*batch)] for _ in range(8)]
    budget = SPARE + smallest(lambda size: tfmem.optimize(make(), memory_budget=size)(*batch))
    sampled, calls = Meter.sampled, []

    def fail_second(*given):
        calls.append(given)
        if len(calls) == 3:  # before anything of the step has run
            raise kind(None, None, f"Detected at node 'Conv2D' defined at ...\n\n{message}")
        return sampled(*given)

    monkeypatch.setattr(Meter, "sampled", fail_second)
    function = tfmem.optimize(make(), memory_budget=budget)
    assert [[float(value) for value in function(*batch)] for _ in range(8)] == expected
    assert any(
        "ran out of memory at 'Conv2D'" in note and note.endswith("random ops that had run by then drew again")
        for note in tfmem.report(function).notes
    )

"""Steps whose regions run as on a GPU, on the fake driver: from `optimize` to launches. Run by test_fusion_gpu.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem
from custom_ops.errors import KernelError
from custom_ops.fusion.programs import FusionProgram
from custom_ops.fusion.region import Region
from tests.tf.fake_gpu import FakeGpu
from tests.tf.optimized_runs import in_a_process
from tests.tf.planned_on_fake_gpu import saved_stitched, served_without_a_gpu
from tests.tf.stitched_steps import Softmax, batch, close, optimized, require_stitched, stitched_ops, values
from tests.tf.test_fusion_bodies import MEMORY, Decoder, regions_in, updating

pytest_plugins = ("tests.tf.fake_gpu", "tests.tf.planned_on_fake_gpu")


class Attention:
    """A layer norm, attention and a tanh layer over sequences, trained with momentum."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.variables = [tf.Variable(rng.normal(size=(6, 6)).astype(np.float32) / 3) for _ in range(4)]
        self.momenta = [tf.Variable(tf.zeros((6, 6))) for _ in self.variables]
        self.step = tf.function(self.run, reduce_retracing=True)

    def run(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            mean = tf.reduce_mean(x, -1, keepdims=True)
            x = (x - mean) * tf.math.rsqrt(tf.reduce_mean((x - mean) ** 2, -1, keepdims=True) + 1e-3)
            query, key, value = (tf.einsum("bti,io->bto", x, kernel) for kernel in self.variables[:3])
            mixed = tf.matmul(tf.nn.softmax(tf.matmul(query, key, transpose_b=True)), value)
            loss = tf.reduce_mean(tf.tanh(tf.reshape(mixed, [-1, 6]) @ self.variables[3]) ** 2)
        for variable, momentum, gradient in zip(
            self.variables, self.momenta, tape.gradient(loss, self.variables), strict=True
        ):
            momentum.assign(0.9 * momentum + gradient)
            variable.assign_sub(0.1 * momentum)
        return loss


@pytest.mark.filterwarnings("error::tfmem.TfmemWarning")
def test_a_step_trains(gpu: FakeGpu, on_gpu: Callable[..., None]) -> None:
    on_gpu()
    plain, model = Softmax(), Softmax()
    step = optimized(model.step)
    launched = gpu.calls("cuGraphLaunch")
    for seed in range(5):
        close(step(*batch(seed)), plain.step(*batch(seed)))
    close(values(model.variables), values(plain.variables))
    require_stitched(step, "MatMul", "SoftmaxCrossEntropyWithLogits", "AssignSubVariableOp")
    assert gpu.calls("cuGraphLaunch") == launched + 5


@pytest.mark.filterwarnings("error::tfmem.TfmemWarning")
def test_dropout_drops_what_it_dropped(gpu: FakeGpu, on_gpu: Callable[..., None]) -> None:
    """Within a kernel, for batches whose size it does not know; the key and the counter are given."""
    on_gpu()
    signature = [tf.TensorSpec([None, 24]), tf.TensorSpec([2], tf.int32)]

    def run(x: Any, seed: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            dropped = tf.nn.experimental.stateless_dropout(tf.nn.softmax(x), 0.3, seed=seed)
        return dropped, tape.gradient(dropped, x)

    plain, step = (tf.function(run, input_signature=signature) for _ in range(2))
    step = optimized(step)
    launched = gpu.calls("cuGraphLaunch")
    for rows in (7, 32, 1):
        given = (
            tf.constant(np.random.default_rng(rows).normal(size=(rows, 24)).astype(np.float32)),
            tf.constant([rows, 1]),
        )
        results, expected = step(*given), plain(*given)
        close(results, expected)
        np.testing.assert_array_equal(results[0] == 0, expected[0] == 0)
    require_stitched(step, "StatelessRandomUniformV2", "SelectV2")
    assert gpu.calls("cuGraphLaunch") == launched + 3


@pytest.mark.filterwarnings("error::tfmem.TfmemWarning")
def test_dropout_layers_of_keras_are_one_region_with_their_seeds(gpu: FakeGpu, on_gpu: Callable[..., None]) -> None:
    on_gpu()

    def made() -> tuple[Any, Any]:
        keras.utils.set_random_seed(3)
        parts = [keras.layers.Dense(12, activation="tanh"), keras.layers.Dropout(0.5), keras.layers.Dropout(0.2)]
        model = keras.Sequential([keras.Input([6]), *parts])

        @tf.function
        def run(x: Any) -> Any:
            with tf.GradientTape() as tape:
                made = model(x, training=True)
                loss = tf.reduce_sum(made**2)
            return made, tape.gradient(loss, model.trainable_variables)

        return model, run

    (_, plain), (_, step) = made(), made()
    step, launched = optimized(step), gpu.calls("cuGraphLaunch")
    for seed in range(3):
        x = tf.constant(np.random.default_rng(seed).normal(size=(5, 6)).astype(np.float32))
        results, expected = step(x), plain(x)
        np.testing.assert_array_equal(results[0] == 0, expected[0] == 0)
        close(results, expected)
    report = require_stitched(step, "StatelessRandomUniform", "FloorMod", "AssignVariableOp")
    assert len(report.regions) == 1
    assert not [name for name, _ in report.not_stitched if "KeyCounter" in name]
    assert gpu.calls("cuGraphLaunch") == launched + 3


@pytest.mark.filterwarnings("error::tfmem.TfmemWarning")
def test_the_gradient_of_a_gather_divides_no_region(gpu: FakeGpu, on_gpu: Callable[..., None]) -> None:
    """A sum of segments with products before and behind it; rows that are taken twice, and such as are not taken."""
    on_gpu()
    rng = np.random.default_rng(0)
    kernel = tf.constant(rng.normal(size=(6, 8)).astype(np.float32))

    def run(x: Any, rows: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            hidden = tf.tanh(tf.matmul(x, kernel))
            loss = tf.reduce_sum(tf.exp(tf.matmul(tf.gather(hidden, rows + 1), kernel, transpose_b=True)))
        return loss, tape.gradient(loss, x)

    plain, step = tf.function(run), optimized(tf.function(run))
    launched = gpu.calls("cuGraphLaunch")
    for seed in range(3):
        x = tf.constant(rng.normal(size=(10, 6)).astype(np.float32) / 4)
        rows = tf.constant(np.random.default_rng(seed).integers(0, 8, 5).astype(np.int32))
        close(step(x, rows), plain(x, rows))
    report = require_stitched(step, "UnsortedSegmentSum", "MatMul")
    assert len(report.regions) == 1
    assert gpu.calls("cuGraphLaunch") == launched + 3


@pytest.mark.filterwarnings("error::tfmem.TfmemWarning")
def test_attention_trains_at_two_batch_sizes(gpu: FakeGpu, on_gpu: Callable[..., None]) -> None:
    on_gpu()
    plain, model = Attention(), Attention()
    step = optimized(model.step)
    launched = gpu.calls("cuGraphLaunch")
    for seed in range(6):
        x = np.random.default_rng(seed).normal(size=(2 + seed % 2, 5, 6)).astype(np.float32)
        np.testing.assert_allclose(step(tf.constant(x)), plain.step(tf.constant(x)), rtol=1e-4)
    for found, expected in zip(model.variables, plain.variables, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    ops = stitched_ops(tfmem.report(step))
    assert {"BatchMatMulV2", "Softmax", "AssignSubVariableOp"} <= set(ops), sorted(set(ops))
    assert gpu.calls("cuGraphLaunch") >= launched + 6


def test_without_a_compiler_the_step_runs_as_it_was(gpu: FakeGpu, on_gpu: Callable[..., None]) -> None:
    def missing(region: Region, place: str) -> Sequence[FusionProgram]:
        raise KernelError("NVRTC 12.9 rejects a kernel for 9.0:\nexpected a ';'")

    on_gpu(missing)
    plain, model = Softmax(), Softmax()
    launched = gpu.calls("cuGraphLaunch")
    step = optimized(model.step)
    with pytest.warns(
        tfmem.TfmemWarning, match=r"stays unchanged: there is no kernel .*: NVRTC 12\.9 rejects a kernel"
    ):
        found = step(*batch())
    close(found, plain.step(*batch()))
    close(values(model.variables), values(plain.variables))
    assert gpu.calls("cuGraphLaunch") == launched
    reasons = [why for _, why in tfmem.report(step).not_stitched]
    assert any("expected a ';'" in why for why in reasons)


def test_a_saved_model_keeps_the_kernels(gpu: FakeGpu, on_gpu: Callable[..., None], tmp_path: Any) -> None:
    on_gpu()
    model = tf.Module()
    model.w = tf.Variable(tf.ones((12, 5)))
    model.serve = tf.function(
        lambda x: tf.nn.softmax(tf.tanh(x @ model.w) * 2.0), input_signature=[tf.TensorSpec((None, 12))]
    )
    x = batch()[0]
    expected = model.serve(x)
    path = saved_stitched(model, tmp_path)
    launched = gpu.calls("cuGraphLaunch")
    served = tf.saved_model.load(path).signatures["serving_default"](x)
    np.testing.assert_allclose(next(iter(served.values())), expected, rtol=1e-5)
    assert gpu.calls("cuGraphLaunch") == launched + 1
    # in a process that has no GPU, not even a fake one, the same op runs on the CPU
    elsewhere = in_a_process(served_without_a_gpu, path, x.numpy())
    np.testing.assert_allclose(elsewhere, expected, rtol=1e-5)
    assert gpu.calls("cuGraphLaunch") == launched + 1


def test_int32_goes_into_regions(gpu: FakeGpu, on_gpu: Callable[..., None]) -> None:
    """Lengths make masks and say where to read, ids are looked up, and what is chosen is a result."""
    on_gpu()
    table = tf.Variable(np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32))

    @tf.function
    def step(ids: Any, lengths: Any) -> Any:
        items = tf.gather(table, ids)  # [batch, time, 4]
        mask = tf.range(5) < lengths[:, None]
        total = tf.reduce_sum(tf.where(mask[:, :, None], tf.tanh(items), 0.0), 1)
        last = tf.gather(tf.reshape(items, [-1, 4]), tf.range(3) * 5 + lengths - 1)
        return tf.nn.softmax(total + last), tf.argmax(total, -1, output_type=tf.int32) * 2

    given = tf.constant(np.arange(15).reshape(3, 5) % 20, tf.int32), tf.constant([5, 1, 3])
    stitched = optimized(step)
    close(stitched(*given), step(*given))
    require_stitched(stitched, "ResourceGather", "Less", "GatherV2", "Softmax")
    assert len(tfmem.report(stitched).regions) == 1


def test_heads_of_one_token_are_no_copy(gpu: FakeGpu, on_gpu: Callable[..., None]) -> None:
    on_gpu()

    @tf.function
    def step(x: Any, y: Any) -> Any:
        heads = tf.transpose(tf.reshape(x @ y, [3, 1, 2, 4]), [0, 2, 1, 3])
        return tf.matmul(heads, heads, transpose_b=True)

    x, y = tf.random.normal([3, 8]), tf.random.normal([8, 8])
    stitched = optimized(step)
    close(stitched(x, y), step(x, y), 1e-4)
    assert {step.kind for step in tfmem.report(stitched).regions[0].steps} == {"call", "view"}


def test_a_loop_that_attends(gpu: FakeGpu, on_gpu: Callable[..., None]) -> None:
    """One region in its body runs in each turn, on tensors that lie elsewhere each time."""
    on_gpu()
    plain, model = Decoder(), Decoder()
    decode = optimized(model.decode)
    for steps in (5, 1, 0, 7):
        launched = gpu.calls("cuGraphLaunch")
        close(decode(MEMORY, tf.constant(steps)), plain.decode(MEMORY, tf.constant(steps)))
        assert gpu.calls("cuGraphLaunch") >= launched + steps
    inside = regions_in(require_stitched(decode), "while/body")
    assert {"Tanh", "Softmax", "MatMul"} <= {op for ops in inside.values() for op in ops}


def test_a_loop_that_attends_in_training(gpu: FakeGpu, on_gpu: Callable[..., None]) -> None:
    on_gpu()
    plain, model = Decoder(), Decoder()
    train = optimized(model.train)
    for _ in range(6):
        close(train(MEMORY, tf.constant(4)), plain.train(MEMORY, tf.constant(4)), 1e-4)
    close(values(model.weights), values(plain.weights), 1e-4)
    backward = regions_in(require_stitched(train), "gradient_tape/while/")
    assert {"TanhGrad", "MatMul"} <= {op for ops in backward.values() for op in ops}


def test_conditions_in_a_loop_that_update_a_variable(gpu: FakeGpu, on_gpu: Callable[..., None]) -> None:
    """The variable comes into the branches as an argument of an argument; the counter is an int32."""

    on_gpu()
    plain, stitched = tf.Variable(tf.zeros([12])), tf.Variable(tf.zeros([12]))
    expected, found = (updating(each, lambda count: tf.cast(count, tf.float32)) for each in (plain, stitched))
    found = optimized(found)
    x = batch()[0][0]
    for _ in range(3):
        close(found(x), expected(x))
        close(stitched, plain)
    report = require_stitched(found)
    inside = regions_in(report, "while/body/while/cond")
    for branch, update in (("/then/", "AssignAddVariableOp"), ("/else/", "AssignSubVariableOp")):
        assert [update in ops for name, ops in inside.items() if branch in name] == [True], inside


def test_updates_of_a_scaled_loss(gpu: FakeGpu, on_gpu: Callable[..., None]) -> None:
    """Keras puts them all into one `If`."""

    def model() -> Any:
        keras.utils.set_random_seed(3)
        made = keras.Sequential([keras.Input([12]), keras.layers.Dense(16, "tanh"), keras.layers.Dense(5, "softmax")])
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-2), dynamic_growth_steps=3)
        made.compile(scaled, "sparse_categorical_crossentropy", jit_compile=False)
        return made

    on_gpu()
    x, y = np.random.default_rng(0).normal(size=(64, 12)).astype(np.float32), np.arange(64) % 5
    how: dict[str, Any] = {"batch_size": 16, "epochs": 3, "verbose": 0, "shuffle": False}
    off = tfmem.FusionOptions(tune="off")
    plain, stitched = model(), tfmem.optimize(model(), passes=("fusion",), fusion=off, cache_directory="")
    launched = gpu.calls("cuGraphLaunch")
    expected = plain.fit(x, y, **how).history["loss"]
    np.testing.assert_allclose(stitched.fit(x, y, **how).history["loss"], expected, 1e-4)
    assert float(stitched.optimizer.dynamic_scale) == float(plain.optimizer.dynamic_scale)
    assert gpu.calls("cuGraphLaunch") >= launched + 12
    inside = regions_in(require_stitched(stitched, "AssignSubVariableOp"), "cond/then/")
    updates = [ops.count("AssignSubVariableOp") for ops in inside.values()]
    assert max(updates) == len(plain.trainable_variables), inside

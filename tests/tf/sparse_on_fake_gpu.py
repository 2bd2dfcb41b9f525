"""Steps with embeddings and the largest of rows, whose regions run as on a GPU, on the fake driver. Run by
test_fusion_gpu.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.tf.fake_gpu import FakeGpu
from tests.tf.stitched_steps import close, optimized, require_stitched, values
from tests.tf.test_known_sizes import OPTIMIZERS, Embedded
from tests.tf.test_known_sizes import written as with_known
from tests.tf.test_unique_rows import OPTIMIZERS as OPTIMIZERS_OF_TF_KERAS
from tests.tf.test_unique_rows import Embedded as UniqueRows
from tfmem.capture.known_sizes import with_known_sizes
from tfmem.capture.unique_rows import with_all_rows
from tfmem.steps.trace import Trace

pytest_plugins = ("tests.tf.fake_gpu", "tests.tf.planned_on_fake_gpu")


class Tables:
    """Embeddings that are updated by rows, with repeated ids, before a Dense layer."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.table, self.other = (tf.Variable(rng.normal(size=(each, 6)).astype(np.float32)) for each in (300, 21))
        self.kernel = tf.Variable(rng.normal(size=(12, 3)).astype(np.float32))
        self.seen = tf.Variable(tf.zeros([300]))
        self.step = tf.function(self.run, input_signature=[tf.TensorSpec([None, 2], tf.int64)])

    @property
    def variables(self) -> list[tf.Variable]:
        return [self.table, self.other, self.kernel, self.seen]

    def run(self, both: Any) -> Any:
        ids, others = both[:, 0], both[:, 1]
        with tf.GradientTape() as tape:
            x = tf.concat([tf.gather(self.table, ids), tf.gather(self.other, others)], 1)
            loss = tf.reduce_mean(tf.tanh(x @ self.kernel) ** 2)
        first, second, kernel = tape.gradient(loss, [self.table, self.other, self.kernel])
        self.table.scatter_sub(tf.IndexedSlices(0.1 * first.values, first.indices))
        self.other.scatter_add(tf.IndexedSlices(-0.1 * second.values, second.indices))
        self.seen.scatter_update(tf.IndexedSlices(tf.reduce_sum(x, 1) * 0 + 1, ids))
        self.kernel.assign_sub(0.1 * kernel)
        return loss


@pytest.mark.filterwarnings("error::tfmem.TfmemWarning")
def test_rows_of_embeddings_are_updated(gpu: FakeGpu, on_gpu: Callable[..., None]) -> None:
    """For batches whose size it does not know."""
    on_gpu()
    plain, model = Tables(), Tables()
    step = optimized(model.step)
    launched = gpu.calls("cuGraphLaunch")
    for seed, count in enumerate((9, 70, 1, 33)):
        rng = np.random.default_rng(seed)
        given = tf.constant(np.stack([rng.integers(0, size, count) for size in (300, 21)], 1))
        close(step(given), plain.step(given))
    close(values(model.variables), values(plain.variables))
    require_stitched(step, "ResourceScatterSub", "ResourceScatterAdd", "ResourceScatterUpdate", "ResourceGather")
    assert gpu.calls("cuGraphLaunch") >= launched + 4


@pytest.mark.filterwarnings("error::tfmem.TfmemWarning")
def test_the_gradient_of_a_large_vocabulary_is_dense_for_adam(gpu: FakeGpu, on_gpu: Callable[..., None]) -> None:
    """More numbers than each result may look at alone: the region marks what counts."""
    on_gpu()

    def made() -> tuple[Any, Any]:
        keras.utils.set_random_seed(0)
        parts = [keras.layers.Embedding(5000, 8), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input([24], dtype="int64"), *parts])
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)

        @tf.function
        def step(ids: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(ids) ** 2)
            found = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(found, model.trainable_variables)
            return loss

        return model, step

    (plain_model, plain), (model, step) = made(), made()
    step, launched = optimized(step), gpu.calls("cuGraphLaunch")
    for seed in range(3):
        ids = tf.constant(np.random.default_rng(seed).integers(0, 5000 if seed else 50, (40, 24)))
        close(step(ids), plain(ids))
    close(values(model.trainable_variables), values(plain_model.trainable_variables))
    report = require_stitched(step, "UnsortedSegmentSum")
    assert len(report.regions) == 1
    assert gpu.calls("cuGraphLaunch") == launched + 3


@pytest.mark.filterwarnings("error::tfmem.TfmemWarning")
def test_a_mixture_takes_the_best_of_its_experts(gpu: FakeGpu, on_gpu: Callable[..., None]) -> None:
    """The gates of the two largest scores, and the gradient, a sum at their places."""
    on_gpu()
    rng = np.random.default_rng(0)
    experts = tf.constant(rng.normal(size=(6, 5, 4)).astype(np.float32))

    def made() -> tuple[tf.Variable, Any]:
        kernel = tf.Variable(np.random.default_rng(1).normal(size=(5, 6)).astype(np.float32))

        @tf.function
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                scores, chosen = tf.math.top_k(x @ kernel, 2)
                gates = tf.nn.softmax(scores)
                taken = tf.gather(tf.einsum("bi,eio->beo", x, experts), chosen, batch_dims=1)
                loss = tf.reduce_mean(tf.reduce_sum(gates[:, :, None] * taken, 1) ** 2)
            kernel.assign_sub(0.1 * tape.gradient(loss, kernel))
            return loss

        return kernel, step

    (plain_kernel, plain), (kernel, step) = made(), made()
    step = optimized(step)
    for seed in range(3):
        x = tf.constant(np.random.default_rng(seed).normal(size=(11, 5)).astype(np.float32))
        close(step(x), plain(x))
    close(values([kernel]), values([plain_kernel]))
    require_stitched(step, "TopKV2", "ScatterNd", "Softmax")


@pytest.mark.filterwarnings("error::tfmem.TfmemWarning")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_that_divide_slices(
    name: str, gpu: FakeGpu, on_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One region, without a condition. Rows that are no numbers are Keras's; a position out of range reads 0."""
    on_gpu()
    given = Trace.to_stitch
    monkeypatch.setattr(Trace, "to_stitch", lambda trace: with_known_sizes(given(trace)))
    plain, model = (Embedded(OPTIMIZERS[name], 2) for _ in range(2))
    written, _ = with_known(plain, *[tf.TensorSpec([None], tf.int32)] * 2)
    step, launched = optimized(model.step), gpu.calls("cuGraphLaunch")
    batches = [[3, 0, 7, 11], [3, 3, 5, 9], [2], [7, 7, 7, 7, 1, 6]]
    for count, ids in enumerate(batches):
        if count == 3:
            for each in (plain, model):
                each.spoil([7], np.nan)
        both = [tf.constant(each, tf.int32) for each in (ids, ids[::-1])]
        close(step(*both), written(*both))
        close(model.held(), plain.held())
    report = require_stitched(step, "ScatterNd", "UnsortedSegmentSum", "Cumsum")
    assert len(report.regions) == 1
    assert not [why for _, why in report.not_stitched if "If" in why]
    assert gpu.calls("cuGraphLaunch") == launched + len(batches)


@pytest.mark.filterwarnings("error::tfmem.TfmemWarning")
@pytest.mark.parametrize("name", ["Adam", "Adagrad", "Adadelta", "RMSprop, centered", "legacy Adam"])
def test_optimizers_that_update_unique_rows(
    name: str, gpu: FakeGpu, on_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One region, and the host waits for no count. Rows without ids keep numbers that are none."""
    on_gpu()
    given = Trace.to_stitch
    monkeypatch.setattr(Trace, "to_stitch", lambda trace: with_all_rows(given(trace)))
    plain, model = (UniqueRows(OPTIMIZERS_OF_TF_KERAS[name], 2) for _ in range(2))
    for each in (plain, model):
        each.table.scatter_nd_update([[12]], [[np.nan, np.inf, -0.0]])
    step, launched = optimized(model.step), gpu.calls("cuGraphLaunch")
    batches = [[3, 0, 7, 11], [3, 3, 5, 9], [2], [7, 7, 7, 7, 1, 6]]
    for ids in batches:
        both = [tf.constant(each, tf.int32) for each in (ids, ids[::-1])]
        close(step(*both), plain.step(*both))
        close(model.held(), plain.held())
    report = require_stitched(step, "UnsortedSegmentSum")
    assert len(report.regions) == 1
    assert not [why for _, why in report.not_stitched if "no rule for Unique" in why]
    assert gpu.calls("cuGraphLaunch") == launched + len(batches)

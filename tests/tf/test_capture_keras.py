"""Keras models whose step was captured and restored train as they trained before."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from graph_passes.errors import GraphError
from tfmem.capture.concrete_function import capture_concrete, restore_concrete
from tfmem.capture.grappler import run_grappler
from tfmem.capture.keras_functions import (
    install,
    is_installed,
    joined,
    keras_function,
    makes_its_own,
    require_trainable,
    steps_per_execution,
    to_tensors,
)

X = np.random.default_rng(0).normal(size=(22, 8, 8, 1)).astype("float32")
Y = np.arange(22) % 3


class Rewriter:
    """A step whose traces are captured and restored, whether or not there is anything to change."""

    def __init__(self, step):
        self.function = step
        self.functions = {}
        self.steps = 0

    def __call__(self, batch):
        self.steps += 1
        cf = self.function.get_concrete_function(batch)
        if id(cf) not in self.functions:
            captured = run_grappler(capture_concrete(cf))
            self.functions[id(cf)] = restore_concrete(cf, captured, captured.graph_def), cf
        return self.functions[id(cf)][0](batch)


def network(library, seed=0):
    library.utils.set_random_seed(seed)
    layers = library.layers
    return library.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(4, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(3, dtype="float32"),
        ]
    )


def compiled(library, **kw):
    model = network(library)
    options = {
        "optimizer": library.optimizers.Adam(0.01),
        "loss": library.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
        "jit_compile": False,
    } | kw
    model.compile(**options)
    return model


def installed(model):
    step = Rewriter(keras_function(model, "train").step)

    def train_function(iterator):
        for _ in range(steps_per_execution(model)):
            logs = step(to_tensors(next(iterator)))
        return logs

    install(model, "train", train_function)
    assert is_installed(model, "train", train_function)
    return step


def fit(model, **kw):
    options = {"epochs": 2, "batch_size": 8, "shuffle": False, "verbose": 0} | kw
    return model.fit(X, Y, **options).history


def check_same_training(plain, rewritten, tolerance=1e-5, **kw):
    step = installed(rewritten)
    expected, actual = fit(plain, **kw), fit(rewritten, **kw)
    assert step.steps == 6
    assert expected.keys() == actual.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, rtol=tolerance, atol=tolerance)
    for one, other in zip(plain.get_weights(), rewritten.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=tolerance, atol=tolerance)
    return step


@pytest.mark.parametrize("library", [keras, tf_keras])
def test_fit_with_validation_and_callbacks(library):
    seen = []

    class Recorder(library.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append((batch, sorted(logs)))

    plain, rewritten = compiled(library), compiled(library)
    check_same_training(plain, rewritten, validation_data=(X[:5], Y[:5]), callbacks=[Recorder()])
    assert seen[:6] == seen[6:]


@pytest.mark.parametrize("library", [keras, tf_keras])
def test_train_on_batch(library):
    plain, rewritten = compiled(library), compiled(library)
    installed(rewritten)
    for size in (8, 8, 6):
        np.testing.assert_allclose(
            rewritten.train_on_batch(X[:size], Y[:size]),
            plain.train_on_batch(X[:size], Y[:size]),
            rtol=1e-5,
        )


@pytest.mark.parametrize("library", [keras, tf_keras])
def test_steps_per_execution(library):
    plain, rewritten = (
        compiled(library, steps_per_execution=2),
        compiled(library, steps_per_execution=2),
    )
    step = installed(rewritten)
    batches = []
    callback = library.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch))
    dataset = tf.data.Dataset.from_tensor_slices((X[:16], Y[:16])).batch(4)
    for model in (plain, rewritten):
        model.fit(dataset, epochs=2, verbose=0, shuffle=False, callbacks=[callback])
    assert step.steps == 8
    assert batches[:4] == batches[4:]
    for one, other in zip(plain.get_weights(), rewritten.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)


def test_keras_mixed_precision_with_loss_scaling():
    def build():
        keras.config.set_dtype_policy("mixed_float16")
        try:
            model = compiled(keras)
        finally:
            keras.config.set_dtype_policy("float32")
        return model

    plain, rewritten = build(), build()
    assert isinstance(plain.optimizer, keras.optimizers.LossScaleOptimizer)
    check_same_training(plain, rewritten, tolerance=5e-3)
    assert plain.optimizer.dynamic_scale.numpy() == rewritten.optimizer.dynamic_scale.numpy()


def test_tf_keras_mixed_precision():
    tf_keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        plain, rewritten = compiled(tf_keras), compiled(tf_keras)
    finally:
        tf_keras.mixed_precision.set_global_policy("float32")
    check_same_training(plain, rewritten, tolerance=5e-2)


@pytest.mark.parametrize(
    ("library", "clip"),
    [
        (keras, {"global_clipnorm": 0.1}),
        (keras, {"clipvalue": 0.01}),
        (tf_keras, {"clipnorm": 0.1}),
    ],
)
def test_gradient_clipping(library, clip):
    def build():
        return compiled(library, optimizer=library.optimizers.SGD(0.1, momentum=0.9, **clip))

    check_same_training(build(), build())


@pytest.mark.parametrize("library", [keras, tf_keras])
def test_recurrent_layer_with_dropout_runs(library):
    library.utils.set_random_seed(0)
    layers = library.layers
    model = library.Sequential([layers.Input((5, 4)), layers.LSTM(6), layers.Dropout(0.5), layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse", jit_compile=False)
    installed(model)
    rng = np.random.default_rng(1)
    history = model.fit(rng.normal(size=(32, 5, 4)), rng.normal(size=(32, 1)), epochs=3, verbose=0).history
    assert np.isfinite(history["loss"]).all()


def test_sample_weights_and_a_custom_step():
    class Doubling(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            return super().train_step(data) | {"twice": 2 * self.dense.bias[0]}

    histories = []
    for rewrite in (False, True):
        model = Doubling()
        model.compile(optimizer="sgd", loss="mse", jit_compile=False)
        if rewrite:
            installed(model)
        x, y = np.ones((8, 2), "float32"), np.zeros((8, 1), "float32")
        histories.append(
            model.fit(x, y, sample_weight=np.arange(8.0), epochs=2, batch_size=4, shuffle=False, verbose=0).history
        )
    assert histories[0].keys() == histories[1].keys()
    np.testing.assert_allclose(histories[0]["loss"], histories[1]["loss"], rtol=1e-6)
    np.testing.assert_allclose(histories[0]["twice"], histories[1]["twice"], rtol=1e-6)


@pytest.mark.parametrize("library", [keras, tf_keras])
def test_what_keras_makes_and_recompilation(library):
    model = compiled(library)
    step = installed(model)
    mine = model.train_function
    made = keras_function(model, "train")
    assert model.train_function is mine
    assert made.own is not mine
    assert made.compiled is None
    assert "loss" in made.own(iter(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)))
    assert step.steps == 0
    before = model.get_weights()[0]
    assert "loss" in made.step((tf.constant(X[:8]), tf.constant(Y[:8])))
    assert not np.array_equal(before, model.get_weights()[0])
    model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy", jit_compile=False)
    fit(model)
    assert step.steps == 0


def test_keras_own_step_is_its_own_trace():
    """The trace that Keras's function of iterators calls is the one that the step has for their elements."""
    model = compiled(keras)
    made = keras_function(model, "train")
    made.own(iter(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)))
    count = made.step.experimental_get_tracing_count()
    spec = tf.TensorSpec([None, 8, 8, 1]), tf.TensorSpec([None], tf.int64)
    assert made.step.get_concrete_function(spec).inputs[0].shape[0] is None
    assert made.step.experimental_get_tracing_count() == count


@pytest.mark.parametrize("library", [keras, tf_keras])
def test_with_xla_there_are_two(library):
    made = keras_function(compiled(library, jit_compile=True), "train")
    assert made.compiled is not made.step
    assert made.compiled._jit_compile
    assert not made.step._jit_compile


@pytest.mark.parametrize("library", [keras, tf_keras])
def test_functions_of_the_users_own_are_known(library):
    class Own(library.Model):
        def make_test_function(self, force=False):
            self.test_function = lambda iterator: {}

    assert makes_its_own(Own(), "test")
    assert not makes_its_own(Own(), "train")


def test_predictions_are_joined():
    parts = [{"a": tf.ones([2, 3]), "b": tf.constant(1.0)}, {"a": tf.zeros([1, 3]), "b": tf.constant(2.0)}]
    assert joined(parts)["a"].shape == (3, 3)
    assert joined(parts)["b"].numpy().tolist() == [1, 2]
    sparse = [tf.sparse.from_dense(part["a"]) for part in parts]
    assert joined(sparse).dense_shape.numpy().tolist() == [3, 3]
    assert joined(parts[:1]) is parts[0]


@pytest.mark.parametrize("library", [keras, tf_keras])
def test_models_that_cannot_be_taken(library):
    with pytest.raises(GraphError, match="not compiled"):
        require_trainable(network(library))
    with pytest.raises(GraphError, match="run_eagerly"):
        require_trainable(compiled(library, run_eagerly=True))
    with pytest.raises(GraphError, match="not a Keras model"):
        require_trainable(object())

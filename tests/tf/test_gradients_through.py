"""A gradient through what was optimised is that of the original."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tfmem.capture.concrete_function import capture_concrete, restore_concrete
from tfmem.capture.grappler import run_grappler


@pytest.fixture(name="model")
def fixture_model():
    keras.utils.set_random_seed(3)
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((6, 4)), layers.LSTM(8), layers.Dense(5, activation="relu"), layers.Dense(2, activation="tanh")]
    )


@pytest.fixture(name="x")
def fixture_x():
    return tf.random.stateless_normal([3, 6, 4], [1, 2])


@pytest.fixture(name="pair")
def fixture_pair(model):
    """The function unmodified, and optimised."""
    plain = tf.function(model.__call__)
    return plain, tfmem.optimize(tf.function(model.__call__))


def equal(one, other):
    for old, new in zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True):
        np.testing.assert_array_equal(np.asarray(new), np.asarray(old))


def with_tape(function, x, variables, **tape_options):
    with tf.GradientTape(**tape_options) as tape:
        tape.watch(x)
        y = function(x)
        loss = tf.reduce_sum(y * y)
    return [y, *tape.gradient(loss, [x, *variables])]


@pytest.mark.parametrize("persistent", [False, True])
def test_eager_tapes(pair, model, x, persistent):
    plain, optimized = pair
    optimized(x)
    assert tfmem.report(optimized).replaced
    with pytest.warns(tfmem.TfmemWarning, match="under a gradient tape"):
        found = with_tape(optimized, x, model.trainable_variables, persistent=persistent)
    equal(with_tape(plain, x, model.trainable_variables, persistent=persistent), found)
    with warnings.catch_warnings(action="error"):  # once is enough
        with_tape(optimized, x, model.trainable_variables)


def test_a_tape_that_watches_nothing_is_none_of_its_business(pair, x):
    _, optimized = pair
    alone = optimized(x)
    with warnings.catch_warnings(action="error"), tf.GradientTape(watch_accessed_variables=False):
        equal(alone, optimized(x))


def test_the_first_call_may_be_under_a_tape(pair, model, x):
    plain, optimized = pair
    with pytest.warns(tfmem.TfmemWarning):
        equal(with_tape(plain, x, model.trainable_variables), with_tape(optimized, x, model.trainable_variables))


@pytest.mark.parametrize("persistent", [False, True])
def test_tapes_in_another_function(pair, model, x, persistent):
    def outer(function):
        return tf.function(lambda x: with_tape(function, x, model.trainable_variables, persistent=persistent))

    results = [outer(function)(x) for function in pair]
    for old, new in zip(*results, strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-6)


def test_symbolic_gradients(pair, x):
    def outer(function):
        return tf.function(lambda x: tf.gradients(function(x), x)[0])

    results = [outer(function)(x) for function in pair]
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_jacobians_nested_tapes_and_forward_accumulators():
    """The gradients of a net without a loop: through loops, TensorFlow has no such gradients."""
    x, direction = tf.random.stateless_normal([3, 5], [1, 2]), tf.random.stateless_normal([3, 5], [3, 4])
    net = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(2)])

    def results(function):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(function(x))
            first = inner.gradient(y, x)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            each = function(x)
        with tf.autodiff.ForwardAccumulator(x, direction) as accumulator:
            forward = function(x)
        return outer.gradient(first, x), tape.jacobian(each, x), accumulator.jvp(forward)

    plain = tf.function(lambda x: net(x) * tf.tanh(net(x))).get_concrete_function(x)
    expected = results(plain)  # gives the traced graph further outputs, for the gradient
    captured = run_grappler(capture_concrete(plain))
    optimized = restore_concrete(plain, captured, captured.graph_def)
    assert "_FusedMatMul" in {op.type for op in optimized.graph.get_operations()}
    with pytest.warns(tfmem.TfmemWarning):
        found = results(optimized)
    equal(expected, found)


def test_a_step_under_a_budget(new_net, batch, smallest):
    def made():
        net = new_net()
        return net, tf.function(net.step)

    budget = (1 << 18) + smallest(lambda size: tfmem.optimize(made()[1], memory_budget=size)(*batch))
    (old, plain), (new, step) = made(), made()
    optimized = tfmem.optimize(step, memory_budget=budget)
    for _ in range(8):
        found = []
        for net, function in ((old, plain), (new, optimized)):
            with warnings.catch_warnings(action="ignore"), tf.GradientTape() as tape:
                loss = function(*batch)
            found.append([loss, *tape.gradient(loss, net.variables)])
            function(*batch)
        equal(*found)
    assert tfmem.report(optimized).decision == "moved"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("signature", [False, True])
def test_a_saved_model(model, x, signature, tmp_path):
    """Its gradients, those of its weights too, are those of the model that it was made of."""
    module = tf.Module()
    module.variables_ = model.trainable_variables
    module.table = tf.Variable(tf.random.stateless_normal([7, 2], [3, 4]))

    @tf.function(input_signature=[tf.TensorSpec([None, 6, 4], name="x"), tf.TensorSpec([None], tf.int32, name="words")])
    def serve(x, words):
        return {"scores": model(x) + tf.gather(module.table, words), "words": words}

    module.serve = serve
    tf.saved_model.save(module, str(tmp_path / "model"), signatures={"serve": serve})
    output = tfmem.optimize(str(tmp_path / "model"), output=tmp_path / "output")
    assert tfmem.report(output).replaced
    words = tf.constant([1, 2, 1])

    def gradients(path):
        loaded = tf.saved_model.load(str(path))
        function = loaded.signatures["serve"] if signature else loaded.serve
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = function(x=x, words=words) if signature else function(x, words)
            loss = tf.reduce_sum(found["scores"] ** 2)
        of_variables = [*loaded.variables_, loaded.table]
        found = [*found.values(), *tape.gradient(loss, [x, *of_variables])]
        return list(map(tf.convert_to_tensor, found))

    for new, old in zip(gradients(output), gradients(tmp_path / "model"), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-6)


def test_a_saved_model_that_draws_numbers_is_not_run_again_for_its_gradient(tmp_path):
    """Other numbers would be another gradient."""
    layer = keras.layers.LSTM(3)
    module = tf.Module()
    module.layer = layer

    @tf.function(input_signature=[tf.TensorSpec([2, 5, 4])])
    def serve(x):
        return tf.nn.dropout(layer(x), 0.5) @ tf.ones([3, 3])

    module.serve = serve
    tf.saved_model.save(module, str(tmp_path / "model"))
    loaded = tf.saved_model.load(tfmem.optimize(str(tmp_path / "model"), output=tmp_path / "output"))
    assert "IdentityN" not in {
        op.type for op in loaded.serve.get_concrete_function(tf.zeros([2, 5, 4])).graph.get_operations()
    }

"""Training steps whose recurrences were swapped with their gradients train as they trained before."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfmem

L = keras.layers
INPUTS, UNITS, STEPS = 3, 7, 5
RANDOM = np.random.default_rng(0)
TOLERANCE = 2e-5


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def batch(model: Any, step: int, masked: bool = False) -> tuple[Any, Any]:
    size, time = 3 + step % 2, model.input_shape[1] or STEPS + step % 2
    x = numbers(size, time, INPUTS, seed=step)
    if masked:
        x[0, time - 2 :] = 0
        x[1, :1] = 0
    shape = (size, time, 2) if len(model.output_shape) == 3 else (size, 2)
    return x, numbers(*shape, seed=100 + step)


def sequential(library: Any, *layers: Any, time: int | None = None, masked: bool = False) -> Any:
    library.utils.set_random_seed(7)
    masking = [library.layers.Masking()] if masked else []
    made = [layer() for layer in layers]
    return library.Sequential(
        [library.layers.Input((time, INPUTS)), *masking, *made, library.layers.Dense(2, dtype="float32")]
    )


def trained(model: Any, steps: int = 10, masked: bool = False) -> tuple[list[float], list[Any]]:
    losses = [float(np.ravel(model.train_on_batch(*batch(model, step, masked)))[0]) for step in range(steps)]
    return losses, [np.asarray(weight) for weight in model.get_weights()]


def compare(make: Callable[[], Any], swapped: int, masked: bool = False, tolerance: float = TOLERANCE) -> Any:
    """Trains the model as it is and optimised; gives the report."""
    plain, optimized = make(), tfmem.optimize(make())
    for one, other in zip(trained(plain, masked=masked), trained(optimized, masked=masked), strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    report = tfmem.report(optimized)
    assert len(report.swapped) == swapped, str(report)
    assert not report.not_swapped
    return report


def compiled(library: Any, *layers: Any, optimizer: Any = None, **how: Any) -> Callable[[], Any]:
    def make() -> Any:
        model = sequential(library, *layers, **how)
        model.compile(optimizer() if optimizer else library.optimizers.SGD(0.1), "mse")
        return model

    return make


MODELS: dict[str, tuple[int, Sequence[Callable[[], Any]]]] = {
    "lstm": (1, [lambda: L.LSTM(UNITS, return_sequences=True)]),
    "lstm, last step": (1, [lambda: L.LSTM(UNITS)]),
    "gru": (1, [lambda: L.GRU(UNITS, return_sequences=True)]),
    "gru, reset before": (1, [lambda: L.GRU(UNITS, reset_after=False)]),
    "simple": (1, [lambda: L.SimpleRNN(UNITS, activation="elu")]),
    "stacked": (2, [lambda: L.LSTM(UNITS, return_sequences=True), lambda: L.GRU(4)]),
    "bidirectional": (1, [lambda: L.Bidirectional(L.LSTM(UNITS, return_sequences=True))]),
    "bidirectional above a layer": (1, [lambda: L.Dense(4), lambda: L.Bidirectional(L.GRU(UNITS))]),
    "backwards": (1, [lambda: L.LSTM(UNITS, go_backwards=True, return_sequences=True)]),
    "backwards above a layer": (1, [lambda: L.Dense(4), lambda: L.LSTM(UNITS, go_backwards=True)]),
    "dropout": (1, [lambda: L.LSTM(UNITS, dropout=0.2, recurrent_dropout=0.2, seed=1)]),
    "other activations": (1, [lambda: L.LSTM(UNITS, activation="relu", recurrent_activation="hard_sigmoid")]),
    "no bias": (1, [lambda: L.GRU(UNITS, use_bias=False)]),
    "stacked cells": (1, [lambda: L.RNN([L.LSTMCell(UNITS), L.LSTMCell(UNITS)])]),
}


@pytest.mark.parametrize("name", MODELS)
def test_keras_trains_the_same(name: str) -> None:
    swapped, layers = MODELS[name]
    compare(compiled(keras, *layers), swapped)


@pytest.mark.parametrize("layer", [L.LSTM, L.GRU, L.SimpleRNN])
def test_masked_steps_are_skipped(layer: Any) -> None:
    compare(compiled(keras, lambda: layer(UNITS, return_sequences=True), masked=True), 1, masked=True)


def test_a_static_length_and_adam_with_clipping() -> None:
    adam = compiled(keras, lambda: L.LSTM(UNITS), time=4, optimizer=lambda: keras.optimizers.Adam(0.01, clipnorm=0.1))
    compare(adam, 1, tolerance=1e-4)


@pytest.mark.parametrize(("policy", "tolerance"), [("mixed_float16", 1e-2), ("mixed_bfloat16", 5e-2)])
def test_mixed_precision(policy: str, tolerance: float) -> None:
    report = compare(compiled(keras, lambda: L.LSTM(UNITS, dtype=policy)), 1, tolerance=tolerance)
    assert policy.removeprefix("mixed_") in report.swapped[0]


LEGACY = {
    "lstm": (1, [lambda: tf_keras.layers.LSTM(UNITS, return_sequences=True)]),
    "gru": (1, [lambda: tf_keras.layers.GRU(UNITS)]),
    "bidirectional": (1, [lambda: tf_keras.layers.Bidirectional(tf_keras.layers.LSTM(UNITS))]),
    "gru, reset before": (1, [lambda: tf_keras.layers.GRU(UNITS, reset_after=False)]),
}


@pytest.mark.parametrize("name", LEGACY)
def test_tf_keras_trains_the_same(name: str) -> None:
    swapped, layers = LEGACY[name]
    compare(compiled(tf_keras, *layers), swapped)


def test_fit() -> None:
    """Batches of two sizes, validation, metrics and a callback."""
    x, y = numbers(22, STEPS, INPUTS), numbers(22, 2, seed=1)
    histories, weights = [], []
    for optimized in (False, True):
        model = sequential(keras, lambda: L.LSTM(UNITS))
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        if optimized:
            model = tfmem.optimize(model)
        seen = model.fit(
            x, y, batch_size=8, epochs=3, shuffle=False, verbose=0, validation_data=(x[:8], y[:8]),
            callbacks=[keras.callbacks.TerminateOnNaN()],
        )  # fmt: skip
        histories.append(seen.history)
        weights.append(model.get_weights())
    assert histories[0].keys() == histories[1].keys()
    for key, values in histories[0].items():
        np.testing.assert_allclose(values, histories[1][key], rtol=1e-4, err_msg=key)
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, atol=TOLERANCE)
    assert len(tfmem.report(model).swapped) == 1


def results(step: Any, *arguments: Any) -> tuple[list[Any], Any]:
    """Of a `tf.function` and of the same, optimised; and the report."""
    plain = [np.asarray(value) for value in tf.nest.flatten(step(*arguments))]
    optimized = tfmem.optimize(step)
    swapped = [np.asarray(value) for value in tf.nest.flatten(optimized(*arguments))]
    for a, b in zip(plain, swapped, strict=True):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)
    return swapped, tfmem.report(optimized)


def test_gradients_of_inputs_and_states() -> None:
    layer = L.LSTM(UNITS, return_sequences=True, return_state=True)
    layer.build((None, None, INPUTS))
    weights = [weight.value for weight in layer.weights]

    @tf.function
    def step(x: Any, h: Any, c: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, h, c])
            y, last_h, last_c = layer(x, initial_state=[h, c])
            loss = tf.reduce_mean(y**2) + tf.reduce_mean(tf.sin(last_h)) + 2 * tf.reduce_mean(last_c**2)
        return loss, tape.gradient(loss, [*weights, x, h, c])

    x, h, c = numbers(4, STEPS, INPUTS), numbers(4, UNITS, seed=1), numbers(4, UNITS, seed=2)
    _, report = results(step, *map(tf.constant, (x, h, c)))
    assert len(report.swapped) == 1


def test_only_some_weights_are_trained() -> None:
    layer = L.LSTM(UNITS)
    layer.build((None, None, INPUTS))
    recurrent = layer.weights[1].value

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(recurrent)
            loss = tf.reduce_sum(layer(x) ** 2)
        return loss, tape.gradient(loss, recurrent)

    _, report = results(step, tf.constant(numbers(4, STEPS, INPUTS)))
    assert len(report.swapped) == 1


def hand_written(cell: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """A loop of `tf.while_loop` over `[batch, time, inputs]`, its outputs and its last state."""

    def run(x: Any) -> Any:
        time, rows = tf.shape(x)[1], tf.shape(x)[0]
        items = tf.TensorArray(tf.float32, time).unstack(tf.transpose(x, [1, 0, 2]))
        outputs = tf.TensorArray(tf.float32, time)

        def body(i: Any, h: Any, outputs: Any) -> Any:
            h = cell(items.read(i), h)
            return i + 1, h, outputs.write(i, h)

        _, h, outputs = tf.while_loop(lambda i, *_: i < time, body, (0, tf.zeros([rows, UNITS]), outputs))
        return outputs.stack(), h

    return run


@pytest.fixture(name="weights")
def fixture_weights() -> tuple[tf.Variable, tf.Variable]:
    return tf.Variable(numbers(INPUTS, UNITS) * 0.5), tf.Variable(numbers(UNITS, UNITS, seed=1) * 0.3)


def differentiated(loop: Callable[[Any], Any], weights: Sequence[tf.Variable]) -> Any:
    @tf.function(input_signature=[tf.TensorSpec([None, None, INPUTS])])
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs, last = loop(x)
            loss = tf.reduce_sum(outputs**2) + tf.reduce_sum(last)
        return loss, tape.gradient(loss, [*weights, x])

    return step


def test_a_cell_nobody_has_named(weights: tuple[tf.Variable, tf.Variable]) -> None:
    kernel, recurrent = weights

    def cell(x: Any, h: Any) -> Any:
        gate = tf.sigmoid(x @ kernel - h)
        return gate * tf.nn.softplus(h @ recurrent) + 0.1 * tf.exp(-(h**2))

    _, report = results(differentiated(hand_written(cell), weights), tf.constant(numbers(4, STEPS, INPUTS)))
    assert len(report.swapped) == 1


def test_a_gradient_of_the_users_own_stays(weights: tuple[tf.Variable, tf.Variable]) -> None:
    kernel, recurrent = weights

    @tf.custom_gradient
    def clipped(h: Any) -> Any:
        return tf.identity(h), lambda gradient: tf.clip_by_value(gradient, -0.1, 0.1)

    step = differentiated(hand_written(lambda x, h: clipped(tf.tanh(x @ kernel + h @ recurrent))), weights)
    _, report = results(step, tf.constant(numbers(4, STEPS, INPUTS)))
    assert not report.swapped
    assert "has a gradient of its own" in report.not_swapped[0]


def test_a_stopped_gradient_stays(weights: tuple[tf.Variable, tf.Variable]) -> None:
    kernel, recurrent = weights
    step = differentiated(hand_written(lambda x, h: tf.tanh(x @ kernel + tf.stop_gradient(h) @ recurrent)), weights)
    _, report = results(step, tf.constant(numbers(4, STEPS, INPUTS)))
    assert not report.swapped
    assert "StopGradient" in report.not_swapped[0]


def test_a_second_gradient_stays() -> None:
    layer = L.LSTM(UNITS)
    layer.build((None, None, INPUTS))

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(layer(x) ** 2)
            penalty = tf.reduce_sum(tape.gradient(loss, x) ** 2)
        return outer.gradient(penalty, x)

    _, report = results(step, tf.constant(numbers(2, STEPS, INPUTS)))
    assert not report.swapped
    assert any("gradient of its gradient" in reason for reason in report.not_swapped)


def test_one_tensor_as_two_states() -> None:
    layer = L.LSTM(UNITS)
    layer.build((None, None, INPUTS))

    @tf.function
    def step(x: Any, h: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(h)
            loss = tf.reduce_sum(layer(x, initial_state=[h, h]) ** 2)
        return tape.gradient(loss, h)

    results(step, tf.constant(numbers(2, STEPS, INPUTS)), tf.constant(numbers(2, UNITS, seed=1)))


CUDNN = {"lstm": L.LSTM, "gru": L.GRU}


@pytest.mark.parametrize("kind", CUDNN)
@pytest.mark.parametrize(("masked", "backwards"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("scaled", [False, True], ids=["", "weights computed"])
def test_what_keras_emits_on_gpus(
    kind: str, masked: bool, backwards: bool, scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CudnnRNNV3 has no kernel here; the swapped graph is compared with the layer's own loop."""
    facts = {**tf.sysconfig.get_build_info(), "is_cuda_build": True}  # Keras orders gates by it
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: facts)
    functions = importlib.import_module("keras.src.backend.tensorflow.rnn")
    cudnn = getattr(functions, f"_cudnn_{kind}")
    layer = CUDNN[kind](UNITS, return_sequences=True, return_state=True, go_backwards=backwards)
    layer.build((None, None, INPUTS))
    for place, weight in enumerate(layer.weights):
        weight.assign(numbers(*weight.shape, seed=place) * 0.5)
    weights = [weight.value for weight in layer.weights]

    def step(on_gpu: bool) -> Any:
        @tf.function(
            input_signature=[
                tf.TensorSpec([None, None, INPUTS]), tf.TensorSpec([None, None], tf.bool), tf.TensorSpec([None, UNITS]),
            ],
            autograph=False,
        )  # fmt: skip
        def run(x: Any, mask: Any, h: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch([x, h])
                states = [h, 2 * h] if kind == "lstm" else [h]
                used = mask if masked else None
                if on_gpu:
                    ready = [0.5 * weight for weight in weights] if scaled else weights
                    last, outputs, finals = cudnn(x, *states, *ready, used, False, backwards, True)
                else:
                    outputs, *finals = layer(x, mask=used, initial_state=states)
                    last = finals[0]
                if masked:  # behind the end cuDNN puts out 0, and Keras repeats
                    outputs *= tf.cast(mask[:, ::-1] if backwards else mask, tf.float32)[:, :, None]
                loss = tf.reduce_sum(outputs**2) + tf.reduce_sum(tf.sin(last))
                loss += tf.add_n([tf.reduce_sum(final**2) for final in finals])
            return loss, outputs, tape.gradient(loss, [*weights, x, h])

        return run

    x, h = numbers(3, STEPS, INPUTS), numbers(3, UNITS, seed=9)
    mask = np.arange(STEPS)[None] < np.array([[2], [STEPS], [1]])
    arguments = [tf.constant(value) for value in (x, mask, h)]
    optimized = tfmem.optimize(step(on_gpu=True))
    found = tf.nest.flatten(optimized(*arguments))
    if scaled:
        for weight in layer.weights:
            weight.assign(0.5 * weight)
    wanted = tf.nest.flatten(step(on_gpu=False)(*arguments))
    for place, (a, b) in enumerate(zip(found, wanted, strict=True)):
        factor = 0.5 if scaled and place in (2, 3, 4) else 1.0  # what was scaled has half the gradient
        np.testing.assert_allclose(a, factor * b, rtol=TOLERANCE, atol=TOLERANCE)
    report = tfmem.report(optimized)
    assert len(report.swapped) == 1
    assert "CudnnRNNV3" in report.swapped[0]


def loop_above_a_loop(weights: Sequence[tf.Variable]) -> Callable[[Any], Any]:
    """Two loops with nothing between: what the one's gradient makes, the other's takes."""
    kernel, recurrent, *above = weights
    lower = hand_written(lambda x, h: tf.tanh(x @ kernel + h @ recurrent))
    upper = hand_written(lambda x, h: tf.tanh(x @ above[0] + h @ above[1]))

    def run(x: Any) -> Any:
        outputs, last = lower(x)
        outputs, upper_last = upper(tf.transpose(outputs, [1, 0, 2]))
        return outputs, last + upper_last

    return run


def test_two_loops_of_which_one_feeds_the_other(weights: tuple[tf.Variable, tf.Variable]) -> None:
    both = [
        *weights,
        tf.Variable(numbers(UNITS, UNITS, seed=2) * 0.3),
        tf.Variable(numbers(UNITS, UNITS, seed=3) * 0.3),
    ]
    _, report = results(differentiated(loop_above_a_loop(both), both), tf.constant(numbers(4, STEPS, INPUTS)))
    assert len(report.swapped) == 2


@pytest.mark.parametrize("way", ["optimize", "avm_gradients", "wrap_optimizer"])
def test_a_graph_of_tensorflow_1(way: str) -> None:
    def losses(optimized: bool) -> list[float]:
        v1 = tf.compat.v1
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, [None, None, INPUTS])
            shapes = [(INPUTS, UNITS), (UNITS, UNITS), (UNITS, UNITS), (UNITS, UNITS)]
            weights = [tf.Variable(numbers(*shape, seed=place) * 0.3) for place, shape in enumerate(shapes)]
            outputs, last = loop_above_a_loop(weights)(x)
            loss = tf.reduce_mean((outputs - 0.5) ** 2) + tf.reduce_mean(last**2)
            optimizer = v1.train.GradientDescentOptimizer(0.5)
            if way == "wrap_optimizer":
                train = (tfmem.wrap_optimizer(optimizer) if optimized else optimizer).minimize(loss)
            else:
                avm = optimized and way == "avm_gradients"
                gradients = (tfmem.avm_gradients if avm else tf.gradients)(loss, weights)
                train = optimizer.apply_gradients(zip(gradients, weights, strict=True))
            if optimized and way == "optimize":
                tfmem.optimize(graph, fetches=[loss.name, train.name])
            if optimized:
                assert len(tfmem.report(graph).swapped) == 2, str(tfmem.report(graph))
            initialize = v1.global_variables_initializer()
        with v1.Session(graph=graph, config=tfmem.session_config()) as session:
            session.run(initialize)
            steps = [numbers(4, STEPS + step, INPUTS, seed=step) for step in range(6)]
            found = [float(session.run([loss, train], {x: step})[0]) for step in steps]
            if optimized:  # the old loops are there, and do not run
                metadata = v1.RunMetadata()
                options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
                session.run(train, {x: steps[0]}, options, metadata)
                ran = [node.node_name for device in metadata.step_stats.dev_stats for node in device.node_stats]
                assert not [name for name in ran if "TensorListPushBack" in name]
        return found

    np.testing.assert_allclose(losses(optimized=True), losses(optimized=False), rtol=1e-5)


def test_a_function_that_is_being_traced() -> None:
    """The old loop would run too, so it stays; the report says what to do instead."""
    layer = L.LSTM(UNITS)
    layer.build((None, None, INPUTS))
    traced = []

    @tf.function
    def step(x: Any) -> Any:
        loss = tf.reduce_mean(layer(x) ** 2)
        gradients = tfmem.avm_gradients(loss, [weight.value for weight in layer.weights])
        traced.append(tfmem.report(loss.graph))
        return gradients

    step(tf.constant(numbers(4, STEPS, INPUTS)))
    assert not traced[0].swapped
    assert "optimise the function instead" in traced[0].not_swapped[0]


@pytest.mark.parametrize("kind", CUDNN)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("trained", [False, True], ids=["inference", "training"])
def test_two_directions_as_keras_emits_them_on_gpus(
    kind: str, masked: bool, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch, and no sequence is turned around any more."""
    facts = {**tf.sysconfig.get_build_info(), "is_cuda_build": True}
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: facts)
    cudnn = getattr(importlib.import_module("keras.src.backend.tensorflow.rnn"), f"_cudnn_{kind}")
    layer = L.Bidirectional(CUDNN[kind](UNITS, return_sequences=True))
    layer(keras.Input((None, INPUTS)))
    weights = [weight.value for weight in layer.weights]

    def step(on_gpu: bool) -> Any:
        @tf.function(
            input_signature=[tf.TensorSpec([None, None, INPUTS]), tf.TensorSpec([None, None], tf.bool)], autograph=False
        )
        def run(x: Any, mask: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                used = mask if masked else None
                if on_gpu:
                    states = [tf.zeros([tf.shape(x)[0], UNITS])] * (2 if kind == "lstm" else 1)
                    doubled = 2 * x
                    ahead = cudnn(doubled, *states, *weights[:3], used, False, False, True)[1]
                    back = cudnn(doubled, *states, *weights[3:], used, False, True, True)[1]
                    outputs = tf.concat([ahead, tf.reverse(back, [1])], -1)
                else:
                    outputs = layer(2 * x, mask=used)
                if masked:
                    outputs *= tf.cast(mask, tf.float32)[:, :, None]
                loss = tf.reduce_sum(outputs**2)
            return (outputs, tape.gradient(loss, [*weights, x])) if trained else outputs

        return run

    mask = np.arange(STEPS)[None] < np.array([[2], [STEPS], [1]])
    arguments = [tf.constant(numbers(3, STEPS, INPUTS)), tf.constant(mask)]
    optimized = tfmem.optimize(step(on_gpu=True))
    found, wanted = (tf.nest.flatten(run(*arguments)) for run in (optimized, step(on_gpu=False)))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)
    report = tfmem.report(optimized)
    assert len(report.swapped) == 1
    assert "both directions in one launch" in report.swapped[0]
    operations = {op.type for op in optimized.get_concrete_function(*arguments).graph.get_operations()}
    assert "TfmemRecurrent" in operations
    assert not operations & {"CudnnRNNV3", "CudnnRNNBackpropV3", "ReverseSequence", "ReverseV2"}


@pytest.mark.parametrize("mode", ["rnn_tanh", "rnn_relu"])
@pytest.mark.parametrize("op", ["CudnnRNN", "CudnnRNNV2", "CudnnRNNV3"])
def test_a_vector_of_weights_that_nobody_packed(op: str, mode: str) -> None:
    """It is taken apart; its gradient is put together again."""
    shapes = [(UNITS, INPUTS), (UNITS, UNITS), (UNITS,), (UNITS,)]
    sizes = [int(np.prod(shape)) for shape in shapes]

    def loops(x: Any, h: Any, vector: Any) -> tuple[Any, Any]:
        parts = [tf.reshape(part, shape) for part, shape in zip(tf.split(vector, sizes), shapes, strict=True)]
        state, outputs = h[0], []
        for step in range(STEPS):
            total = x[step] @ tf.transpose(parts[0]) + state @ tf.transpose(parts[1]) + parts[2] + parts[3]
            state = tf.tanh(total) if mode == "rnn_tanh" else tf.nn.relu(total)
            outputs.append(state)
        return tf.stack(outputs), state[None]

    def fused(x: Any, h: Any, vector: Any) -> tuple[Any, Any]:
        more: dict[str, Any] = {}
        if op == "CudnnRNNV3":
            more = {"sequence_lengths": tf.fill([tf.shape(x)[1]], tf.shape(x)[0]), "time_major": True}
        made = getattr(tf.raw_ops, op)(input=x, input_h=h, input_c=0.0, params=vector, rnn_mode=mode, **more)
        return made[0], made[1]

    def step(layer: Callable[..., tuple[Any, Any]]) -> Any:
        @tf.function(
            input_signature=[
                tf.TensorSpec([None, None, INPUTS]), tf.TensorSpec([1, None, UNITS]), tf.TensorSpec([None]),
            ],
            autograph=False,
        )  # fmt: skip
        def run(*arguments: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(arguments)
                outputs, last = layer(*arguments)
                loss = tf.reduce_sum(tf.sin(outputs)) + tf.reduce_sum(last)
            return outputs, last, tape.gradient(loss, arguments)

        return run

    vector = np.concatenate([numbers(*shape, seed=place).reshape(-1) * 0.3 for place, shape in enumerate(shapes)])
    arguments = [tf.constant(value) for value in (numbers(STEPS, 2, INPUTS), numbers(1, 2, UNITS), vector)]
    optimized = tfmem.optimize(step(fused))
    for a, b in zip(*(tf.nest.flatten(run(*arguments)) for run in (optimized, step(loops))), strict=True):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)
    assert op in tfmem.report(optimized).swapped[0]

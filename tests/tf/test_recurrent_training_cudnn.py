"""Layers and training steps as Keras emits them on GPUs, and cuDNN's vectors of weights: replaced, run, compared."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.recurrent_training import INPUTS, STEPS, TOLERANCE, UNITS, numbers

L = keras.layers
CUDNN = {"lstm": L.LSTM, "gru": L.GRU}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", CUDNN)
@pytest.mark.parametrize(("masked", "backwards"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("scaled", [False, True], ids=["", "weights computed"])
def test_what_keras_emits_on_gpus(
    kind: str, masked: bool, backwards: bool, scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CudnnRNNV3 has no kernel here; the replaced graph is compared with the layer's own loop."""
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
    assert len(report.replaced) == 1
    assert "CudnnRNNV3" in report.replaced[0]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("kind", CUDNN)
def test_nothing_is_copied_around_a_layer(kind: str, backwards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Keras wants in the order of a backward walk is turned around once, where it was three times."""
    facts = {**tf.sysconfig.get_build_info(), "is_cuda_build": True}
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: facts)
    layer = CUDNN[kind](UNITS, return_sequences=True, go_backwards=backwards)
    x = tf.constant(numbers(3, STEPS, INPUTS))
    wanted = layer(x)

    @tf.function(input_signature=[tf.TensorSpec([None, None, INPUTS])], autograph=False)
    def run(x: Any) -> Any:
        return layer(x)

    with monkeypatch.context() as patched:
        backend = importlib.import_module("keras.src.backend.tensorflow.rnn")
        patched.setattr(backend, "_is_gpu_available", lambda: True)
        turned = [op.type for op in run.get_concrete_function().graph.get_operations() if "Reverse" in op.type]
        assert turned == (["ReverseSequence", "ReverseSequence", "ReverseV2"] if backwards else [])
        optimized = tfmem.optimize(run)
    np.testing.assert_allclose(optimized(x), wanted, rtol=TOLERANCE, atol=TOLERANCE)
    assert "CudnnRNNV3" in tfmem.report(optimized).replaced[0]
    operations = [op.type for op in optimized.get_concrete_function(x).graph.get_operations()]
    assert operations.count("TfmemRecurrent") == 1
    assert operations.count("ReverseV2") == backwards
    assert not {*operations} & {"CudnnRNNV3", "ReverseSequence", "Transpose", "Fill"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", CUDNN)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("trained", [False, True], ids=["inference", "training"])
def test_two_directions_as_keras_emits_them_on_gpus(
    kind: str, masked: bool, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch; no sequence is turned around or transposed any more, and no state filled with zeros."""
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
    assert len(report.replaced) == 1
    assert "both directions in one launch" in report.replaced[0]
    operations = {op.type for op in optimized.get_concrete_function(*arguments).graph.get_operations()}
    assert "TfmemRecurrent" in operations
    assert not operations & {"CudnnRNNV3", "CudnnRNNBackpropV3", "ReverseSequence", "ReverseV2", "Transpose"}
    assert trained or "Fill" not in operations


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
    assert op in tfmem.report(optimized).replaced[0]

"""What TensorFlow Addons computes on the TensorFlow of today; `test_addons.py` runs this with TF_USE_LEGACY_KERAS=1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
import tfmem.addons as tfa
from custom_ops.recurrent import reference
from custom_ops.recurrent.cell import Cell
from tests import addons_cells

keras = tf.keras
UNITS, INPUTS, BATCH, TIME = 7, 4, 3, 11
Weights = dict[str, np.ndarray]


def _dense(weights: Weights, x: np.ndarray) -> np.ndarray:
    """The part of a step that no state enters, for the whole sequence at once."""
    return x @ weights["kernel"] + weights.get("bias", 0)


def _normalized(weights: Weights, x: np.ndarray) -> np.ndarray:
    """`_dense` of the layer-norm LSTM, whose input's product has a separate normalisation."""
    product = x @ weights["kernel"]
    centred = product - product.mean(-1, keepdims=True)
    normal = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-3)
    return normal * weights["kernel_norm/gamma"] + weights["kernel_norm/beta"] + weights["bias"]


@dataclass(frozen=True)
class Case:
    """A cell of Addons and what `tests.addons_cells` says that it computes."""

    name: str
    cell: Cell
    arguments: dict[str, Any] = field(default_factory=dict)
    states: int = 2
    vectors: tuple[str, ...] = ()
    inputs: Callable[[Weights, np.ndarray], np.ndarray] = _dense

    def layer(self, **options: Any) -> Any:
        """The cell in `keras.layers.RNN`, with no weight left at zero or one."""
        layer = keras.layers.RNN(getattr(tfa.rnn, self.name)(UNITS, **self.arguments), **options)
        layer(tf.zeros([BATCH, TIME, INPUTS]))
        random = np.random.default_rng(1)
        layer.set_weights([random.normal(size=weight.shape, scale=0.5) for weight in layer.get_weights()])
        return layer


CASES = [
    Case(
        "LayerNormLSTMCell",
        addons_cells.layer_norm_lstm(UNITS),
        vectors=("recurrent_norm/gamma", "recurrent_norm/beta", "state_norm/gamma", "state_norm/beta"),
        inputs=_normalized,
    ),
    Case(
        "PeepholeLSTMCell",
        addons_cells.peephole_lstm(),
        vectors=tuple(f"{gate}_gate_peephole_weights" for gate in ("input", "forget", "output")),
    ),
    Case("NASCell", addons_cells.nas()),
    Case(
        "NASCell",
        addons_cells.nas(use_bias=True),
        {"use_bias": True},
        vectors=("bias",),
        inputs=lambda weights, x: x @ weights["kernel"],
    ),
    Case(
        "LayerNormSimpleRNNCell",
        addons_cells.layer_norm_simple_rnn(UNITS),
        states=1,
        vectors=("gamma", "bias"),
        inputs=lambda weights, x: x @ weights["kernel"],
    ),
    Case("ESNCell", addons_cells.esn(leaky=0.7), {"leaky": 0.7}, states=1),
]
every_cell = pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join([case.name, *case.arguments]))


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_names_are_those_of_tensorflow_addons() -> None:
    import tensorflow_addons

    from tfmem.addons import rnn

    assert rnn is tensorflow_addons.rnn
    assert set(dir(tensorflow_addons)) == set(dir(tfa))
    with pytest.raises(AttributeError, match="no attribute 'rmn'"):
        tfa.rmn  # noqa: B018


@pytest.mark.parametrize("name", ["LAMB", "AdaBelief", "MultiOptimizer"])
def test_optimizers_train(name: str) -> None:
    model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
    model.build((None, 3))
    if name == "MultiOptimizer":  # reaches into keras.src itself
        optimizer = tfa.optimizers.MultiOptimizer([(keras.optimizers.Adam(0.01), layer) for layer in model.layers])
    else:
        optimizer = getattr(tfa.optimizers, name)(0.01)
    model.compile(optimizer, "mse")
    losses = model.fit(np.ones((8, 3)), np.full((8, 1), 5.0), epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def test_an_attention_decoder_runs_and_is_trained() -> None:
    memory = tf.random.stateless_normal([2, 5, 8], [1, 2])
    inputs = tf.random.stateless_normal([2, 4, 6], [3, 4])
    with tf.GradientTape() as tape:
        attention = tfa.seq2seq.LuongAttention(8, memory=memory)
        cell = tfa.seq2seq.AttentionWrapper(keras.layers.LSTMCell(8), attention)
        decoder = tfa.seq2seq.BasicDecoder(cell, tfa.seq2seq.TrainingSampler(), output_layer=keras.layers.Dense(3))
        start = cell.get_initial_state(batch_size=2, dtype=tf.float32)
        outputs, _, lengths = decoder(inputs, initial_state=start, sequence_length=[4, 3])
        loss = tfa.seq2seq.sequence_loss(outputs.rnn_output, tf.ones([2, 4], tf.int32), tf.ones([2, 4]))
    assert outputs.rnn_output.shape == [2, 4, 3]
    assert lengths.numpy().tolist() == [4, 3]
    assert all(gradient is not None for gradient in tape.gradient(loss, decoder.trainable_variables))


def test_what_has_a_python_form_needs_no_compiled_op(recwarn: pytest.WarningsRecorder) -> None:
    ids = tf.constant([[[0, 1]], [[2, 3]], [[4, 5]]])  # [time, batch, beam]
    parents = tf.constant([[[0, 0]], [[1, 0]], [[1, 0]]])
    sequences = tfa.seq2seq.gather_tree_from_array(ids, parents, tf.constant([[3, 3]]))
    assert sequences.numpy().tolist() == [[[0, 1]], [[3, 2]], [[4, 5]]]
    assert not [warning for warning in recwarn if "could not be loaded" in str(warning.message)]
    with pytest.raises(tf.errors.NotFoundError, match="undefined symbol"):
        tfa.image.euclidean_dist_transform(tf.zeros([1, 8, 8, 1], tf.uint8))


@pytest.mark.sampled(2)
@every_cell
def test_the_cells_by_name_are_those_of_addons(case: Case) -> None:
    layer = case.layer(return_sequences=True, return_state=True)
    x = numbers(BATCH, TIME, INPUTS)
    states = [numbers(BATCH, UNITS, seed=2 + index) for index in range(case.states)]
    output, *finals = layer(tf.constant(x), initial_state=[tf.constant(state) for state in states])

    weights = {weight.name.split("/", 2)[2].split(":")[0]: weight.numpy().astype(float) for weight in layer.weights}
    gates = np.swapaxes(case.inputs(weights, x.astype(float)), 0, 1)
    outputs, ends = reference.run(
        case.cell,
        UNITS,
        [gates],
        [],
        [weights[name] for name in case.vectors],
        [weights["recurrent_kernel"]],
        [state.astype(float) for state in states],
    )
    np.testing.assert_allclose(output, np.swapaxes(outputs[0], 0, 1), rtol=2e-5, atol=2e-5)
    for final, end in zip(finals, ends, strict=True):
        np.testing.assert_allclose(final, end, rtol=2e-5, atol=2e-5)


def ops_of(function: Any) -> set[str]:
    """The ops of a concrete function and of every function that it calls."""
    graph = function.graph.as_graph_def()
    return {node.op for nodes in (graph.node, *(f.node_def for f in graph.library.function)) for node in nodes}


@pytest.mark.sampled(4)
@every_cell
@pytest.mark.parametrize("known", [False, True], ids=["any size", "one size"])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_cells_of_addons_are_replaced(case: Case, masked: bool, known: bool) -> None:
    layer = case.layer(return_sequences=True, return_state=True)
    batch, time = (BATCH, TIME) if known else (None, None)
    specs = [tf.TensorSpec([batch, time, INPUTS]), *([tf.TensorSpec([batch, time], tf.bool)] if masked else [])]

    @tf.function(input_signature=specs)
    def run(x: Any, mask: Any = None) -> Any:
        return layer(x, mask=mask)

    original = run.get_concrete_function()
    optimized = tfmem.optimize(original)
    assert "TfmemRecurrent" in ops_of(optimized), tfmem.report(optimized).to_text()
    assert not ops_of(optimized) & {"While", "StatelessWhile"}
    for batch, time in [(BATCH, TIME)] if known else [(BATCH, TIME), (1, 1), (33, 5)]:
        arguments = [tf.constant(numbers(batch, time, INPUTS, seed=time))]
        if masked:
            lengths = np.random.default_rng(batch).integers(time + 1, size=batch)
            arguments.append(tf.sequence_mask(lengths, time))
        for before, after in zip(original(*arguments), optimized(*arguments), strict=True):
            np.testing.assert_allclose(after, before, rtol=2e-5, atol=2e-5)


@pytest.mark.sampled(3)
@every_cell
def test_cells_of_addons_train_as_before(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFMEM_CACHE_DIR", "")
    x = numbers(32, TIME, INPUTS)

    def model() -> Any:
        keras.utils.set_random_seed(1)
        result = keras.Sequential([keras.Input((TIME, INPUTS)), case.layer(), keras.layers.Dense(1)])
        result.compile("sgd", "mse")
        return result

    plain, optimized = model(), tfmem.optimize(model())
    for each in (plain, optimized):
        each.fit(x, x[:, :, 0].sum(1), epochs=2, batch_size=8, verbose=0, shuffle=False)
    for before, after in zip(plain.get_weights(), optimized.get_weights(), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-4, atol=2e-5)
    if case.name != "LayerNormSimpleRNNCell":  # tf.nn.moments stops a gradient in it, so its training may be kept
        assert "replaced" in tfmem.report(optimized).to_text()

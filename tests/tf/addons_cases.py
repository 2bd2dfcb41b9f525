"""What TensorFlow Addons computes on the TensorFlow of today; `test_addons.py` runs this with TF_USE_LEGACY_KERAS=1."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfmem.addons as tfa

keras = tf.keras


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

"""Layers of Keras 3 and of tf_keras."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
import tf_keras

from benchmarks.recurrent.forms.kit import INPUTS, ROWS, STEPS, UNITS, Kit, Maker, Run

L = keras.layers


def _layer(make: Any, **options: Any) -> Maker:
    """The form of one layer with the given options."""

    def form(kit: Kit) -> Run:
        layer = kit.layer(make(UNITS, **options))
        return lambda x: layer(x, training=kit.training)

    return form


def _stack(kit: Kit) -> Run:
    first, second = kit.layer(L.LSTM(UNITS, return_sequences=True)), kit.layer(L.GRU(UNITS))
    return lambda x: second(first(x))


def _masked(kit: Kit) -> Run:
    layer = kit.layer(L.LSTM(UNITS, return_sequences=True))
    lengths = tf.constant([STEPS, 3, 1, 4][:ROWS])
    return lambda x: layer(x, mask=tf.sequence_mask(lengths, STEPS))


def _both_ways(kit: Kit) -> Run:
    layer = kit.layer(L.Bidirectional(L.GRU(UNITS, return_sequences=True), merge_mode="sum"))
    return lambda x: layer(x, training=kit.training)


def _encoder_decoder(kit: Kit) -> Run:
    encoder, decoder = kit.layer(L.LSTM(UNITS, return_state=True)), kit.layer(L.LSTM(UNITS, return_sequences=True))

    def run(x: Any) -> Any:
        _, h, c = encoder(x)
        return decoder(tf.reverse(x, [1]), initial_state=[h, c])

    return run


def _stacked_cells(*sizes: int) -> Maker:
    def form(kit: Kit) -> Run:
        cells = [L.LSTMCell(size) for size in sizes]
        layer = kit.layer(L.RNN(L.StackedRNNCells(cells), return_sequences=True))
        return lambda x: layer(x, training=kit.training)

    return form


def _convolution(dimensions: int) -> Maker:
    def form(kit: Kit) -> Run:
        kind = L.ConvLSTM1D if dimensions == 1 else L.ConvLSTM2D
        layer = kit.layer(kind(2, 3, padding="same", return_sequences=True))
        return lambda x: layer(tf.reshape(tf.tile(x, [1, 1, 4]), [ROWS, STEPS, *[2] * (dimensions - 1), -1, INPUTS]))

    return form


class _Zoneout(keras.layers.Layer):  # type: ignore[misc]
    """A GRU cell whose units keep their old value at random, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.seeds = L.GRUCell(UNITS), keras.random.SeedGenerator(1)
        self.state_size, self.output_size = [UNITS], UNITS

    def call(self, x: Any, states: Any, training: bool = False) -> Any:
        """One step."""
        _, new = self.cell(x, states)
        old, new = states[0], new[0]
        if training:
            kept = keras.random.uniform(keras.ops.shape(old), seed=self.seeds) < 0.1
            new = keras.ops.where(kept, old, new)
        else:
            new = 0.1 * old + 0.9 * new
        return new, [new]


class _Dropped(keras.layers.Layer):  # type: ignore[misc]
    """A simple cell whose candidate is dropped by keras.random, with another mask in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.seeds = L.SimpleRNNCell(UNITS), keras.random.SeedGenerator(1)
        self.state_size, self.output_size = [UNITS], UNITS

    def call(self, x: Any, states: Any, training: bool = False) -> Any:
        """One step."""
        _, new = self.cell(x, states)
        new = keras.random.dropout(new[0], 0.2, seed=self.seeds) if training else new[0]
        return new, [new]


def _cell(kind: Any) -> Maker:
    def form(kit: Kit) -> Run:
        layer = kit.layer(L.RNN(kind(), return_sequences=True))
        return lambda x: layer(x, training=kit.training)

    return form


FORMS: dict[str, Maker] = {
    "keras LSTM": _layer(L.LSTM),
    "keras GRU": _layer(L.GRU, return_sequences=True),
    "keras GRU, reset_after=False": _layer(L.GRU, reset_after=False),
    "keras SimpleRNN, relu": _layer(L.SimpleRNN, activation="relu"),
    "keras LSTM, swish and hard_sigmoid": _layer(L.LSTM, activation="swish", recurrent_activation="hard_sigmoid"),
    "keras LSTM, go_backwards": _layer(L.LSTM, go_backwards=True, return_sequences=True),
    "keras LSTM, unroll": _layer(L.LSTM, unroll=True, return_sequences=True),
    "keras LSTM, dropout and recurrent_dropout": _layer(L.LSTM, dropout=0.2, recurrent_dropout=0.2),
    "keras LSTM with a mask": _masked,
    "keras LSTM and GRU, stacked layers": _stack,
    "keras Bidirectional GRU, summed": _both_ways,
    "keras LSTM encoder and decoder": _encoder_decoder,
    "keras StackedRNNCells, equal sizes": _stacked_cells(UNITS, UNITS),
    "keras StackedRNNCells, sizes 8 and 5": _stacked_cells(UNITS, 5),
    "keras ConvLSTM1D": _convolution(1),
    "keras ConvLSTM2D": _convolution(2),
    "keras cell with zoneout by keras.random": _cell(_Zoneout),
    "keras cell with dropout by keras.random": _cell(_Dropped),
    "tf_keras LSTM": _layer(tf_keras.layers.LSTM, return_sequences=True),
    "tf_keras GRU": _layer(tf_keras.layers.GRU),
}

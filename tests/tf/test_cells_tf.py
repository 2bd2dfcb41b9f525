"""The library of cells against Keras layers, and their gradients against those of the same cell in TensorFlow ops.

The cells of TensorFlow Addons are compared with the originals in `addons_cases.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from custom_ops.expr.nodes import Elementwise
from custom_ops.expr.table import FLOAT_OPS
from custom_ops.expr.table_entry import Array
from custom_ops.recurrent import cells
from custom_ops.recurrent.cell import Cell, CellConstant, Invariant, Product, RowSum, Sequence, State, Term, Vector
from custom_ops.recurrent.differentiate import differentiate
from custom_ops.recurrent.reference import run
from tests.gradient_reference import gradients
from tests.recurrent_cells import Arguments, arguments, library

UNITS, TIME, BATCH, INPUTS = 5, 6, 3, 4
LENGTHS_MASK = np.array([[1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0]], bool)


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    floats, policy = keras.backend.floatx(), keras.config.dtype_policy()
    keras.backend.set_floatx("float64")
    keras.config.set_dtype_policy("float64")  # Keras looks at floatx only until it has made a policy of it
    yield
    keras.backend.set_floatx(floats)
    keras.config.set_dtype_policy(policy)


def weights_of(layer: Any) -> list[Array]:
    """Random ones, biases too; kernel, recurrent kernel and bias, if there is one."""
    layer.build((BATCH, TIME, INPUTS))
    random = np.random.default_rng(0)
    layer.set_weights([random.normal(size=weight.shape) * 0.5 for weight in layer.get_weights()])
    return layer.get_weights()


def compare(layer: Any, cell: Cell, mask: Array | None = None, reverse: bool = False) -> None:
    """Outputs and final states of `layer` from a random initial state, with those of `cell` over its input gates."""
    kernel, recurrent, *bias = weights_of(layer)
    random = np.random.default_rng(1)
    inputs = random.normal(size=(BATCH, TIME, INPUTS))
    repeats = mask is not None and not layer.zero_output_for_mask
    states = [random.normal(size=(BATCH, UNITS)) for _ in range(len(cell.states) - repeats)]
    outputs, *finals = layer(inputs, initial_state=[tf.constant(state) for state in states], mask=mask)

    inputs_bias, *recurrent_bias = bias[0].reshape(-1, kernel.shape[1]) if bias else [0.0]
    sequences = [inputs.transpose(1, 0, 2) @ kernel + inputs_bias]
    sequences += [] if mask is None else [mask.T.astype(float)]
    first = [*states, np.zeros((BATCH, UNITS))] if repeats else states
    (found,), found_finals = run(cell, UNITS, sequences, [], recurrent_bias, [recurrent], first, reverse)
    expected = outputs.numpy().transpose(1, 0, 2)
    np.testing.assert_allclose(found, expected[::-1] if reverse else expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(found_finals[: len(finals)], finals, rtol=1e-12, atol=1e-13)


MASKS = pytest.mark.parametrize("mask", [None, "repeat", "zero"])


def options(mask: str | None) -> dict[str, bool]:
    return {"return_sequences": True, "return_state": True, "zero_output_for_mask": mask == "zero"}


@MASKS
def test_lstm(mask: Any) -> None:
    layer = keras.layers.LSTM(UNITS, use_cudnn=False, **options(mask))
    compare(layer, cells.lstm(mask=mask), LENGTHS_MASK if mask else None)


@MASKS
@pytest.mark.parametrize("reset_after", [True, False])
def test_gru(reset_after: bool, mask: Any) -> None:
    layer = keras.layers.GRU(UNITS, reset_after=reset_after, use_cudnn=False, **options(mask))
    compare(layer, cells.gru(reset_after, mask=mask), LENGTHS_MASK if mask else None)


@MASKS
def test_simple_rnn(mask: Any) -> None:
    compare(keras.layers.SimpleRNN(UNITS, **options(mask)), cells.simple_rnn(mask=mask), LENGTHS_MASK if mask else None)


def test_other_activations() -> None:
    layer = keras.layers.LSTM(
        UNITS, activation="softplus", recurrent_activation="hard_sigmoid", use_cudnn=False, **options(None)
    )
    compare(layer, cells.lstm("softplus", "hard_sigmoid"))
    layer = keras.layers.SimpleRNN(UNITS, activation="elu", use_bias=False, **options(None))
    compare(layer, cells.simple_rnn("elu"))


def test_backwards() -> None:
    layer = keras.layers.GRU(UNITS, go_backwards=True, use_cudnn=False, **options(None))
    compare(layer, cells.gru(), reverse=True)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "power": tf.pow, "equal": lambda x, y: tf.cast(tf.equal(x, y), x.dtype), "absolute": tf.abs,
    "greater": lambda x, y: tf.cast(tf.greater(x, y), x.dtype),
    "greater_equal": lambda x, y: tf.cast(tf.greater_equal(x, y), x.dtype),
    "floor_mod": tf.math.floormod,
    "negate": tf.negative, "reciprocal_sqrt": tf.math.rsqrt, "reciprocal": tf.math.reciprocal,
    "relu": tf.nn.relu, "softplus": tf.nn.softplus, "elu": tf.nn.elu,
    "stop_gradient": tf.stop_gradient,
    "relu6": tf.nn.relu6, "selu": tf.nn.selu, "softsign": tf.nn.softsign,
    "select": lambda condition, x, y: tf.where(tf.not_equal(condition, 0), x, y),
}  # fmt: skip
FUNCTIONS |= {op: getattr(tf.math, op) for op in FLOAT_OPS if op not in FUNCTIONS}


def run_tf(cell: Cell, tensors: Arguments) -> tuple[list[Any], list[Any]]:
    """`reference.run` in TensorFlow ops."""

    def column(tensor: Any, index: int) -> Any:
        return tensor[..., index * UNITS : (index + 1) * UNITS]

    def product(term: Term) -> Any:
        rows = tensors.matrices[term.matrix][term.row * UNITS : (term.row + 1) * UNITS]
        return tf.matmul(values[term.operand], column(rows, term.column), transpose_b=term.transposed)

    states, steps = list(tensors.states), []
    for step in range(TIME):
        values: list[Any] = []
        for node, scalar in zip(cell.nodes, cell.scalar, strict=True):
            match node:
                case Sequence(tensor=tensor, column=index):
                    now = tensors.sequences[tensor][step]
                    value = now[:, None] if scalar else column(now, index)
                case Invariant(tensor=tensor, column=index):
                    value = column(tensors.invariants[tensor], index)
                case Vector(tensor=tensor, column=index):
                    value = column(tensors.vectors[tensor], index)
                case CellConstant(value=number):
                    value = tf.constant(number, tf.float64)
                case State(index=index):
                    value = states[index]
                case Product(terms=terms):
                    value = tf.add_n([product(term) for term in terms])
                case RowSum(operand=operand):
                    value = tf.reduce_sum(values[operand], 1, keepdims=True)
                case Elementwise(op=op, arguments=places):
                    value = FUNCTIONS[op](*(values[place] for place in places))
            values.append(value)
        states = [values[place] for place in cell.states]
        steps.append([tf.concat([values[place] for place in columns], 1) for columns in cell.outputs])
    return [tf.stack(output) for output in zip(*steps, strict=True)], states


@pytest.mark.parametrize("name", library(UNITS))
def test_gradients_are_tensorflows(name: str) -> None:
    """Values are TensorFlow's, too."""
    cell = library(UNITS)[name]
    given = arguments(cell, UNITS, TIME, BATCH, masked=name.endswith(("masked", "zeroed")))
    tensors = Arguments(*([tf.constant(array) for array in arrays] for arrays in given))
    with tf.GradientTape() as tape:
        tape.watch(list(tensors))
        outputs, finals = run_tf(cell, tensors)
    expected, expected_finals = run(cell, UNITS, *given)
    np.testing.assert_allclose(outputs, expected, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(finals, expected_finals, rtol=1e-11, atol=1e-12)

    random = np.random.default_rng(1)
    weights = [[random.normal(size=array.shape) for array in arrays] for arrays in (outputs, finals)]
    theirs = tape.gradient([*outputs, *finals], list(tensors), [tf.constant(w) for kind in weights for w in kind])
    ours = gradients(differentiate(cell), UNITS, *given, *weights)
    for kind in Arguments._fields:
        for our, their in zip(getattr(ours, kind), theirs[Arguments._fields.index(kind)], strict=True):
            np.testing.assert_allclose(our, 0 * our if their is None else their, rtol=1e-9, atol=1e-11, err_msg=kind)

"""Ways to write a loop over time: the counters, the lists, and the functions of TensorFlow and Keras."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from benchmarks.recurrent.forms.kit import INPUTS, ROWS, STEPS, UNITS, Kit, Maker, Run, time_major

v1 = tf.compat.v1


def _plain(kit: Kit) -> Any:
    w, r = kit.weight(INPUTS, UNITS), kit.weight(UNITS, UNITS)
    return lambda x, h: tf.tanh(x @ w + h @ r)


def _start() -> Any:
    return tf.zeros([ROWS, UNITS])


def _counted(start: Any, goes_on: Any, after: Any, read: Any, write: Any = None) -> Maker:
    """A while loop with a counter, that reads an item of each step and may write its state."""

    def form(kit: Kit) -> Run:
        cell = _plain(kit)

        def run(x: Any) -> Any:
            items, array = time_major(x), tf.TensorArray(tf.float32, STEPS)

            def body(i: Any, h: Any, array: Any) -> Any:
                h = cell(items[read(i)], h)
                return after(i), h, array.write(write(i), h) if write else array

            _, h, array = tf.while_loop(lambda i, *_: goes_on(i), body, (tf.constant(start), _start(), array))
            return (h, array.stack()) if write else h

        return run

    return form


def _autograph_range(*bounds: int) -> Maker:
    def form(kit: Kit) -> Run:
        cell = _plain(kit)

        def run(x: Any) -> Any:
            items, h, array = time_major(x), _start(), tf.TensorArray(tf.float32, STEPS)
            for t in tf.range(*bounds):
                h = cell(items[t], h)
                array = array.write(t, h)
            return h, array.stack()

        return run

    return form


def _autograph_while(kit: Kit) -> Run:
    cell = _plain(kit)

    def run(x: Any) -> Any:
        h, t, n = _start(), tf.constant(0), tf.shape(x)[1]
        while t < n:
            h = cell(x[:, t], h)
            t += 1
        return h

    return run


def _autograph_items(kit: Kit) -> Run:
    cell = _plain(kit)

    def run(x: Any) -> Any:
        h = _start()
        for item in time_major(x):
            h = cell(item, h)
        return h

    return run


def _scan(**options: Any) -> Maker:
    def form(kit: Kit) -> Run:
        cell = _plain(kit)
        return lambda x: tf.scan(lambda h, item: cell(item, h), time_major(x), _start(), **options)

    return form


def _fold(function: Any) -> Maker:
    def form(kit: Kit) -> Run:
        cell = _plain(kit)
        return lambda x: function(lambda h, item: cell(item, h), time_major(x), _start())

    return form


def _keras_scan(reverse: bool) -> Maker:
    def form(kit: Kit) -> Run:
        cell = _plain(kit)

        def step(h: Any, item: Any) -> Any:
            h = cell(item, h)
            return h, h

        return lambda x: keras.ops.scan(step, _start(), time_major(x), reverse=reverse)

    return form


def _keras_while(kit: Kit) -> Run:
    cell = _plain(kit)

    def run(x: Any) -> Any:
        return keras.ops.while_loop(lambda i, h: i < STEPS, lambda i, h: (i + 1, cell(x[:, i], h)), (0, _start()))[1]

    return run


def _arrays(kit: Kit) -> Run:
    cell = _plain(kit)

    def run(x: Any) -> Any:
        items = tf.TensorArray(tf.float32, STEPS).unstack(time_major(x))
        return tf.while_loop(lambda i, h: i < STEPS, lambda i, h: (i + 1, cell(items.read(i), h)), (0, _start()))[1]

    return run


def _gathered_int64(kit: Kit) -> Run:
    cell = _plain(kit)

    def run(x: Any) -> Any:
        n = tf.cast(tf.shape(x)[1], tf.int64)
        goes_on = lambda i, h: tf.logical_and(i < n, True)  # noqa: E731
        return tf.while_loop(
            goes_on, lambda i, h: (i + 1, cell(tf.gather(x, i, axis=1), h)), (tf.constant(0, tf.int64), _start())
        )[1]

    return run


class _Cell:
    """A cell with the attributes that TensorFlow 1 asks for."""

    state_size = output_size = UNITS

    def __init__(self, kit: Kit) -> None:
        self.cell = _plain(kit)

    def get_initial_state(self, inputs: Any = None, batch_size: Any = None, dtype: Any = None) -> Any:
        del inputs
        return tf.zeros([batch_size, UNITS], dtype)

    def zero_state(self, batch_size: Any, dtype: Any) -> Any:
        return tf.zeros([batch_size, UNITS], dtype)

    def __call__(self, x: Any, h: Any, scope: Any = None) -> Any:
        del scope
        new = self.cell(x, h)
        return new, new


def _dynamic_rnn(lengths: bool) -> Maker:
    def form(kit: Kit) -> Run:
        cell = _Cell(kit)
        given = tf.constant([STEPS, 2, 4, 5][:ROWS]) if lengths else None
        return lambda x: v1.nn.dynamic_rnn(cell, x, given, dtype=tf.float32)

    return form


def _static_rnn(kit: Kit) -> Run:
    cell = _Cell(kit)
    return lambda x: v1.nn.static_rnn(cell, tf.unstack(x, axis=1), dtype=tf.float32)[1]


def _unstacked(last: bool, stack: bool, ordered: int = 1) -> Maker:
    def form(kit: Kit) -> Run:
        cell = _plain(kit)

        def run(x: Any) -> Any:
            h, outputs = _start(), []
            for item in tf.unstack(x, axis=1)[::ordered]:
                h = cell(item, h)
                outputs.append(h)
            return [*([h] if last else []), *([tf.stack(outputs, 1)] if stack else [])]

        return run

    return form


def _sliced(ordered: int, stack: bool = False) -> Maker:
    def form(kit: Kit) -> Run:
        cell = _plain(kit)

        def run(x: Any) -> Any:
            h, outputs = _start(), []
            for t in range(STEPS)[::ordered]:
                h = cell(x[:, t], h)
                outputs.append(h)
            return tf.stack(outputs, 1) if stack else h

        return run

    return form


def _function_cell(kit: Kit) -> Run:
    cell = tf.function(_plain(kit))

    def run(x: Any) -> Any:
        h = _start()
        for t in range(STEPS):
            h = cell(x[:, t], h)
        return h

    return run


def _list_of_scalars(kit: Kit) -> Run:
    """The energy of each step's state, a scalar in a list."""
    cell = _plain(kit)

    def run(x: Any) -> Any:
        items, array = time_major(x), tf.TensorArray(tf.float32, STEPS)

        def body(i: Any, h: Any, array: Any) -> Any:
            h = cell(items[i], h)
            return i + 1, h, array.write(i, tf.reduce_mean(h**2))

        _, h, array = tf.while_loop(lambda i, *_: i < STEPS, body, (0, _start(), array))
        return h, array.stack()

    return run


n = STEPS
FORMS: dict[str, Maker] = {
    "tf.while_loop, i < n": _counted(0, lambda i: i < n, lambda i: i + 1, lambda i: i, lambda i: i),
    "tf.while_loop, i <= n - 1": _counted(0, lambda i: i <= n - 1, lambda i: i + 1, lambda i: i, lambda i: i),
    "tf.while_loop, n > i": _counted(0, lambda i: n > i, lambda i: 1 + i, lambda i: i, lambda i: i),
    "tf.while_loop, i != n": _counted(0, lambda i: tf.not_equal(i, n), lambda i: i + 1, lambda i: i),
    "tf.while_loop from 1, x[i - 1]": _counted(1, lambda i: i <= n, lambda i: i + 1, lambda i: i - 1, lambda i: i - 1),
    "tf.while_loop down to 0": _counted(n - 1, lambda i: i >= 0, lambda i: i - 1, lambda i: i, lambda i: i),
    "tf.while_loop, x[n - 1 - i]": _counted(0, lambda i: i < n, lambda i: i + 1, lambda i: n - 1 - i, lambda i: i),
    "tf.while_loop, x[n - 1 - i], written there": _counted(
        0, lambda i: i < n, lambda i: i + 1, lambda i: n - 1 - i, lambda i: n - 1 - i
    ),
    "tf.while_loop, every second item": _counted(0, lambda i: i < n, lambda i: i + 2, lambda i: i),
    "autograph, tf.range(n)": _autograph_range(STEPS),
    "autograph, tf.range(n - 1, -1, -1)": _autograph_range(STEPS - 1, -1, -1),
    "autograph, while t < n": _autograph_while,
    "autograph, for item in x": _autograph_items,
    "tf.scan": _scan(),
    "tf.scan, reverse": _scan(reverse=True),
    "tf.foldl": _fold(tf.foldl),
    "tf.foldr": _fold(tf.foldr),
    "keras.ops.scan": _keras_scan(False),
    "keras.ops.scan, reverse": _keras_scan(True),
    "keras.ops.while_loop": _keras_while,
    "TensorArray read": _arrays,
    "tf.gather(x, i, axis=1), int64 counter": _gathered_int64,
    "dynamic_rnn": _dynamic_rnn(False),
    "dynamic_rnn with lengths": _dynamic_rnn(True),
    "static_rnn": _static_rnn,
    "Python loop over tf.unstack, last": _unstacked(True, False),
    "Python loop over tf.unstack, stack": _unstacked(False, True),
    "Python loop over tf.unstack, stack and last": _unstacked(True, True),
    "Python loop over reversed tf.unstack": _unstacked(True, False, -1),
    "Python loop over x[:, t], last": _sliced(1),
    "Python loop over x[:, t], stack": _sliced(1, stack=True),
    "Python loop over x[:, t], backwards": _sliced(-1),
    "Python loop over x[:, t], the cell a tf.function": _function_cell,
    "tf.while_loop, a list of scalars": _list_of_scalars,
}

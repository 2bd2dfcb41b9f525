"""Steps whose Python function raises now and then, under a budget: which updates are made all the same.

That observed steps may go without them is documented (docs/offload.md): they wait for the step's last large op.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import tensorflow as tf

import tfmem
from tests.tf.memory_in_use import in_use

KIB = 1 << 10
CALLS = 12


class Net:
    """Counts its calls; a Python function in it, which nothing orders before or after that, raises in every second."""

    def __init__(self) -> None:
        self.w = tf.Variable(0.1 * tf.random.stateless_normal([64, 64], [1, 2]))
        self.count = tf.Variable(0)
        self.calls = 0

    def raises(self, loss: Any) -> Any:
        self.calls += 1
        if self.calls % 2:
            raise ValueError("as asked for")
        return loss

    def step(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for _ in range(4):
                h = tf.tanh(h @ self.w)
            loss = tf.reduce_mean(h * h)
        self.count.assign_add(1)
        result = tf.py_function(self.raises, [loss], tf.float32)
        self.w.assign_sub(0.01 * tape.gradient(loss, self.w))
        return result

    def counted(self, function: Any) -> list[int]:
        """The count after each call."""
        x, found = tf.ones([1024, 64]), []
        for _ in range(CALLS):
            with suppress(tf.errors.OpError):
                function(x)
            found.append(int(self.count))
        return found


def within(net: Net, **options: Any) -> Any:
    return tfmem.optimize(tf.function(net.step), memory_budget=1500 * KIB + in_use(), passes=("offload",), **options)


def test_steps_without_probes_do_as_tensorflow_does(flow: Any) -> None:
    net, plain = Net(), Net()
    function = within(net, observe=False)
    assert net.counted(function) == plain.counted(tf.function(plain.step)) == list(range(1, CALLS + 1))
    assert tfmem.report(function).decision == "moved"

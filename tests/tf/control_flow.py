"""Random functions of conditions, cases and loops in each other, of which only some results are read.

Without draws of random numbers: TensorFlow's loops run turns side by side, so that those in a body come in any order.
"""

import random

import tensorflow as tf

UNARY = [tf.sin, tf.tanh, tf.abs, tf.negative, tf.nn.relu, tf.sigmoid, lambda x: x * 0.5, lambda x: x + 1.0]
DEEPEST = 3


class Maker:
    """Writes one function; `variables` are what it reads and assigns."""

    def __init__(self, seed):
        self.seed = seed
        self.dice = random.Random(seed)
        self.variables = [tf.Variable(tf.fill([2, 2], (place + 1) / 3)) for place in range(3)]
        self.with_gradient = self.dice.random() < 0.5

    def __call__(self, x):
        self.dice = random.Random(self.seed)  # however often it is traced
        if not self.with_gradient:
            return [self.any(self.block([x, x * 2], DEEPEST)) + 0.0 for _ in range(2)]
        with tf.GradientTape() as tape:
            tape.watch(x)
            made = self.block([x, x * 2], DEEPEST)
            loss = tf.reduce_sum(self.any(made)) + tf.reduce_sum(self.any(made))
        gradients = tape.gradient(loss, [x, *self.variables], unconnected_gradients="zero")
        return [loss, *(each for each in gradients if self.dice.random() < 0.6)]

    def any(self, values):
        return self.dice.choice(values)

    def block(self, values, depth):
        values = list(values)
        for _ in range(self.dice.randint(1, 4)):
            kind = self.dice.random()
            if kind < 0.5 or depth == 0:
                values.append(self.any(UNARY)(self.any(values)))
            elif kind < 0.6:
                values.append(self.any(values) * self.any(self.variables))
            elif kind < 0.7:
                variable = self.any(self.variables)
                variable.assign(tf.tanh(self.any(values)) * 0.5 + 0.1)
                values.append(variable + 0.0)
            elif kind < 0.85:
                branches = self.branches(values, depth, 2)
                values += tf.cond(tf.reduce_sum(self.any(values)) > self.dice.uniform(-1, 1), *branches)
            elif kind < 0.93:
                values += self.loop(values, depth)
            else:
                number = tf.cast(tf.reduce_sum(tf.abs(self.any(values))) * 7, tf.int32) % 3
                values += tf.switch_case(number, self.branches(values, depth, 3))
        return values

    def branches(self, values, depth, count):
        results = self.dice.randint(1, 4)

        def branch():
            made = self.block(values, depth - 1)
            return [self.any(made) + 0.0 for _ in range(results)]

        return [branch] * count

    def loop(self, values, depth):
        before = [self.any(values) for _ in range(self.dice.randint(1, 4))]
        steps, sees = self.dice.randint(1, 3), self.dice.random() < 0.4

        def step(number, *variables):
            made = self.block([*variables, *(values if sees else ())], depth - 1)
            return [number + 1, *(self.any(made) * 0.9 for _ in variables)]

        return tf.while_loop(lambda number, *_: number < steps, step, [0, *before])[1:]

"""Random regions on the fake GPU, whose graphs run in any order that their edges allow. Run by test_fusion_gpu.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.expr.text import from_text
from custom_ops.fusion.region import Assign, Kernel, Read, Region, Step, TensorType, View
from tests.tf.fake_gpu import FakeGpu
from tests.tf.fusion_calls import product

pytest_plugins = ("tests.tf.fake_gpu",)

SIZE = 6
MEAN = from_text(
    "program 1\naxes 0 0\ntensor float32 2\ntensor float32 2\ninput 0 a0 a1\ninput 1 a0 a1\nadd 0 1\n"
    "constant float32 0.5\nmultiply 2 3\noutput 4 0 1\n"
)
SQUARE, FLAT = TensorType("float32", (SIZE, SIZE)), TensorType("float32", (SIZE * SIZE,))


class Drawn:
    """A region of means, products, views, and variables that are read and assigned, and what it computes."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.inputs = int(self.rng.integers(1, 3))
        self.variables = int(self.rng.integers(1, 4))
        self.values = [SQUARE] * self.inputs
        self.steps: list[Step] = []
        for _ in range(int(self.rng.integers(8, 30))):
            self.add()
        count = len(self.values)
        self.outputs = tuple(sorted({count - 1, *self.rng.integers(0, count, size=2).tolist()}))

    def add(self) -> None:
        made, kind = (
            len(self.values),
            self.rng.choice(["mean", "product", "product", "read", "assign", "update", "view"]),
        )
        variable = int(self.rng.integers(self.variables))
        if kind == "update":  # in place, if no other op holds the variable; a product reads it, too
            self.values += [SQUARE] * 3
            self.steps += [
                Read(variable, made),
                product((made, self.any_square(made)), made + 1, bool(self.rng.integers(2))),
                Kernel(MEAN, (made, self.any_square(made)), (made + 2,)),
                Assign(variable, made + 2),
            ]
            return
        if kind == "assign":
            self.steps.append(Assign(variable, self.any_square()))
            return
        self.values.append(FLAT if kind == "view" else SQUARE)
        if kind == "view":
            self.steps.append(View(self.any_square(made), made))
            self.values.append(SQUARE)
            self.steps.append(View(made, made + 1))
        elif kind == "read":
            self.steps.append(Read(variable, made))
        elif kind == "mean":
            self.steps.append(Kernel(MEAN, (self.any_square(made), self.any_square(made)), (made,)))
        else:
            pair = self.any_square(made), self.any_square(made)
            self.steps.append(product(pair, made, bool(self.rng.integers(2))))

    def any_square(self, end: int | None = None) -> int:
        """Mostly one of the last."""
        squares = [place for place, value in enumerate(self.values[:end]) if value is SQUARE]
        return int(self.rng.choice(squares[-5:] if self.rng.integers(3) else squares))

    def region(self) -> Region:
        return Region(self.inputs, (SQUARE,) * self.variables, tuple(self.values), tuple(self.steps), self.outputs)

    def run(self, inputs: list[Any], variables: list[Any]) -> tuple[list[Any], list[Any]]:
        """The outputs, and the variables then, as NumPy has them when one step runs after the other."""
        values, variables = list(inputs), list(variables)
        for step in self.steps:
            if isinstance(step, Assign):
                variables[step.variable] = values[step.value]
            elif isinstance(step, View):
                values.append(values[step.input].reshape(self.values[step.output].shape))
            elif isinstance(step, Read):
                values.append(variables[step.variable])
            elif isinstance(step, Kernel):
                values.append((values[step.inputs[0]] + values[step.inputs[1]]) / 2)
            else:
                left, right = (values[value] for value in step.inputs)
                values.append((left.T if b"transpose_a\x12\x02(\x01" in step.attrs else left) @ right)
        return [values[output] for output in self.outputs], variables


@pytest.mark.parametrize("seed", range(25))
def test_any_order_computes_the_same(gpu: FakeGpu, seed: int) -> None:
    drawn = Drawn(seed)
    region, rng = drawn.region(), np.random.default_rng(seed)
    programs = gpu.programs(region)

    def square() -> Any:
        return np.linalg.qr(rng.normal(size=(SIZE, SIZE)))[0].astype(np.float32)  # whose products stay small

    variables = [tf.Variable(square()) for _ in range(drawn.variables)]

    @tf.function
    def step(*args: Any) -> Any:
        return gpu.fusion(region, args, [variable.handle for variable in variables], programs)

    for run in range(4):
        inputs, before = [square() for _ in range(drawn.inputs)], [variable.numpy() for variable in variables]
        held = [variable.read_value() for variable in variables] if run == 1 else []
        outputs, after = drawn.run(
            [array.astype(np.float64) for array in inputs], [array.astype(np.float64) for array in before]
        )
        for found, expected in zip(step(*map(tf.constant, inputs)), outputs, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        for variable, expected in zip(variables, after, strict=True):
            np.testing.assert_allclose(variable, expected, rtol=1e-4, atol=1e-5)
        for tensor, array in zip(held, before, strict=False):
            np.testing.assert_array_equal(tensor, array)
        for variable in variables:
            variable.assign(square())

"""Conditions without Optionals: what XLA can compile, equal to what TensorFlow runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.tf.stitched_steps import close
from tfmem.capture.captured import Captured, every_node
from tfmem.capture.concrete_function import capture_concrete, restore_concrete
from tfmem.capture.optionals import OPTIONALS, without_optionals
from tfmem.capture.xla_function import XlaFunction, compilable

X = tf.constant(np.linspace(-0.5, 1.0, 24, dtype=np.float32).reshape(6, 4))


def either(x: Any, n: Any) -> Any:
    return tf.cond(n > 1, lambda: tf.tanh(x) * x, lambda: tf.exp(x) * tf.reduce_sum(x))


def nested(x: Any, n: Any) -> Any:
    def inner() -> Any:
        y = tf.sin(x)
        return tf.cond(n > 2, lambda: y * tf.exp(y), lambda: tf.concat([y, x], 1)[:, 2:6] * y)

    return tf.cond(n > 1, inner, lambda: x * x)


def one_of_three(x: Any, n: Any) -> Any:
    return tf.switch_case(n, [lambda: x * x, lambda: tf.exp(x), lambda: either(tf.sin(x), n)])


def in_turn(x: Any, n: Any) -> Any:
    for number in range(4):
        x = tf.cond(n > number, lambda x=x: tf.tanh(x) * x, lambda x=x: x)
    return x


def within_a_function(x: Any, n: Any) -> Any:
    return tf.function(either)(x, n)


def of_whole_numbers(x: Any, n: Any) -> Any:
    """The gradient reads the places of the largest."""
    return tf.cond(n > 1, lambda: tf.gather(x, tf.argmax(x)), lambda: tf.tile(tf.reduce_max(x, 0)[None], [4, 1]))


CASES = [either, nested, in_turn, within_a_function, of_whole_numbers]


def gradient_of(function: Callable[..., Any]) -> Any:
    @tf.function
    def step(x: Any, n: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x, n)
            loss = tf.reduce_sum(y**2)
        return y, tf.convert_to_tensor(tape.gradient(loss, x))

    return step


def captured_of(step: Any) -> Captured:
    return capture_concrete(step.get_concrete_function(X, tf.constant(0)))


def optionals_in(captured: Captured) -> int:
    return sum(node.op in OPTIONALS for node in every_node(reachable(captured).graph_def))


def reachable(captured: Captured) -> Captured:
    """`captured` with the functions alone that its nodes call."""
    library = {each.signature.name: each for each in captured.graph_def.library.function}
    waiting, called = [captured.graph_def], set()
    while waiting:
        part = waiting.pop()
        for node in getattr(part, "node", None) or part.node_def:
            for value in node.attr.values():
                for name in (value.func.name, *(each.name for each in value.list.func)):
                    if name in library and name not in called:
                        called.add(name)
                        waiting.append(library[name])
    graph_def = type(captured.graph_def)()
    graph_def.CopyFrom(captured.graph_def)
    del graph_def.library.function[:]
    graph_def.library.function.extend(each for name, each in library.items() if name in called)
    return replace(captured, graph_def=graph_def)


@pytest.mark.parametrize("compiled", [False, True], ids=["executor", "XLA"])
@pytest.mark.parametrize("function", CASES)
def test_results_and_gradients_are_equal(function: Callable[..., Any], compiled: bool) -> None:
    step = gradient_of(function)
    captured = captured_of(step)
    assert optionals_in(captured)
    found = without_optionals(captured)
    assert found is not None
    assert not optionals_in(found)
    concrete = step.get_concrete_function(X, tf.constant(0))
    if compiled:
        restored = restore_concrete(concrete, found, found.graph_def, kind=XlaFunction)
        restored.shapes = ((6, 4), ())
    else:
        restored = restore_concrete(concrete, found, found.graph_def)
    for n in range(4):
        for mine, expected in zip(restored(X, tf.constant(n)), step(X, tf.constant(n)), strict=True):
            close(mine, expected)


def test_small_conditions_are_selects_on_a_gpu() -> None:
    captured = captured_of(gradient_of(either))
    kinds = [{node.op for node in compilable(captured, on_a_gpu).graph_def.node} for on_a_gpu in (False, True)]
    assert "StatelessIf" in kinds[0] - kinds[1]
    assert "SelectV2" in kinds[1] - kinds[0]


def test_a_graph_without_any_is_left() -> None:
    captured = captured_of(tf.function(either))
    assert without_optionals(captured) is captured


def test_what_a_loop_keeps_of_its_conditions_is_left_alone() -> None:
    def looped(x: Any, n: Any) -> Any:
        return tf.while_loop(
            lambda i, _: i < 3, lambda i, y: (i + 1, either(y, n)), (tf.constant(0), x), maximum_iterations=3
        )[1]

    assert without_optionals(captured_of(gradient_of(looped))) is None


def test_one_of_several_branches_is_left_alone() -> None:
    assert without_optionals(captured_of(gradient_of(one_of_three))) is None


def test_what_is_taken_out_by_an_unknown_rank_is_no_scalar() -> None:
    captured = captured_of(gradient_of(either))
    # One Optional holds a matrix of the first branch, or a scalar of the other one.
    shapes = [
        node.attr["output_shapes"].list.shape[0]
        for function in captured.graph_def.library.function
        for node in function.node_def
        if node.op == "OptionalGetValue" and "true" in function.signature.name
    ]
    for shape in shapes:
        shape.Clear()
        shape.unknown_rank = True
    assert shapes
    assert without_optionals(captured) is None


def test_tensors_of_unknown_sizes_are_left_alone() -> None:
    step = tf.function(
        lambda x, n: gradient_of(either).python_function(x, n),
        input_signature=[tf.TensorSpec([None, 4]), tf.TensorSpec([], tf.int32)],
    )
    assert without_optionals(capture_concrete(step.get_concrete_function())) is None

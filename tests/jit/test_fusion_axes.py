"""A kernel over as many axes as a program has, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from custom_ops.expr.program import MOST_AXES, Program
from custom_ops.expr.text import from_text
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.jit.device import DeviceContext
from tests.fusion_kernels import Case, compare, varied

pytest_plugins = ("tests.fusion_device",)


def squares(count: int) -> Program:
    """The sum of the squares of each of so many vectors, and the sum of all of these."""
    lines = [f"input {axis} a{axis}" for axis in range(count)]
    lines += [f"square {axis}" for axis in range(count)]
    lines += [f"reduce sum {count + axis} {axis}" for axis in range(count)]
    total = 2 * count
    for axis in range(1, count):
        lines.append(f"add {total} {2 * count + axis}")
        total = len(lines) - 1
    lines += [f"output {total}", *(f"output {2 * count + axis}" for axis in range(count))]
    return from_text(f"program 1\naxes{' 0' * count}\n" + "tensor float32 1\n" * count + "\n".join(lines) + "\n")


@pytest.mark.parametrize("count", [33, MOST_AXES])
def test_vectors_none_of_which_is_as_long(device: DeviceContext, count: int) -> None:
    program = squares(count)
    random = np.random.default_rng(count)
    tensors = [random.uniform(-1, 1, 3 + 5 * axis).astype(np.float32) for axis in range(count)]
    shapes = [tensor.shape for tensor in tensors]
    found = [kernel.plan.configuration for kernel in varied(Pattern.of(program, shapes), shapes, most=2)]
    assert found
    compare(device, [Case(program, tensors, each.template, each.threads, each.vector) for each in found])

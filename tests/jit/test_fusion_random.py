"""Random programs by templates of every kind, on the CPU: integers, so that every order of a sum gives the same."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from custom_ops.errors import ProgramError
from custom_ops.expr.program import Program
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.jit.device import DeviceContext
from tests.fusion_kernels import Case, compare, varied
from tests.random_programs import ON_GPU, programs
from tests.tiers import examples

pytest_plugins = ("tests.fusion_device",)


@settings(max_examples=examples(24), derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(programs(ON_GPU), min_size=6, max_size=6), st.data())
def test_random_programs(
    device: DeviceContext, made: list[tuple[Program, list[NDArray[Any]]]], data: st.DataObject
) -> None:
    cases = []
    for program, tensors in made:
        shapes = [tensor.shape for tensor in tensors]
        try:
            program.sizes(shapes)
        except ProgramError:
            continue
        known = [tuple(size if data.draw(st.booleans()) else None for size in shape) for shape in shapes]
        kernels = varied(Pattern.of(program, known), shapes)
        assert kernels
        for number in {data.draw(st.integers(0, len(kernels) - 1)) for _ in range(3)}:
            found = kernels[number].plan.configuration
            cases.append(Case(program, tensors, found.template, 64, found.vector, 0.0, known, resident=40))
    compare(device, cases)

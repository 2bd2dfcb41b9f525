"""Random programs over tensors on the CPU, against their definition in NumPy: shapes, accesses, reductions, gathers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from custom_ops.errors import OpLibraryError, ProgramError
from custom_ops.expr import reference
from custom_ops.expr.program import Program
from custom_ops.expr.text import to_text
from tests.elementwise_edges import different
from tests.random_programs import Array, programs
from tests.tf.tile_programs import prepare
from tests.tiers import examples


@settings(max_examples=examples(400), suppress_health_check=list(HealthCheck))
@given(programs())
def test_a_random_program_is_the_reference_on_any_number_of_threads(case: tuple[Program, list[Array]]) -> None:
    program, tensors = case
    try:
        expected = reference.run(program, tensors)
    except ProgramError:
        expected = None
    prepared = prepare(to_text(program), program.axes, [tensor.shape for tensor in tensors])
    found: list[list[Array]] = []
    for threads in (1, 2, 4):
        outputs = [
            np.full([program.axes[axis] for axis in output.axes], 77).astype(
                reference.numpy_dtype(program.types[output.node].dtype)
            )
            for output in program.outputs
        ]
        if expected is None:
            with pytest.raises(OpLibraryError, match=r"is not in \[0, "):
                prepared.run(tensors, outputs, threads)
        else:
            prepared.run(tensors, outputs, threads)
            found.append(outputs)
    for outputs in found:
        for ours, first, theirs in zip(outputs, found[0], expected or [], strict=True):
            assert ours.tobytes() == first.tobytes()
            wrong = different(ours.reshape(-1), theirs.reshape(-1), 1e-6, atol=1e-6)
            assert not len(wrong), (ours.reshape(-1)[wrong][:5], theirs.reshape(-1)[wrong][:5], prepared.text)

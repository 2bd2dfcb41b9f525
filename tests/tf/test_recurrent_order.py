"""What waits for a loop waits for all that takes its place."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tests.tf.recurrent_replacements import BATCH, UNITS, compare, data, with_layers_replaced


@pytest.mark.parametrize("early", [False, True])
def test_an_assignment_behind_a_loop_waits_for_what_results_read(early: bool) -> None:
    """A projection that moves behind the loop reads its variable there."""
    recurrent, projection = (tf.Variable(data(UNITS, UNITS, seed=seed)) for seed in (1, 2))

    def run(h: Any) -> Any:
        def body(i: Any, left: Any, h: Any, outputs: Any) -> Any:
            h = tf.tanh(h @ recurrent)
            return i + 1, left - 1.0, h, outputs.write(i, tf.nn.softmax(tf.nn.softmax(h)) @ projection)

        def goes_on(i: Any, left: Any, *_: Any) -> Any:
            return (i < 20) & tf.reduce_any(left > 0.5) if early else i < 20

        outputs = tf.TensorArray(tf.float32, 20, element_shape=[BATCH, UNITS])
        found = tf.while_loop(goes_on, body, (0, tf.fill([BATCH], 13.0), h, outputs))
        for variable in (recurrent, projection):
            variable.assign(-variable)
        return found[2], found[3].stack()

    specs = [tf.TensorSpec([BATCH, UNITS])]
    trace, replaced, plan, _ = with_layers_replaced(run, *specs)
    assert len(plan.matches) == 1
    compare(trace, replaced, [data(BATCH, UNITS)])
    assigned, reads = set(), 0
    for op in replaced.graph.get_operations():
        if op.type == "AssignVariableOp":
            before, pending = {op}, [op]
            while pending:
                last = pending.pop()
                more = {tensor.op for tensor in last.inputs} | set(last.control_inputs)
                pending += more - before
                before |= more
            handle = op.inputs[0]
            readers = {reader for reader in handle.consumers() if reader.type == "ReadVariableOp"}
            assert readers <= before
            reads += len(readers)
            assigned.add(handle.name)
    assert len(assigned) == 2
    assert reads >= 4  # each variable by the loop, and by its assignment

"""Variables of TfmemFusion: read, locked and assigned as TensorFlow's own ops do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.fusion.region import Assign, Read, Region, Step, TensorType, View
from custom_ops.fusion.text import to_text
from custom_ops.load import load
from tests.tf.fusion_calls import call, run_region
from tests.tf.fusion_variables import ADD, FOUR, INCREMENT, kernel, ones
from tfmem.steps.dry_run import without_updates

# Reads another number than it writes.
ROTATE = """program 1
axes 4
tensor float32 1
input 0 -1*a0+3
output 0 0
"""
# Momentum, as TensorFlow's op has it: m = 0.9 m + g, w -= 0.5 m.
MOMENTUM = """program 1
axes 0
tensor float32 1
tensor float32 1
tensor float32 1
input 0 a0
input 1 a0
input 2 a0
constant float32 0.9
multiply 1 3
add 4 2
constant float32 0.5
multiply 5 6
subtract 0 7
output 8 0
output 5 0
"""


def address(variable: Any) -> int:
    """Where a variable's numbers lie: not in an array of NumPy's, if it was never given one."""
    return int(np.asarray(memoryview(variable.read_value())).__array_interface__["data"][0])


def test_a_variable_is_updated_where_it_lies() -> None:
    v = tf.Variable(ones())
    before = address(v)
    for _ in range(3):
        run_region(INCREMENT, [ones()], [v.handle])
    np.testing.assert_array_equal(v, [4] * 4)
    assert address(v) == before


@pytest.mark.parametrize("outputs", [(1,), (2,), (1, 2)], ids=["old", "new", "both"])
def test_a_dry_run_leaves_the_variable(outputs: tuple[int, ...]) -> None:
    region = Region(1, (FOUR,), INCREMENT.values, INCREMENT.steps, outputs)
    v = tf.Variable(ones())

    @tf.function
    def step(x: Any) -> Any:
        return run_region(region, [x], [v.handle])

    graph_def = without_updates(step.get_concrete_function(ones()).graph.as_graph_def())
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(graph_def, name="")
        node = next(each for each in graph.get_operations() if each.type == "TfmemFusion")
        assert node.get_attr("dry_run")
    kinds = {"args": [ones()], "variables": [v.handle], "T_out": [tf.float32] * len(outputs), "region": to_text(region)}
    for dry_run, values in ((True, [1, 2]), (True, [1, 2]), (False, [1, 2]), (True, [2, 3])):
        found = load().ops.tfmem_fusion(dry_run=dry_run, **kinds)
        for place, value in zip(outputs, found, strict=True):
            np.testing.assert_array_equal(value, [values[place - 1]] * 4)
    np.testing.assert_array_equal(v, [2] * 4)


def test_who_holds_the_old_value_keeps_it() -> None:
    v = tf.Variable(ones())
    held = v.read_value()
    run_region(INCREMENT, [ones()], [v.handle])
    np.testing.assert_array_equal(held, [1] * 4)
    np.testing.assert_array_equal(v, [2] * 4)


@pytest.mark.parametrize("outputs", [(1,), (2,), (1, 2)], ids=["old", "new", "both"])
def test_what_the_step_gives_is_the_values_own(outputs: tuple[int, ...]) -> None:
    region = Region(1, (FOUR,), INCREMENT.values, INCREMENT.steps, outputs)
    v = tf.Variable(ones())
    kept = [run_region(region, [ones()], [v.handle]) for _ in range(3)]
    for step, found in enumerate(kept):
        for place, value in zip(outputs, found, strict=True):
            np.testing.assert_array_equal(value, [step + place] * 4)
    np.testing.assert_array_equal(v, [4] * 4)


def test_a_read_sees_the_assignments_before_it() -> None:
    # old = v; v = old + x; new = v; v = new + old; gives old, new, and last the newest.
    steps = (
        Read(0, 1),
        kernel(ADD, (1, 0), (2,)),
        Assign(0, 2),
        Read(0, 3),
        kernel(ADD, (3, 1), (4,)),
        Assign(0, 4),
        Read(0, 5),
    )
    v = tf.Variable(ones())
    for old in (1, 3):
        found = run_region(Region(1, (FOUR,), (FOUR,) * 6, steps, (1, 3, 5)), [ones()], [v.handle])
        for value, wanted in zip(found, (old, old + 1, 2 * old + 1), strict=True):
            np.testing.assert_array_equal(value, [wanted] * 4)
    np.testing.assert_array_equal(v, [7] * 4)


def test_a_kernel_that_reads_elsewhere_does_not_write_in_place() -> None:
    steps = (Read(0, 0), kernel(ROTATE, (0,), (1,)), Assign(0, 1))
    region = Region(0, (FOUR,), (FOUR, FOUR), steps, ())
    v = tf.Variable([1.0, 2.0, 3.0, 4.0])
    run_region(region, [], [v.handle])
    np.testing.assert_array_equal(v, [4, 3, 2, 1])


def test_nobody_sees_an_update_before_its_assignment() -> None:
    # The sum is computed between the update and its assignment.
    steps: tuple[Step, ...] = (
        Read(0, 1),
        kernel(ADD, (1, 0), (2,)),
        Read(0, 3),
        kernel(ADD, (3, 0), (4,)),
        Assign(0, 2),
    )
    v = tf.Variable(ones())
    region = Region(1, (FOUR,), (FOUR,) * 5, steps, (4,))
    for old in (1, 11):
        np.testing.assert_array_equal(run_region(region, [10 * ones()], [v.handle])[0], [old + 10] * 4)
    np.testing.assert_array_equal(v, [21] * 4)


def test_several_variables_of_one_kernel() -> None:
    steps = (Read(0, 1), Read(1, 2), kernel(MOMENTUM, (1, 2, 0), (3, 4)), Assign(0, 3), Assign(1, 4))
    region = Region(1, (FOUR, FOUR), (FOUR,) * 5, steps, ())
    start = np.random.default_rng(0).normal(size=4).astype(np.float32)
    w, m, plain_w, plain_m = (tf.Variable(tf.zeros([4])) for _ in range(4))
    w.assign_add(start)
    plain_w.assign_add(start)
    places = address(w), address(m)
    for step in range(5):
        gradient = np.random.default_rng(step).normal(size=4).astype(np.float32)
        run_region(region, [gradient], [w.handle, m.handle])
        tf.raw_ops.ResourceApplyMomentum(var=plain_w.handle, accum=plain_m.handle, lr=0.5, grad=gradient, momentum=0.9)
    np.testing.assert_array_equal(w, plain_w)
    np.testing.assert_array_equal(m, plain_m)
    assert (address(w), address(m)) == places


def test_one_variable_by_two_names() -> None:
    # v0 = v0 + x; v1 = v1 + x, each of what it read at first, as TensorFlow's ops would in this order.
    steps = (
        Read(0, 1),
        Read(1, 2),
        kernel(ADD, (1, 0), (3,)),
        Assign(0, 3),
        kernel(ADD, (2, 0), (4,)),
        Assign(1, 4),
        Read(0, 5),
    )
    region = Region(1, (FOUR, FOUR), (FOUR,) * 6, steps, (1, 2, 5))
    v = tf.Variable(ones())
    found = run_region(region, [ones()], [v.handle, v.handle])
    for value, wanted in zip(found, (1, 1, 2), strict=True):
        np.testing.assert_array_equal(value, [wanted] * 4)
    np.testing.assert_array_equal(v, [2] * 4)


def test_a_read_only_name_of_an_assigned_variable() -> None:
    steps = (Read(0, 1), kernel(ADD, (1, 0), (2,)), Assign(0, 2), Read(1, 3))
    region = Region(1, (FOUR, FOUR), (FOUR,) * 4, steps, (3,))
    v = tf.Variable(ones())
    np.testing.assert_array_equal(run_region(region, [ones()], [v.handle, v.handle])[0], [2] * 4)


def test_one_value_for_two_variables() -> None:
    steps = (Read(0, 1), kernel(ADD, (1, 0), (2,)), Assign(0, 2), Assign(1, 2))
    region = Region(1, (FOUR, FOUR), (FOUR,) * 3, steps, ())
    v, w = tf.Variable(ones()), tf.Variable(ones())
    for _ in range(3):
        run_region(region, [ones()], [v.handle, w.handle])
        v.assign_add(ones())
    np.testing.assert_array_equal(v, [7] * 4)
    np.testing.assert_array_equal(w, [6] * 4)


def test_an_input_is_assigned_as_it_is() -> None:
    region = Region(1, (FOUR,), (FOUR,), (Assign(0, 0),), (0,))
    v, x = tf.Variable(ones()), 5 * ones()
    (found,) = run_region(region, [x], [v.handle])
    run_region(INCREMENT, [ones()], [v.handle])
    for value in (found, x):
        np.testing.assert_array_equal(value, [5] * 4)
    np.testing.assert_array_equal(v, [6] * 4)


def test_a_view_of_a_variable_is_assigned() -> None:
    two = TensorType("float32", (2, 2))
    steps = (Read(0, 1), View(1, 2), kernel(ADD, (2, 0), (3,)), View(3, 4), Assign(0, 4))
    v = tf.Variable(tf.ones([2, 2]))
    place = address(v)
    region = Region(1, (two,), (FOUR, two, FOUR, FOUR, two), steps, ())
    for _ in range(2):
        run_region(region, [ones()], [v.handle])
    np.testing.assert_array_equal(v, [[3, 3], [3, 3]])
    assert address(v) == place


def test_variables_that_are_accessed_sparsely_are_never_shared() -> None:
    """Such an access makes TensorFlow copy a variable when it is read, and write to it under no exclusive lock."""
    region = Region(1, (FOUR,), INCREMENT.values, INCREMENT.steps, (1, 2))
    v = tf.Variable(ones())
    v.scatter_nd_add([[0]], [1.0])
    old, new = run_region(region, [ones()], [v.handle])
    given = tf.identity(5 * ones())
    run_region(Region(1, (FOUR,), (FOUR,), (Assign(0, 0),), ()), [given], [v.handle])
    v.scatter_nd_add([[1]], [1.0])  # where it lies
    for value, wanted in ((old, [2, 1, 1, 1]), (new, [3, 2, 2, 2]), (given, [5] * 4), (v, [5, 6, 5, 5])):
        np.testing.assert_array_equal(value, wanted)


def test_a_variable_that_is_assigned_between_steps() -> None:
    v = tf.Variable(ones(), shape=tf.TensorShape([None]))
    any_size = TensorType("float32", (None,))
    region = Region(1, (any_size,), (any_size,) * 3, INCREMENT.steps, ())
    step = tf.function(lambda x: run_region(region, [x], [v.handle]), reduce_retracing=True)
    for count in (4, 7, 4):
        v.assign(np.arange(count))
        step(ones(count))
        np.testing.assert_array_equal(v, np.arange(count) + 1)


def test_a_variable_that_is_restored_between_steps(tmp_path: Path) -> None:
    v = tf.Variable(ones())
    checkpoint = tf.train.Checkpoint(v=v)
    path = checkpoint.save(str(tmp_path / "at_one"))
    for _ in range(2):
        run_region(INCREMENT, [ones()], [v.handle])
        checkpoint.restore(path)
        np.testing.assert_array_equal(v, [1] * 4)


def test_a_variable_without_a_value() -> None:
    handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[4], shared_name="never_assigned")
    with pytest.raises(tf.errors.FailedPreconditionError) as wanted:
        tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
    with pytest.raises(tf.errors.FailedPreconditionError) as found:
        run_region(INCREMENT, [ones()], [handle])
    words = str(wanted.value).partition("never_assigned")[0]
    assert len(words) > 20
    assert words.partition("}}")[2] in str(found.value) or words in str(found.value)
    assign = Region(1, (FOUR,), (FOUR,), (Assign(0, 0),), ())
    run_region(assign, [ones()], [handle])
    np.testing.assert_array_equal(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32), [1] * 4)


def test_a_variable_of_another_type() -> None:
    whole = tf.Variable(tf.ones([4], tf.int32))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"wrong dtype\. Expected float got int32"):
        run_region(INCREMENT, [ones()], [whole.handle])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"wrong dtype\. Expected int32 got float"):
        run_region(Region(1, (FOUR,), (FOUR,), (Assign(0, 0),), ()), [ones()], [whole.handle])
    longer = tf.Variable(tf.ones([5]))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"value 1 has shape \[5\]; expected \[4\]"):
        run_region(INCREMENT, [ones()], [longer.handle])
    np.testing.assert_array_equal(longer, [1] * 5)


def test_a_resource_that_is_no_variable() -> None:
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
    with pytest.raises(tf.errors.OpError):
        run_region(INCREMENT, [ones()], [table.resource_handle])


def test_calls_take_variables() -> None:
    # rows = v[x]; w += rows; v is then updated by TensorFlow's own op, and read.
    whole, row = TensorType("int32", (None,)), TensorType("float32", (None,))
    apply = call("ResourceScatterAdd", (0, 1), (), (0,), dtype=tf.float32, Tindices=tf.int32)
    steps = (
        call("ResourceGather", (0,), (1,), (0,), dtype=tf.float32, Tindices=tf.int32),
        Read(1, 2),
        kernel(ADD, (2, 1), (3,)),
        Assign(1, 3),
        apply,
        Read(0, 4),
    )
    region = Region(1, (row, row), (whole, row, row, row, row), steps, (1, 4))
    v, w = tf.Variable(np.float32([1, 2, 3])), tf.Variable([10.0, 20.0])
    for factor in (1, 2):
        rows, after = run_region(region, [np.int32([2, 0])], [v.handle, w.handle])
        np.testing.assert_array_equal(rows, factor * np.float32([3, 1]))
        np.testing.assert_array_equal(after, [2 * factor, 2, 6 * factor])
    np.testing.assert_array_equal(v, [4, 2, 12])
    np.testing.assert_array_equal(w, [10 + 3 + 6, 20 + 1 + 2])


def test_a_call_of_the_variable_that_is_assigned_does_not_wait_for_itself() -> None:
    whole = TensorType("int32", (None,))
    gather = call("ResourceGather", (0,), (1,), (0,), dtype=tf.float32, Tindices=tf.int32)
    steps = (gather, Read(1, 2), kernel(ADD, (2, 1), (3,)), Assign(1, 3))
    region = Region(1, (FOUR, FOUR), (whole, FOUR, FOUR, FOUR), steps, ())
    v = tf.Variable(np.float32([1, 2, 3, 4]))
    run_region(region, [np.int32([3, 2, 1, 0])], [v.handle, v.handle])
    np.testing.assert_array_equal(v, [5] * 4)


def test_what_a_call_keeps_is_its_own() -> None:
    # AssignVariableOp makes its input the variable's memory.
    region = Region(
        1,
        (FOUR,),
        (FOUR, FOUR),
        (kernel(ADD, (0, 0), (1,)), call("AssignVariableOp", (1,), (), (0,), dtype=tf.float32)),
        (),
    )
    v, w = tf.Variable(ones()), tf.Variable(ones())
    step = tf.function(lambda x, handle: run_region(region, [x], [handle]))
    step(ones(), v.handle)
    step(5 * ones(), w.handle)
    np.testing.assert_array_equal(v, [2] * 4)
    np.testing.assert_array_equal(w, [10] * 4)

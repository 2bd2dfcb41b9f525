"""Functions that went through capture, Grappler and restore compute what they computed before."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from graph_passes.errors import GraphError
from tfmem.capture.build import shaped_graph
from tfmem.capture.concrete_function import capture_concrete, restore_concrete
from tfmem.capture.grappler import run_grappler


def rewrite(cf, **kw):
    captured = run_grappler(capture_concrete(cf))
    return restore_concrete(cf, captured, captured.graph_def, **kw)


def state(variables):
    return [variable.numpy() for variable in variables]


def check_same(cf, variables, *inputs, steps=3, rtol=0.0):
    """Runs `cf` and its rewritten twin from the same state; outputs and variables must agree after
    every step.
    """
    twin = rewrite(cf)
    start = state(variables)
    expected = []
    for _ in range(steps):
        outputs = cf(*inputs)
        expected.append((tf.nest.map_structure(np.asarray, outputs, expand_composites=True), state(variables)))
    for variable, value in zip(variables, start, strict=True):
        variable.assign(value)
    for outputs, after in expected:
        actual = tf.nest.map_structure(np.asarray, twin(*inputs), expand_composites=True)
        tf.nest.assert_same_structure(actual, outputs, expand_composites=True)
        flat = zip(tf.nest.flatten(outputs), tf.nest.flatten(actual), strict=True)
        for old, new in [*flat, *zip(after, state(variables), strict=True)]:
            np.testing.assert_allclose(
                np.asarray(new, np.float64) if new.dtype.kind in "fV" else new,
                np.asarray(old, np.float64) if old.dtype.kind in "fV" else old,
                rtol=rtol,
                atol=rtol,
            )
    return twin


def ops_of(twin):
    return [op.type for op in twin.graph.get_operations()]


def test_gradient_tape_step():
    weights, bias = tf.Variable(tf.ones([8, 4])), tf.Variable(tf.zeros([4]))

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.nn.relu(x @ weights + bias) - y) ** 2)
        for variable, gradient in zip([weights, bias], tape.gradient(loss, [weights, bias]), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    cf = step.get_concrete_function(tf.TensorSpec([None, 8]), tf.TensorSpec([None, 4]))
    twin = check_same(cf, [weights, bias], tf.random.uniform([5, 8], seed=1), tf.random.uniform([5, 4], seed=2))
    assert twin.variables[0] is weights


def test_nested_functions_are_inlined():
    """What XLA compiles, too, where it updates variables."""
    weights = tf.Variable(tf.random.stateless_uniform([8, 8], [1, 2]))

    @tf.function(experimental_attributes={"_noinline": True})
    def kept(x):
        weights.assign(weights * 0.9)
        return tf.nn.relu(x @ weights) + tf.tanh(x @ weights)

    @tf.function(jit_compile=True)
    def compiled(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(kept(x))
        gradient = tape.gradient(loss, weights)
        weights.assign_sub(0.01 * gradient)
        return loss, gradient

    @tf.function
    def step(x):
        return compiled(x)

    cf = step.get_concrete_function(tf.TensorSpec([3, 8]))
    captured = run_grappler(capture_concrete(cf))
    ops = {node.op for node in captured.graph_def.node}
    assert not ops & {"PartitionedCall", "StatefulPartitionedCall"}
    assert {"ReluGrad", "TanhGrad"} <= ops
    order = captured.creation_order
    assert len(set(order)) == len(order)
    relu = next(place for place, name in enumerate(order) if name.endswith("/Relu"))
    relu_grad = next(place for place, name in enumerate(order) if name.endswith("/ReluGrad"))
    assert relu < relu_grad
    check_same(cf, [weights], tf.random.uniform([3, 8], seed=3), rtol=1e-5)


def test_what_xla_compiles_is_called():
    """On a CPU nothing else runs convolutions of groups in three dimensions, and their gradients."""
    kernel = tf.Variable(tf.random.stateless_normal([2, 2, 2, 2, 6], [1, 2]))
    bias = tf.Variable(tf.zeros([6]))

    @tf.function
    def convolution(x):
        return tf.nn.convolution(x, kernel, [2, 2, 2], "VALID")

    compiled = tf.function(lambda x: convolution(x) * 1.0, jit_compile=True)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.relu(tf.nn.bias_add(compiled(x), bias)))
        for variable, gradient in zip([kernel, bias], tape.gradient(loss, [kernel, bias]), strict=True):
            variable.assign_sub(0.01 * gradient)
        return loss

    cf = step.get_concrete_function(tf.TensorSpec([2, 8, 8, 8, 4]))
    captured = run_grappler(capture_concrete(cf))
    called = [node for node in captured.graph_def.node if "PartitionedCall" in node.op]
    assert len(called) == 2
    assert not [node for node in captured.graph_def.node if "Conv3D" in node.op]
    check_same(cf, [kernel, bias], tf.random.uniform([2, 8, 8, 8, 4], seed=3), rtol=1e-5)


def test_control_flow_stays_functional():
    scale = tf.Variable(2.0)

    @tf.function
    def step(x, flag):
        _, y = tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * scale), [0, x])
        y = tf.cond(flag, lambda: y + scale, lambda: tf.exp(-y))
        scale.assign_add(0.5)
        return y, scale.read_value()

    cf = step.get_concrete_function(tf.TensorSpec([4]), tf.TensorSpec([], tf.bool))
    for flag in (True, False):
        twin = check_same(cf, [scale], tf.random.uniform([4], seed=1), tf.constant(flag))
    assert not {"Switch", "Enter"} & set(ops_of(twin))
    loops = [op for op in twin.graph.get_operations() if op.type in ("While", "StatelessWhile")]
    assert loops
    assert loops[0].get_attr("_lower_using_switch_merge")


def test_gradient_through_loop():
    weight = tf.Variable([1.5, 0.5])

    @tf.function
    def step(n):
        with tf.GradientTape() as tape:
            y = tf.constant([1.0, 2.0])
            for _ in tf.range(n):
                y = tf.tanh(y * weight)
            loss = tf.reduce_sum(y)
        gradient = tape.gradient(loss, weight)
        weight.assign_sub(gradient)
        return gradient

    check_same(step.get_concrete_function(tf.TensorSpec([], tf.int32)), [weight], tf.constant(4))


def test_random_state_advances_alike():
    generator = tf.random.Generator.from_seed(7)

    @tf.function
    def step():
        return generator.normal([3]), tf.random.stateless_normal([2], [1, 2])

    check_same(step.get_concrete_function(), [generator.state])


def test_stateful_random_ops_survive():
    @tf.function
    def step(x):
        return tf.nn.dropout(x, 0.5, seed=3) + tf.random.uniform([100])

    twin = rewrite(step.get_concrete_function(tf.TensorSpec([100])))
    assert ops_of(twin).count("RandomUniform") == 2
    first, second = twin(tf.ones([100])), twin(tf.ones([100]))
    assert not np.array_equal(first, second)
    assert np.min(first) >= 0
    assert np.max(first) <= 3


def test_prints_and_asserts_keep_their_order(capfd):
    counter = tf.Variable(0)

    @tf.function
    def step(x):
        tf.print("before", counter)
        counter.assign_add(1)
        tf.print("after", counter)
        tf.debugging.assert_less(x, 5.0, message="too large")
        return x * 2

    twin = rewrite(step.get_concrete_function(tf.TensorSpec([])))
    for _ in range(5):
        twin(tf.constant(1.0))
    printed = capfd.readouterr().err
    lines = [line for line in printed.splitlines() if line.startswith(("before", "after"))]
    assert lines == [line for n in range(5) for line in (f"before {n}", f"after {n + 1}")]
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        twin(tf.constant(6.0))


def test_py_function_and_lookup_table():
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([1, 2], tf.int64)),
        default_value=-1,
    )
    seen = []

    @tf.function
    def step(words):
        numbers = table.lookup(words)
        tf.py_function(lambda value: seen.append(value.numpy().tolist()), [numbers], [])
        return tf.numpy_function(lambda value: value * 10, [numbers], tf.int64)

    check_same(step.get_concrete_function(tf.TensorSpec([3], tf.string)), [], tf.constant(["b", "a", "c"]))
    assert seen == [[2, 1, -1]] * 6


def test_custom_gradient_and_captured_concrete_function():
    weight = tf.Variable([2.0, 3.0])

    @tf.custom_gradient
    def clipped(x):
        return x * x, lambda upstream: tf.clip_by_value(upstream * 2 * x, -1.0, 1.0)

    inner = tf.function(lambda x: clipped(x * weight)).get_concrete_function(tf.TensorSpec([2]))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(inner(x))
        gradient = tape.gradient(loss, weight)
        weight.assign_sub(0.1 * gradient)
        return {"loss": loss, "gradient": gradient}

    check_same(step.get_concrete_function(tf.TensorSpec([2])), [weight], tf.constant([1.0, 0.1]))


def test_structures_none_and_composite_tensors():
    @tf.function
    def step(inputs, scale=2.0, *, ragged):
        return {
            "nested": (inputs["a"] * scale, [None, inputs["b"]]),
            "ragged": ragged * 2.0,
            "sparse": tf.sparse.from_dense(inputs["a"]),
            "same": inputs["a"],
        }

    inputs = {"a": tf.constant([1.0, 0.0]), "b": tf.constant(3)}
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    cf = step.get_concrete_function(inputs, ragged=tf.RaggedTensorSpec([None, None], tf.float32))
    twin = rewrite(cf)
    old, new = cf(inputs, 2.0, ragged=ragged), twin(inputs, 2.0, ragged=ragged)
    tf.nest.assert_same_structure(old, new, expand_composites=True)
    assert new["nested"][1][0] is None
    assert isinstance(new["ragged"], tf.RaggedTensor)
    for one, other in zip(
        tf.nest.flatten(old, expand_composites=True),
        tf.nest.flatten(new, expand_composites=True),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
    assert twin.structured_input_signature == cf.structured_input_signature


def test_bfloat16_and_half():
    weight = tf.Variable(tf.ones([4, 4]))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            y = tf.cast(x, tf.bfloat16) @ tf.cast(weight, tf.bfloat16)
            loss = tf.reduce_sum(tf.cast(tf.nn.relu(y), tf.float32))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return tf.cast(y, tf.float16), y

    check_same(
        step.get_concrete_function(tf.TensorSpec([2, 4])),
        [weight],
        tf.random.uniform([2, 4], seed=1),
    )


def test_shapes_are_tightened_and_checked():
    weight = tf.Variable(tf.ones([8, 4]))
    cf = tf.function(lambda x: tf.nn.relu(x @ weight)).get_concrete_function(tf.TensorSpec([None, 8], name="x"))
    captured = run_grappler(capture_concrete(cf))
    twin = restore_concrete(cf, captured, captured.graph_def, {"x:0": (3, 8)})
    assert twin.outputs[0].shape == (3, 4)
    np.testing.assert_array_equal(twin(tf.ones([3, 8])), np.full([3, 4], 8.0))
    graph = shaped_graph(captured, feed_shapes={"x:0": (5, 8)})
    assert graph.get_tensor_by_name(captured.fetches[0]).shape == (5, 4)
    with pytest.raises(GraphError, match="shape"):
        restore_concrete(cf, captured, captured.graph_def, {"x:0": (3, 9)})


def test_an_edited_graph_runs():
    """x * w -> relu becomes x * w -> Identity -> relu, seen in the restored function's graph."""
    weight = tf.Variable([1.0, -1.0])
    cf = tf.function(lambda x: tf.nn.relu(x * weight)).get_concrete_function(tf.TensorSpec([2]))
    captured = run_grappler(capture_concrete(cf))
    edited = tf.compat.v1.GraphDef()
    edited.CopyFrom(captured.graph_def)
    relu = next(node for node in edited.node if node.op == "Relu")
    inserted = edited.node.add(name="tfmem/copy", op="Identity", input=[relu.input[0]])
    inserted.attr["T"].type = tf.float32.as_datatype_enum
    relu.input[0] = "tfmem/copy"
    twin = restore_concrete(cf, captured, edited)
    assert twin.graph.get_operation_by_name(relu.name).inputs[0].op.name == "tfmem/copy"
    np.testing.assert_array_equal(twin(tf.constant([2.0, 3.0])), [2.0, 0.0])


def test_a_missing_fetch_is_named():
    cf = tf.function(lambda x: x + 1).get_concrete_function(tf.TensorSpec([]))
    captured = capture_concrete(cf)
    empty = tf.compat.v1.GraphDef(versions=captured.graph_def.versions, node=[captured.graph_def.node[0]])
    with pytest.raises(GraphError, match="Identity"):
        restore_concrete(cf, captured, empty)


def test_called_from_a_function_and_from_threads():
    total = tf.Variable(0.0)
    cf = tf.function(lambda x: total.assign_add(tf.reduce_sum(x))).get_concrete_function(tf.TensorSpec([4]))
    twin = rewrite(cf)
    outer = tf.function(lambda x: twin(x) * 2)
    assert float(outer(tf.ones([4]))) == 8.0
    threads = [threading.Thread(target=lambda: [twin(tf.ones([4])) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert float(total) == 4 + 4 * 50 * 4


def test_survives_the_original():
    """The restored function owns its library: loop bodies stay when the traced function is gone."""

    def make():
        weight = tf.Variable(3.0)
        cf = tf.function(
            lambda x: tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y * weight), [0, x])[1]
        ).get_concrete_function(tf.TensorSpec([]))
        return rewrite(cf)

    assert float(make()(tf.constant(1.0))) == 9.0


def executed_ops(call, folder):
    """The profiler's record of `call`: it names every kernel that ran, in nested functions too."""
    call()
    with tf.profiler.experimental.Profile(str(folder)):
        call()
    return next(folder.rglob("*.xplane.pb")).read_bytes()


@pytest.mark.parametrize("nested", [False, True])
def test_grappler_stays_off_the_result(nested, tmp_path):
    """Grappler would remove the pair of negations (arithmetic optimizer); the result of tfmem still
    runs both.
    """
    cf = tf.function(tf.exp).get_concrete_function(tf.TensorSpec([3, 2]))
    captured = capture_concrete(cf)
    edited = tf.compat.v1.GraphDef()
    edited.CopyFrom(captured.graph_def)
    exp = next(node for node in edited.node if node.op == "Exp")
    for name, source in (("n1", exp.input[0]), ("n2", "n1")):
        edited.node.add(name=name, op="Neg", input=[source]).attr["T"].type = tf.float32.as_datatype_enum
    exp.input[0] = "n2"
    twin = restore_concrete(cf, captured, edited)
    call = tf.function(lambda x: twin(x) + 1) if nested else twin
    executed = executed_ops(lambda: call(tf.ones([3, 2])), tmp_path / "rewritten")
    assert b"n1:Neg" in executed
    assert b"n2:Neg" in executed
    plain = tf.function(lambda x: tf.exp(tf.negative(tf.negative(x))))
    assert b":Neg" not in executed_ops(lambda: plain(tf.ones([3, 2])), tmp_path / "plain")

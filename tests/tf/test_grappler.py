"""A step whose tensors move runs the very ops that TensorFlow would have run, so its numbers are the same bits."""

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, device_properties_pb2, meta_graph_pb2
from tensorflow.python.grappler import cluster as grappler_cluster
from tensorflow.python.grappler import tf_optimizer

from tests.tf.python_server import run_python
from tfmem.capture.build import shaped_graph
from tfmem.capture.concrete_function import capture_concrete, restore_concrete
from tfmem.capture.grappler import run_grappler
from tfmem.frontends.graph_def import capture_graph_def

ROOT = Path(__file__).parents[2]
NETS = ("residual", "transformer", "lstm", "gan", "accumulated")


def compare(names, onednn):
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": str(int(onednn)), "CUDA_VISIBLE_DEVICES": ""}
    done = run_python(["-m", "tests.tf.grappler_nets", *names], environment, ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(name="compared", scope="module")
def fixture_compared():
    return compare((*NETS, "averaged"), onednn=False)


@pytest.mark.parametrize("name", [*NETS, "averaged"])
def test_a_moved_step_runs_the_ops_that_tensorflow_would_run(name, compared):
    found = compared[name]
    theirs, ours = found["ops"]
    assert found["decision"] == "moved"
    assert found["moves"] > 0
    ours = Counter(ours) + Counter(found["once"])  # equal numbers are computed once
    if name == "lstm":  # its loop runs in pieces, so some ops are there several times
        ours, theirs = sorted(ours), sorted(theirs)
    if name in ("accumulated", "averaged"):  # no dependency optimizer beside a condition: it would drop these
        assert ours.pop("ShapeN") == 2
    assert ours == theirs


@pytest.mark.parametrize("name", NETS)
def test_outputs_are_equal_to_the_bit_without_onednn(name, compared):
    theirs, ours = compared[name]["outputs"]
    assert ours == theirs
    assert theirs[0] != theirs[-1]


def test_the_gradient_of_max_pooling_is_the_kernel_that_tensorflow_would_run():
    """OneDNN's, which asks the forward kernel which of equal numbers was the largest, reads straight from that one."""
    found = compare(["pooled"], onednn=True)["pooled"]
    theirs, ours = found["ops"]
    assert found["decision"] == "moved"
    assert found["moves"] > 0
    assert theirs["_MklNativeMaxPoolGrad"] == 2
    assert Counter(ours) + Counter(found["once"]) == theirs


def rewritten(function, *specs):
    concrete = function.get_concrete_function(*specs)
    captured = run_grappler(capture_concrete(concrete))
    return concrete, restore_concrete(concrete, captured, captured.graph_def)


def test_feeds_of_every_kind():
    """Feeds of unknown rank or size, empty, texts, handles, unread, fetched, waited for, and with taken names."""
    weights = tf.Variable(tf.ones([3, 3]))

    @tf.function
    def function(x, y, none, texts, ragged, unread, flag):
        with tf.control_dependencies([unread]):
            doubled = tf.ensure_shape(x, [None, 3]) @ weights * 2
        with tf.name_scope("x"):
            taken = tf.shape(x, name="shape")
        filled = tf.concat([none, tf.zeros([0, 3])], 0)
        return x, doubled, taken, tf.shape(y), filled, tf.strings.length(texts), ragged + 1.0, tf.cast(flag, tf.int32)

    x, ragged = tf.reshape(tf.range(12.0), [4, 3]), tf.ragged.constant([[1.0], [2.0, 3.0]])
    inputs = (x, tf.ones([2, 5]), tf.zeros([0, 3]), tf.constant(["a", "bc"]), ragged, tf.constant(1), tf.constant(True))
    specs = [tf.TensorSpec([None, 3]), tf.TensorSpec(None), *map(tf.type_spec_from_value, inputs[2:])]
    concrete, twin = rewritten(function, *specs)
    assert [op.type for op in twin.graph.get_operations()].count("EnsureShape") == 1  # the user's own
    results = [tf.nest.flatten(each(*inputs), expand_composites=True) for each in (concrete, twin)]
    for old, new in zip(*results, strict=True):
        np.testing.assert_array_equal(new, old)


def test_a_feed_waits_for_nothing():
    """What is read once a call becomes an argument, which may be made within an op's control dependencies."""

    @tf.function
    def step(x):
        with tf.control_dependencies([tf.identity(x, "removed")]):
            graph = tf.compat.v1.get_default_graph()
            key = graph.capture_call_time_value(lambda: tf.constant(3.0), tf.TensorSpec([], tf.float32), key="key")
        return x * key

    given = capture_concrete(step.get_concrete_function(tf.TensorSpec([2], tf.float32)))
    assert any(node.input[:] == ["^removed"] for node in given.graph_def.node if node.op == "Placeholder")
    captured = run_grappler(given)
    assert "removed" not in {op.name for op in shaped_graph(captured).get_operations()}


def test_nothing_is_folded_that_depends_on_a_tensor_made_outside():
    """As in Keras's Normalization with a given mean and variance: to the runtime such a tensor is an argument."""
    variance, axes = tf.constant([[1.0, 4.0, 9.0]]), tf.constant([1])

    @tf.function
    def function(x):
        return tf.reduce_sum(x / tf.maximum(tf.sqrt(variance), 1e-7), axes)

    concrete, twin = rewritten(function, tf.TensorSpec([2, 3]))
    assert {"Sqrt", "Maximum", "RealDiv"} <= {op.type for op in twin.graph.get_operations()}
    x = tf.random.stateless_normal([2, 3], [1, 2])
    np.testing.assert_array_equal(twin(x), concrete(x))


def test_a_draw_that_nobody_reads_is_not_made():
    @tf.function
    def inner(x):
        tf.random.uniform([7])
        return tf.nn.dropout(x, 0.5)

    @tf.function
    def function(x):
        tf.random.normal([3])
        return inner(x)

    _, twin = rewritten(function, tf.TensorSpec([4]))
    assert [op.type for op in twin.graph.get_operations() if op.type.startswith("Random")] == ["RandomUniform"]


def test_bodies_of_loops_are_fused_as_tensorflow_would():
    """TensorFlow lowers loops before its Grappler runs, so that it sees their ops on a device."""
    weights, bias = tf.Variable(tf.ones([3, 3])), tf.Variable(tf.zeros([3]))

    @tf.function
    def function(x):
        layer = lambda i, x: (i + 1, tf.nn.relu(tf.nn.bias_add(x @ weights, bias)))  # noqa: E731
        return tf.while_loop(lambda i, x: i < 3, layer, [0, x])[1]

    concrete, twin = rewritten(function, tf.TensorSpec([2, 3]))
    nodes = [node for body in twin.graph.as_graph_def().library.function for node in body.node_def]
    assert "_FusedMatMul" in {node.op for node in nodes}
    assert all(node.device == "" for node in nodes)
    np.testing.assert_array_equal(twin(tf.ones([2, 3])), concrete(tf.ones([2, 3])))


def branching(p, arithmetic, x, y, z):
    return tf.cond(p, lambda: arithmetic(x, y, z), lambda: (x, y))


def looping(p, arithmetic, x, y, z):
    return tf.while_loop(lambda x, y: p, lambda x, y: arithmetic(x, y, z), [x, y], maximum_iterations=2)


def nested(p, arithmetic, x, y, z):
    body = lambda x, y: branching(x[0, 0] > 0.0, arithmetic, x, y, z)  # noqa: E731
    return tf.while_loop(lambda x, y: p, body, [x, y], maximum_iterations=2)


@pytest.mark.parametrize("variables", [False, True])
@pytest.mark.parametrize("called", [branching, looping, nested])
def test_bodies_know_the_shapes_of_their_arguments(called, variables):
    """Grappler then makes one factor of two, and one sum of two: in TensorFlow it sees bodies within their caller."""
    inputs = tf.unstack(tf.random.stateless_normal([3, 16, 64], [1, 2]))
    held = [tf.Variable(each) for each in inputs]

    def arithmetic(x, y, z):
        x, y, z = (each.read_value() for each in held) if variables else (x, y, z)
        return x / 3.0 / 7.0, x + y + z

    @tf.function
    def function(p, *inputs):
        return called(p, arithmetic, *inputs)

    concrete, twin = rewritten(function, tf.TensorSpec([], tf.bool), *[tf.TensorSpec([16, 64])] * 3)
    library = twin.graph.as_graph_def().library.function
    nodes = [node for body in library for node in body.node_def]
    ops = [node.op for node in nodes if node.attr["T"].type == tf.float32.as_datatype_enum]
    assert (ops.count("Mul"), ops.count("AddN"), ops.count("AddV2")) == (1, 1, 0)
    assert "EnsureShape" not in {node.op for node in nodes}
    for flag in (tf.constant(True), tf.constant(False)):
        # a sum of three has an order that depends on what it may write over
        np.testing.assert_array_equal(twin(flag, *inputs)[0], concrete(flag, *inputs)[0])


def test_a_placeholder_of_an_old_graph_may_have_any_shape():
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [], name="x")
        tf.fill(tf.raw_ops.Shape(input=x), 1.0, name="out")
    source = graph.as_graph_def()
    source.versions.producer = 20
    found = run_grappler(capture_graph_def(source, ["x"], ["out"])).graph_def
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.graph_util.import_graph_def(found, name="")
        assert session.run("out:0", {"x:0": np.zeros([2, 3])}).shape == (2, 3)


def test_tensorflows_layout_optimizer_gives_up_on_dropout_by_itself():
    """Nothing of tfmem's is in here: docs/architecture.md says whose the message is. It may go when this fails."""
    gpu = "/job:localhost/replica:0/task:0/device:GPU:0"
    with tf.Graph().as_default() as graph, tf.device(gpu):
        x = tf.compat.v1.placeholder(tf.float32, [8, 16, 16, 4])
        kernel = tf.compat.v1.placeholder(tf.float32, [3, 3, 4, 4])
        dropped = tf.nn.experimental.stateless_dropout(tf.nn.conv2d(x, kernel, 1, "SAME"), 0.5, [1, 2])
        out = tf.nn.conv2d(dropped, kernel, 1, "SAME")
    meta_graph = meta_graph_pb2.MetaGraphDef(graph_def=graph.as_graph_def())
    meta_graph.collection_def["train_op"].node_list.value.append(out.op.name)
    config = config_pb2.ConfigProto()
    rewrite = config.graph_options.rewrite_options
    rewrite.optimizers.append("layout")
    rewrite.fail_on_optimizer_errors, rewrite.min_graph_nodes = True, -1
    device = device_properties_pb2.NamedDevice(name=gpu)
    device.properties.type = "GPU"
    device.properties.environment["architecture"] = "7.0"
    cluster = grappler_cluster.Cluster(devices=[device])
    try:
        with pytest.raises(tf.errors.InvalidArgumentError, match="SelectV2-2-TransposeNHWCToNCHW-LayoutOptimizer"):
            tf_optimizer.OptimizeGraph(config, meta_graph, cluster=cluster)
    finally:
        cluster.Shutdown()


def test_a_step_without_results_is_no_failure(caplog):
    """Grappler refuses a graph without fetches, which would be said as a failure."""

    @tf.function
    def step(data):
        del data

    found = run_grappler(capture_concrete(step.get_concrete_function(iter(tf.data.Dataset.range(3)))))
    assert not found.fetches
    assert not caplog.records

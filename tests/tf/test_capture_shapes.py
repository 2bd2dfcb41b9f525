"""Shapes that a program set by hand are known to planning, though no GraphDef holds them."""

import pytest
import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef

import tfmem
from tests.tf.optimized_runs import in_a_process
from tfmem.capture.build import build_graph, shaped_graph
from tfmem.capture.concrete_function import capture_concrete
from tfmem.capture.grappler import run_grappler
from tfmem.capture.live_editor import capture_graph
from tfmem.frontends.graph_def import capture_graph_def

MIB = 1 << 20


def unknown(x):
    """The tensor with an unknown shape."""
    return tf.py_function(lambda x: x, [x], x.dtype)


def shapes_of(function, *specs, device="CPU", **feed_shapes):
    """The shapes that planning finds, by op type; the last of each type."""
    captured = run_grappler(capture_concrete(tf.function(function).get_concrete_function(*specs)), device=device)
    graph = shaped_graph(captured, feed_shapes={f"{name}:0": shape for name, shape in feed_shapes.items()})
    return {
        op.type: op.outputs[0].shape.as_list()
        for op in graph.get_operations()
        if op.outputs and op.outputs[0].shape.rank
    }


def losses_and_report(budget):
    """Eight losses of a step that reads what a Python function gives; with a budget, its report too."""
    weights = [tf.Variable(tf.random.stateless_normal([256, 256], [place, 1], stddev=0.05)) for place in range(6)]
    data = tf.random.stateless_normal([4096, 256], [7, 8])

    @tf.function
    def step(x):
        x = unknown(x)
        x.set_shape([4096, 256])
        with tf.GradientTape() as tape:
            for weight in weights:
                x = tf.nn.relu(x @ weight)
            loss = tf.reduce_mean(x**2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(gradient)
        return loss

    if budget:
        step = tfmem.optimize(step, memory_budget=budget, passes=("offload",))
    losses = [float(step(data)) for _ in range(8)]
    return losses, tfmem.report(step) if budget else None


def test_a_step_behind_a_py_function_meets_its_budget():
    # in a separate process: the measured peak counts what other tests left in memory
    expected, _ = in_a_process(losses_and_report, None)
    losses, report = in_a_process(losses_and_report, 30 * MIB)
    assert losses == expected
    assert report.decision == "moved"
    assert not [note for note in report.notes if "size is not known" in note]
    assert report.peak_measured <= 30 * MIB < report.peak_before


def test_shapes_reach_what_follows_and_what_grappler_makes():
    weights, bias = tf.Variable(tf.ones([3, 5])), tf.Variable(tf.ones([5]))

    def function(x):
        y = unknown(x)
        y.set_shape([4, 3])
        y = tf.nn.relu(tf.nn.bias_add(y @ weights, bias))  # becomes one op
        z = tf.boolean_mask(tf.exp(y), tf.reduce_sum(y, 1) > 0)
        z.set_shape([2, 5])
        return tf.tanh(z)

    found = shapes_of(function, tf.TensorSpec([4, 3]))
    assert found["EagerPyFunc"] == [4, 3]
    assert found["_FusedMatMul"] == found["Exp"] == [4, 5]
    assert found["Tanh"] == [2, 5]


def test_shapes_inside_of_called_functions():
    @tf.function
    def inner(x):
        x = unknown(x)
        x.set_shape([4, 3])
        return tf.exp(x)

    @tf.function
    def middle(x):
        return tf.tanh(inner(x))

    found = shapes_of(lambda x: (tf.sin(middle(x)), tf.nn.softmax(inner(x + 1))), tf.TensorSpec([4, 3]))
    assert found["Exp"] == found["Tanh"] == found["Sin"] == found["Softmax"] == [4, 3]


def test_inputs_whose_shape_was_set():
    def function(x):
        x.set_shape([None, 3])
        return tf.exp(x)

    assert shapes_of(function, tf.TensorSpec(None, name="x"))["Exp"] == [None, 3]
    assert shapes_of(function, tf.TensorSpec(None, name="x"), x=(7, 3))["Exp"] == [7, 3]


@pytest.mark.parametrize("device", ["CPU", "GPU"])
def test_shapes_where_grappler_changes_the_layout(device):
    """On a GPU a convolution keeps its name, and gives channels first."""
    weights = tf.Variable(tf.ones([3, 3, 4, 6]))

    def function(x):
        x = unknown(x)
        x.set_shape([2, 8, 9, 4])
        return tf.nn.relu(tf.nn.conv2d(x, weights, 1, "SAME"))

    found = shapes_of(function, tf.TensorSpec([2, 8, 9, 4]), device=device)
    assert found["Conv2D"] == ([2, 6, 8, 9] if device == "GPU" else [2, 8, 9, 6])


@pytest.mark.parametrize("device", ["CPU", "GPU"])
def test_shapes_that_grappler_permutes_and_nobody_can_infer(device):
    """The sizes that the program knew are not those of the axes that now stand there, even if nothing contradicts."""
    weights = tf.Variable(tf.ones([3, 3, 4, 4]))

    def function(x):
        y = tf.tanh(tf.nn.conv2d(x, weights, 1, "SAME"))
        y.set_shape([None, 4, 9, 4])
        y = tf.nn.relu(tf.nn.conv2d(y, weights, 1, "SAME"))
        y.set_shape([None, 4, 9, 4])
        return tf.exp(unknown(y))

    found = shapes_of(function, tf.TensorSpec([None, None, None, 4]), device=device)
    assert found["Relu"] == ([None, 4, None, None] if device == "GPU" else [None, 4, 9, 4])


@pytest.mark.parametrize("device", ["CPU", "GPU"])
def test_shapes_that_grappler_permutes_again(device):
    """A mean over pixels has no layout, so nothing is transposed back before the next convolution."""
    weights = tf.Variable(tf.ones([3, 3, 4, 4]))

    def function(x):
        means = tf.reduce_mean(tf.nn.relu(tf.nn.conv2d(x, weights, 1, "SAME")), [1, 2])
        y = unknown(means[:, None, None, :] * tf.ones([1, 4, 9, 1]))
        y = tf.tanh(tf.nn.conv2d(y, weights, 1, "SAME"))
        y.set_shape([None, 4, 9, 4])
        return tf.exp(unknown(y))

    found = shapes_of(function, tf.TensorSpec([None, None, None, 4]), device=device)
    assert found["Tanh"] == ([None, 4, None, None] if device == "GPU" else [None, 4, 9, 4])


def graph_with_shapes():
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 3], name="x")
        y = tf.compat.v1.py_func(lambda x: x, [x], tf.float32, name="unknown")
        y.set_shape([4, 3])
        tf.exp(y, name="out")
    return graph


def test_graphs_that_say_their_shapes():
    captured = capture_graph_def(graph_with_shapes().as_graph_def(add_shapes=True), ["x"], ["out"])
    graph = shaped_graph(run_grappler(captured))
    assert graph.get_tensor_by_name("out:0").shape == [4, 3]


def test_graphs_in_place_whose_inputs_are_given_shapes():
    captured = capture_graph(graph_with_shapes())
    graph = shaped_graph(captured, feed_shapes={"x:0": (4, 3)})
    assert graph.get_tensor_by_name("out:0").shape == [4, 3]


def placed_nodes() -> GraphDef:
    """Ops on devices that are named in several ways, in colocations, and on none."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        for number, device in enumerate(("/cpu:0", "/device:CPU:0", "/job:localhost/replica:0/task:0/device:CPU:0")):
            x = tf.identity(x, name=f"named{number}")
            x.op._set_device_from_string(device)
            beside = tf.identity(x, name=f"beside{number}")
            beside.op._set_attr("_class", tf.compat.v1.AttrValue(list={"s": [b"loc:@named%d" % (number % 2)]}))
        x = tf.identity(x, name="nowhere")
        x.op._set_attr("_class", tf.compat.v1.AttrValue(list={"s": [b"loc:@nowhere"]}))
        x.op._set_device_from_string("/cpu:0")
    return graph.as_graph_def()


@pytest.mark.parametrize("outer", ["", "/job:localhost", "/device:CPU:0"])
def test_ops_are_on_the_devices_that_tensorflows_import_gives_them(outer):
    given, graph, expected = placed_nodes(), tf.Graph(), tf.Graph()
    with expected.as_default(), tf.device(outer or None):
        tf.graph_util.import_graph_def(given, name="")
    with graph.as_default(), tf.device(outer or None):
        build_graph(graph, ["x:0"], given, [], {})
    assert [op.name for op in graph.get_operations()] == [op.name for op in expected.get_operations()]
    assert [op.device for op in graph.get_operations()] == [op.device for op in expected.get_operations()]


def test_importing_more_ops_enters_no_more_device_scopes(monkeypatch):
    scopes = []
    entered = tf.Graph.device
    monkeypatch.setattr(tf.Graph, "device", lambda self, name: scopes.append(name) or entered(self, name))
    for count in (10, 20):
        graph = tf.Graph()
        with graph.as_default():
            x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
            with tf.device("/device:CPU:0"):
                for _ in range(count):
                    x = tf.identity(x)
        scopes.clear()
        build_graph(tf.Graph(), ["x:0"], graph.as_graph_def(), [], {})
        assert not scopes

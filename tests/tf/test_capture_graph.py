"""Live graphs are edited in place; serialised ones go through capture, Grappler and restore."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from graph_passes.errors import GraphError, GraphInUseError
from graph_passes.graph import serde
from graph_passes.graph.ir import DataType, TensorId
from graph_passes.graph.rewrite import Rewrite
from graph_passes.graph.verify import verify_graph
from tfmem.capture.build import shaped_graph
from tfmem.capture.concrete_function import capture_concrete
from tfmem.capture.grappler import run_grappler, session_config, without_grappler
from tfmem.capture.live_editor import LiveEditor, capture_graph
from tfmem.frontends.graph_def import capture_graph_def, capture_meta_graph, restore_graph_def, restore_meta_graph
from tfmem.frontends.live_graph import _LiveSource
from tfmem.options import Options
from tfmem.steps.after_grappler import grappled, grappled_to_stitch

v1 = tf.compat.v1
X = np.arange(12, dtype="float32").reshape(4, 3)


def training_graph():
    """x -> matmul -> relu -> loss, with its update, as a session would run it."""
    graph = tf.Graph()
    with graph.as_default():
        v1.set_random_seed(1)
        x = v1.placeholder(tf.float32, [None, 3], name="x")
        weights = v1.get_variable("w", [3, 2], initializer=v1.ones_initializer(), use_resource=True)
        hidden = tf.nn.relu(tf.matmul(x, weights, name="product"), name="hidden")
        loss = tf.reduce_mean(hidden * hidden, name="loss")
        (gradient,) = tf.gradients(loss, weights)
        tf.identity(v1.assign_sub(weights, 0.01 * gradient), name="update")
        v1.global_variables_initializer()
    return graph


def train(graph, steps=3, config=None):
    with v1.Session(graph=graph, config=config) as session:
        session.run("init")
        losses = [session.run(["loss:0", "update:0"], {"x:0": X})[0] for _ in range(steps)]
        return [*losses, session.run("w/Read/ReadVariableOp:0")]


def test_an_op_placed_with_another_has_its_device():
    """As when TensorFlow imports the graph."""
    graph_def = training_graph().as_graph_def()
    nodes = {node.name: node for node in graph_def.node}
    nodes["hidden"].device, nodes["hidden"].attr["_class"].list.s[:] = "/device:GPU:7", [b"loc:@product"]
    captured = run_grappler(capture_graph_def(graph_def, ["x"], ["loss"]), device="CPU")
    assert {node.device for node in captured.graph_def.node} == {""}
    with tf.Graph().as_default(), v1.Session() as session:
        tf.graph_util.import_graph_def(graph_def, name="")
        session.run("init")  # TensorFlow places it


def insert_identity(editor, reader, index, source):
    name = editor.insert("tfmem/copy", "Identity", [source], {"T": DataType("float32")})
    editor.rewire(reader, index, TensorId(name))
    return name


def test_capture_of_a_session_graph():
    captured = capture_graph(training_graph())
    assert captured.feeds == ("x:0",)
    assert {"AssignSubVariableOp", "w/Assign"} <= set(captured.control_fetches)
    assert not any("Read" in name for name in captured.control_fetches)
    assert captured.creation_order == tuple(node.name for node in captured.graph_def.node)


def test_edits_in_place_keep_the_numbers():
    expected = train(training_graph())
    graph = training_graph()
    loss = graph.get_tensor_by_name("loss:0")
    editor = LiveEditor(graph)
    name = insert_identity(editor, "hidden", 0, TensorId("product"))
    editor.add_control("update", name)
    assert graph.get_operation_by_name("hidden").inputs[0].op.name == name
    assert name in [op.name for op in graph.get_operation_by_name("update").control_inputs]
    assert loss is graph.get_tensor_by_name("loss:0")
    for one, other in zip(expected, train(graph, config=session_config()), strict=True):
        np.testing.assert_array_equal(one, other)


def test_names_are_made_unique_and_devices_kept():
    editor = LiveEditor(graph := training_graph())
    attrs = {"T": DataType("float32")}
    first = editor.insert("copy", "Identity", [TensorId("product")], attrs, device="/device:CPU:0", control=["x"])
    second = editor.insert("copy", "Identity", [TensorId(first)], attrs)
    assert (first, second) == ("copy", "copy_1")
    operation = graph.get_operation_by_name(first)
    assert operation.device == "/device:CPU:0"
    assert [op.name for op in operation.control_inputs] == ["x"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda e: e.rewire("hidden", 0, TensorId("w")), "resource"),
        (lambda e: e.rewire("hidden", 3, TensorId("product")), "no input 3"),
        (lambda e: e.rewire("hidden", 0, TensorId("product", 1)), "1 outputs"),
        (lambda e: e.rewire("nothing", 0, TensorId("product")), "'nothing'"),
        (
            lambda e: e.insert("a", "Identity", [TensorId("w")], {"T": DataType("float32")}),
            "refuses",
        ),
        (lambda e: e.insert("a", "NoSuchOp", [], {}), "refuses"),
    ],
)
def test_wrong_edits_are_refused_and_change_nothing(edit, message):
    graph = training_graph()
    before = graph.as_graph_def()
    with pytest.raises(GraphError, match=message):
        edit(LiveEditor(graph))
    assert graph.as_graph_def() == before
    assert train(graph)[0] == train(training_graph())[0]


def test_rewrites_that_close_a_cycle_are_found_in_a_copy():
    graph = training_graph()
    before = graph.as_graph_def()
    rewrite = Rewrite("back", order=(("product", "loss"),))
    errors = _LiveSource(graph, LiveEditor(graph), []).edit(serde.from_tf_graph(graph), [rewrite], verify_graph)
    assert "cycle" in str(errors["back"])
    assert graph.as_graph_def() == before


def test_graphs_in_use_are_refused():
    graph = training_graph()
    with v1.Session(graph=graph) as session:
        session.run("init")
        with pytest.raises(GraphInUseError, match="session"):
            LiveEditor(graph)
    LiveEditor(graph)
    graph.finalize()
    with pytest.raises(GraphInUseError, match="finalized"):
        LiveEditor(graph)


def test_editing_a_function_that_is_being_built():
    weight = tf.Variable([2.0, -1.0])

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            product = tf.multiply(x, weight, name="product")
            loss = tf.reduce_sum(tf.nn.relu(product, name="hidden"))
        gradient = tape.gradient(loss, weight)
        graph = tf.compat.v1.get_default_graph()
        assert "product" in capture_graph(graph).creation_order
        insert_identity(LiveEditor(graph), "hidden", 0, TensorId("product"))
        weight.assign_sub(gradient)
        return loss, gradient

    loss, gradient = step(tf.constant([3.0, 4.0]))
    assert float(loss) == 6.0
    np.testing.assert_array_equal(gradient, [3.0, 0.0])
    np.testing.assert_array_equal(weight, [-1.0, -1.0])


def test_graphs_with_loops_can_be_edited():
    graph = tf.Graph()
    with graph.as_default():
        v1.disable_control_flow_v2()
        try:
            x = v1.placeholder(tf.float32, [], name="x")
            y = v1.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), [0, x])[1]
            tf.identity(y, name="y")
        finally:
            v1.enable_control_flow_v2()
    source = graph.get_operation_by_name("y").inputs[0]
    insert_identity(LiveEditor(graph), "y", 0, TensorId(source.op.name, source.value_index))
    with v1.Session(graph=graph) as session:
        assert session.run("y:0", {"x:0": 1.0}) == 8.0


def test_serialised_graphs_keep_their_numbers():
    source = training_graph().as_graph_def()
    captured = run_grappler(capture_graph_def(source, ["x"], ["loss", "update", "init", "w/Read/ReadVariableOp"]))
    assert captured.fetches == ("loss:0", "update:0", "w/Read/ReadVariableOp:0")
    assert "init" in captured.control_fetches
    restored = restore_graph_def(captured)
    assert len(restored.node) < len(source.node)
    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(restored, name="")
    for one, other in zip(train(training_graph()), train(graph), strict=True):
        np.testing.assert_array_equal(one, other)


def test_meta_graphs_name_their_own_fetches():
    graph = training_graph()
    with graph.as_default():
        v1.add_to_collection("train_op", graph.get_tensor_by_name("loss:0"))
        v1.add_to_collection("train_op", graph.get_operation_by_name("init"))
        meta_graph = v1.train.export_meta_graph()
    captured = capture_meta_graph(meta_graph)
    assert (captured.feeds, captured.fetches) == (("x:0",), ("loss:0",))
    assert captured.control_fetches[0] == "init"
    restored = restore_meta_graph(meta_graph, restore_graph_def(run_grappler(captured)))
    assert restored.collection_def.keys() == meta_graph.collection_def.keys()
    with pytest.raises(GraphError, match="'nothing'"):
        capture_meta_graph(meta_graph, fetches=["nothing"])


def test_default_fetches_are_what_nobody_reads():
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [2], name="x")
        tf.exp(x, name="a")
        tf.split(x, 2, name="b")
    assert capture_graph_def(graph.as_graph_def()).fetches == ("a:0", "b:0")


def test_layout_follows_the_device():
    """The graph of a convolution in NHWC, as it would run on a GPU and on a CPU, without either."""
    weights = tf.Variable(tf.ones([3, 3, 4, 4]))
    function = tf.function(lambda x: tf.nn.relu(tf.nn.conv2d(x, weights, 1, "SAME")))
    captured = capture_concrete(function.get_concrete_function(tf.TensorSpec([2, 8, 8, 4])))

    def layouts(device):
        nodes = run_grappler(captured, device=device).graph_def.node
        assert all(node.device == "" for node in nodes)
        return [node.attr["data_format"].s for node in nodes if node.op.endswith("Conv2D")]

    assert layouts("GPU") == [b"NCHW"]
    assert layouts("CPU") == [b"NHWC"]


@pytest.mark.parametrize(
    ("precision", "dtype", "depthwise", "layout"),
    [
        ("tf32", "float32", False, b"NHWC"),
        ("highest", "float32", False, b"NCHW"),
        ("tf32", "float64", False, b"NCHW"),
        ("tf32", "float32", True, b"NHWC"),
    ],
)
def test_what_is_stitched_keeps_a_layout_that_tf32_computes_in(precision, dtype, depthwise, layout):
    weights = tf.Variable(tf.ones([3, 3, 4, 4], dtype))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            x = tf.nn.relu(tf.nn.conv2d(x, weights, 1, "SAME"))
            if depthwise:
                x = tf.nn.depthwise_conv2d(x, weights, [1, 1, 1, 1], "SAME")
            loss = tf.reduce_sum(x)
        return tape.gradient(loss, weights)

    captured = capture_concrete(step.get_concrete_function(tf.TensorSpec([2, 8, 8, 4], dtype)))

    def layouts(optimized):
        return {node.attr["data_format"].s for node in optimized.graph_def.node if "Conv2D" in node.op}

    target = SimpleNamespace(kind="GPU", is_gpu=True, precision=precision, description="a card")
    settings = SimpleNamespace(target=target, stitches=True, edits_bodies=True, options=Options())
    engine = SimpleNamespace(settings=settings)
    plain, to_stitch = grappled(captured, engine), grappled_to_stitch(captured, engine)
    assert layouts(plain) == {b"NCHW"}
    assert layouts(to_stitch or plain) == {layout}
    assert (to_stitch is None) == (layout == b"NCHW")


def test_inference_knows_shapes_of_captured_variables():
    weights = tf.Variable(tf.ones([3, 5]))
    function = tf.function(lambda x: x @ weights)
    captured = capture_concrete(function.get_concrete_function(tf.TensorSpec([None, 3])))
    graph = shaped_graph(captured, feed_shapes={captured.feeds[0]: (7, 3)})
    assert graph.get_tensor_by_name(captured.fetches[0]).shape == (7, 5)
    assert [op.name for op in graph.get_operations()]


def test_configs():
    rewrite = session_config().graph_options.rewrite_options
    assert rewrite.layout_optimizer == rewrite.OFF
    assert not rewrite.disable_meta_optimizer
    base = v1.ConfigProto(allow_soft_placement=True)
    assert session_config(base).allow_soft_placement
    assert base == v1.ConfigProto(allow_soft_placement=True)


def test_without_grappler_ends_with_its_block():
    def disabled():
        serialized = context.context().function_call_options.config_proto_serialized
        config = v1.ConfigProto.FromString(serialized)
        return config.graph_options.rewrite_options.disable_meta_optimizer

    def fail_inside():
        with without_grappler():
            assert disabled()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_inside()
    assert not disabled()

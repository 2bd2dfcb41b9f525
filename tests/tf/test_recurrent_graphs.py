"""Recurrent layers in every kind of object that `optimize` takes: GraphDefs, frozen ones, live graphs, models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2
from tensorflow.python.ops import rnn as dynamic

import tfmem
from custom_ops.image_functions import code_in
from custom_ops.jit.image import KernelImage
from custom_ops.recurrent.gpu_program import RecurrentProgram
from graph_passes.passes.recurrent.match import RECURRENT_OP, Kernels, RecurrentPlan
from tfmem.kernels import replace_recurrent as recurrent

UNITS, INPUTS, TIME, BATCH = 4, 3, 7, 5
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(BATCH, TIME, INPUTS)).astype("float32")
STEPS = X.transpose(1, 0, 2)
W, R = (RANDOM.normal(size=(rows, UNITS)).astype("float32") * 0.5 for rows in (INPUTS, UNITS))
LOOPS = {"While", "StatelessWhile", "LoopCond"}


@pytest.fixture(autouse=True, scope="module")
def _ops() -> None:
    tfmem.load_ops()


@pytest.fixture
def version1() -> Iterator[None]:
    """Loops as TensorFlow 1 writes them."""
    tf.compat.v1.disable_control_flow_v2()
    yield
    tf.compat.v1.enable_control_flow_v2()


def run(graph_def: Any, feeds: Mapping[str, Any], fetch: str = "out:0") -> Any:
    with tf.Graph().as_default():
        tf.graph_util.import_graph_def(graph_def, name="")
        with tf.compat.v1.Session() as session:
            return session.run(fetch, feeds)


def ops(graph_def: Any) -> list[str]:
    return [node.op for node in graph_def.node]


def graph_of(function: Callable[..., Any], *placeholders: tuple[Any, list[int | None], str]) -> tf.Graph:
    with tf.Graph().as_default() as graph:
        tf.identity(function(*(tf.compat.v1.placeholder(*each) for each in placeholders)), "out")
    return graph


def scan(x: Any) -> Any:
    return tf.scan(lambda h, item: tf.tanh(item @ W + h @ R), x, tf.zeros([tf.shape(x)[1], UNITS]))


def with_lengths(x: Any, lengths: Any) -> Any:
    """`dynamic_rnn` stops at the longest length, and its outputs are zero from there on."""

    class Cell:
        state_size = output_size = UNITS

        def zero_state(self, batch: Any, dtype: Any) -> Any:
            return tf.zeros([batch, UNITS], dtype)

        def __call__(self, x: Any, h: Any, scope: Any = None) -> Any:
            h = tf.tanh(x @ W + h @ R)
            return h, h

    outputs, state = dynamic.dynamic_rnn(Cell(), x, sequence_length=lengths, dtype=tf.float32, time_major=True)
    return tf.concat([outputs, state[None]], 0)


SEQUENCE = (tf.float32, [None, None, INPUTS], "x")


def check_graph_def(graph_def: Any, feeds: Mapping[str, Any], fetch: str = "out:0", launches: int = 1) -> Any:
    optimized = tfmem.optimize(graph_def)
    assert ops(optimized).count(RECURRENT_OP) == launches
    assert not LOOPS & set(ops(optimized))
    np.testing.assert_allclose(run(optimized, feeds, fetch), run(graph_def, feeds, fetch), rtol=1e-5, atol=1e-6)
    return optimized


def test_graph_def() -> None:
    optimized = check_graph_def(graph_of(scan, SEQUENCE).as_graph_def(), {"x:0": STEPS})
    assert len(tfmem.report(optimized).replaced) == 1


def test_a_graph_def_that_was_left_as_it_was_carries_no_report() -> None:
    graph_def = graph_of(lambda x: 2 * x, SEQUENCE).as_graph_def()
    with pytest.raises(tfmem.GraphError, match="tfmem left the graph unchanged"):
        tfmem.report(tfmem.optimize(graph_def))


def test_a_graph_def_says_which_recurrences_stay() -> None:
    def sorted_often(x: Any) -> Any:
        return tf.while_loop(lambda t, y: t < 5, lambda t, y: (t + 1, tf.sort(y) * 2), [0, x])[1]

    graph_def = graph_of(sorted_often, SEQUENCE).as_graph_def()
    optimized = tfmem.optimize(graph_def)
    assert ops(optimized) == ops(graph_def)
    assert len(tfmem.report(optimized).not_replaced) == 1
    np.testing.assert_array_equal(run(optimized, {"x:0": STEPS}, "out:0"), run(graph_def, {"x:0": STEPS}, "out:0"))


@pytest.mark.usefixtures("version1")
def test_version_1_loops() -> None:
    check_graph_def(graph_of(scan, SEQUENCE).as_graph_def(), {"x:0": STEPS})


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("version1")
@pytest.mark.parametrize("lengths", [[7, 3, 1, 0, 5], [4, 3, 1, 0, 2]])
def test_dynamic_rnn(lengths: list[int]) -> None:
    graph = graph_of(with_lengths, SEQUENCE, (tf.int32, [None], "lengths"))
    check_graph_def(graph.as_graph_def(), {"x:0": STEPS, "lengths:0": np.array(lengths, "int32")})


@pytest.mark.usefixtures("version1")
def test_the_name_of_a_final_state_stays() -> None:
    def last(x: Any) -> Any:
        start = (0, tf.zeros([tf.shape(x)[1], UNITS]))
        end = tf.while_loop(
            lambda t, h: t < tf.shape(x)[0], lambda t, h: (t + 1, tf.tanh(tf.gather(x, t) @ W + h @ R)), start
        )
        name = end[1].name
        found.append(name)
        return tf.zeros([])

    found: list[str] = []
    check_graph_def(graph_of(last, SEQUENCE).as_graph_def(), {"x:0": STEPS}, found[0])


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("package", [keras, tf_keras], ids=lambda package: package.__name__)
def test_frozen_graphs(package: Any, lowered: bool) -> None:
    layers = package.layers
    model = package.Sequential(
        [
            layers.Input((None, INPUTS)),
            layers.Bidirectional(layers.GRU(UNITS, return_sequences=True)),
            layers.LSTM(UNITS),
        ]
    )
    trace = tf.function(lambda x: tf.identity(model(x), "out")).get_concrete_function(
        tf.TensorSpec([None, None, INPUTS], name="x")
    )
    frozen = convert_variables_to_constants_v2(trace, lower_control_flow=lowered).graph.as_graph_def()
    assert ("LoopCond" in ops(frozen)) == lowered
    check_graph_def(frozen, {"x:0": X}, "Identity:0", launches=2)


def test_a_training_step_in_a_graph_def() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(*SEQUENCE)
        weights = [tf.Variable(value, name=name) for name, value in (("W", W), ("R", R))]
        start = tf.zeros([tf.shape(x)[1], UNITS])
        states = tf.scan(lambda h, item: tf.tanh(item @ weights[0] + h @ weights[1]), x, start)
        loss = tf.identity(tf.reduce_mean(states**2), "loss")
        updates = [w.assign_sub(0.1 * g) for w, g in zip(weights, tf.gradients(loss, weights), strict=True)]
        tf.group(*updates, name="train")
        tf.group(*(w.initializer for w in weights), name="start")
    graph_def = graph.as_graph_def()
    optimized = tfmem.optimize(graph_def, fetches=["train", "loss", "start"])
    assert ops(optimized).count(RECURRENT_OP) == 2  # forward and backward
    assert not LOOPS & set(ops(optimized))
    losses = []
    for each in (graph_def, optimized):
        with tf.Graph().as_default():
            tf.graph_util.import_graph_def(each, name="")
            with tf.compat.v1.Session() as session:
                session.run("start")
                losses.append([session.run(("loss:0", "train"), {"x:0": STEPS})[0] for _ in range(4)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert losses[0][-1] < losses[0][0]


def test_meta_graph() -> None:
    graph = graph_of(scan, SEQUENCE)
    meta_graph = tf.compat.v1.MetaGraphDef(graph_def=graph.as_graph_def())
    optimized = tfmem.optimize(meta_graph)
    assert RECURRENT_OP in ops(optimized.graph_def)


def test_live_graph() -> None:
    graph = graph_of(scan, SEQUENCE)
    expected = run(graph.as_graph_def(), {"x:0": STEPS})
    assert tfmem.optimize(graph) is graph
    assert len(tfmem.report(graph).replaced) == 1
    with tf.compat.v1.Session(graph=graph, config=tfmem.session_config()) as session:
        options = tf.compat.v1.RunOptions(output_partition_graphs=True)
        metadata = tf.compat.v1.RunMetadata()
        found = session.run("out:0", {"x:0": STEPS}, options=options, run_metadata=metadata)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    ran = {op for partition in metadata.partition_graphs for op in ops(partition)}
    assert RECURRENT_OP in ran
    assert not LOOPS & ran


def model_of(package: Any) -> Any:
    layers = package.layers
    return package.Sequential(
        [
            layers.Input((None, INPUTS)),
            layers.Bidirectional(layers.LSTM(UNITS, return_sequences=True)),
            layers.GRU(UNITS),
            layers.Dense(1),
        ]
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("package", [keras, tf_keras], ids=lambda package: package.__name__)
@pytest.mark.parametrize("compiled", [False, True])
def test_models_predict_and_evaluate(package: Any, compiled: bool) -> None:
    model = model_of(package)
    y = np.zeros((BATCH, 1), "float32")
    if compiled:
        model.compile("sgd", "mse")
        loss = model.evaluate(X, y, verbose=0)
    expected = model.predict(X, batch_size=2, verbose=0)
    assert tfmem.optimize(model) is model
    np.testing.assert_allclose(model.predict(X, batch_size=2, verbose=0), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.predict_on_batch(X), expected, rtol=1e-5, atol=1e-6)
    assert len(tfmem.report(model).replaced) == 2
    if compiled:
        np.testing.assert_allclose(model.evaluate(X, y, verbose=0), loss, rtol=1e-5)


@pytest.mark.long
def test_predict_with_several_steps_a_call() -> None:
    model = model_of(keras)
    model.compile("sgd", "mse", steps_per_execution=2)
    expected = model.predict(X, batch_size=2, verbose=0)
    tfmem.optimize(model)
    np.testing.assert_allclose(model.predict(X, batch_size=2, verbose=0), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("package", [keras, tf_keras], ids=lambda package: package.__name__)
def test_saved_models(package: Any, tmp_path: Path) -> None:
    model = model_of(package)
    path = str(tmp_path / "model")
    if package is keras:
        model.export(path, verbose=False)
    else:
        tf.saved_model.save(model, path)
    output = tfmem.optimize(path)
    assert len(tfmem.report(output).replaced) == 2
    before, after = (tf.saved_model.load(where).signatures["serving_default"] for where in (path, output))
    name = next(iter(before.structured_input_signature[1]))
    expected, found = (next(iter(function(**{name: tf.constant(X)}).values())) for function in (before, after))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    library = after.graph.as_graph_def().library.function
    assert any(node.op == RECURRENT_OP for function in library for node in function.node_def)


def test_a_saved_model_keeps_the_kernels_that_it_was_tuned_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever TensorFlow allows where it is served. The CPU does not read them."""

    programs = tuple(RecurrentProgram(KernelImage(90, "main", 32, code)) for code in (b"small \0 code", b"large"))

    def with_kernels(plan: RecurrentPlan, *_: Any) -> RecurrentPlan:
        launches = [launch.name for match in plan.matches for launch in match.launches]
        return replace(plan, precision="tf32", kernels=dict.fromkeys(launches, Kernels(programs)))

    monkeypatch.setattr(recurrent, "with_kernels", with_kernels)
    model_of(keras).export(tmp_path / "model", verbose=False)
    served = tf.saved_model.load(tfmem.optimize(tmp_path / "model")).signatures["serving_default"]
    library = served.graph.as_graph_def().library.function
    nodes = [node for function in library for node in function.node_def if node.op == RECURRENT_OP]
    assert nodes
    codes = {function.signature.name: code_in(function) for function in library}
    for node in nodes:
        assert list(node.attr["programs"].list.s) == [program.to_text().encode() for program in programs]
        assert [codes[image.name] for image in node.attr["images"].list.func] == [b"small \0 code", b"large"]
        assert node.attr["precision"].s == b"tf32"


def test_a_concrete_function_keeps_its_signature() -> None:
    model = model_of(keras)
    trace = tf.function(lambda x: {"y": model(x)}).get_concrete_function(tf.TensorSpec([None, None, INPUTS]))
    optimized = tfmem.optimize(trace)
    assert optimized.structured_input_signature == trace.structured_input_signature
    np.testing.assert_allclose(optimized(tf.constant(X))["y"], trace(tf.constant(X))["y"], rtol=1e-5, atol=1e-6)


def test_without_the_pass_nothing_is_replaced() -> None:
    graph_def = graph_of(scan, SEQUENCE).as_graph_def()
    assert tfmem.optimize(graph_def, passes=("offload",)) == graph_def


def test_a_weight_whose_shape_may_change_stays_in_its_loop() -> None:
    """Other weights cannot change theirs: TensorFlow refuses the assignment."""
    weight = tf.Variable(R, shape=[None, None])

    @tf.function(input_signature=[tf.TensorSpec([None, None, INPUTS])])
    def run(x: Any) -> Any:
        return tf.scan(lambda h, item: tf.tanh(item @ W + h @ weight), x, tf.zeros([tf.shape(x)[1], UNITS]))

    optimized = tfmem.optimize(run)
    for other in (R, R[:, :1]):
        weight.assign(other)
        np.testing.assert_array_equal(optimized(STEPS), run(STEPS))
    (kept,) = tfmem.report(optimized).not_replaced
    assert "a matrix that changes, of shape (None, None)" in kept


def test_what_is_not_matched_is_reported() -> None:
    graph = graph_of(
        lambda x: tf.scan(lambda h, item: tf.math.lgamma(item @ W + h @ R), x, tf.zeros([5, UNITS])), SEQUENCE
    )
    tfmem.optimize(graph)
    report = tfmem.report(graph)
    assert not report.replaced
    assert "is a Lgamma, which no op of a cell computes" in report.not_replaced[0]
    assert report.not_replaced[0] in report.to_text()

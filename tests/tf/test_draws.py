"""Seeded random ops draw what they draw in TensorFlow, whichever of a step's graphs runs."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import op_def_pb2
from tensorflow.python.client import pywrap_tf_session

import tfmem
from custom_ops.load import load
from tests.tf.memory_in_use import in_use
from tests.tf.python_server import run_python
from tfmem.steps.random_streams import Draws

SPARE = 256 << 10
STEPS = 20
RAW = tf.raw_ops
CLASSES = [[1, 5], [3, 2]]
BOXES = [[[0.1, 0.1, 0.6, 0.6], [0.3, 0.2, 0.9, 0.9]]]
SAMPLED = {"num_true": 2, "num_sampled": 3, "unique": True}
UNIGRAMS = {"unigrams": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "range_max": 6}


def classes():
    return tf.constant(CLASSES, tf.int64)


# Every op that keeps its position in its kernel, by name: called with seeds.
DRAWS = {
    "RandomUniform": lambda **s: RAW.RandomUniform(shape=[3], dtype=tf.float32, **s),
    "RandomUniformInt": lambda **s: RAW.RandomUniformInt(shape=[3], minval=0, maxval=1000, **s),
    "RandomStandardNormal": lambda **s: RAW.RandomStandardNormal(shape=[3], dtype=tf.float32, **s),
    "TruncatedNormal": lambda **s: RAW.TruncatedNormal(shape=[3], dtype=tf.float64, **s),
    "ParameterizedTruncatedNormal": lambda **s: RAW.ParameterizedTruncatedNormal(
        shape=[3], means=0.0, stdevs=1.0, minvals=-1.0, maxvals=2.0, **s
    ),
    "Multinomial": lambda **s: RAW.Multinomial(logits=[[0.0] * 30], num_samples=4, **s),
    "RandomGamma": lambda **s: RAW.RandomGamma(shape=[3], alpha=[0.5, 2.0], **s),
    "RandomPoissonV2": lambda **s: RAW.RandomPoissonV2(shape=[3], rate=[5.0, 20.0], **s),
    "RandomShuffle": lambda **s: RAW.RandomShuffle(value=tf.range(20), **s),
    "SampleDistortedBoundingBox": lambda **s: RAW.SampleDistortedBoundingBox(
        image_size=[90, 90, 3], bounding_boxes=BOXES, **s
    ),
    "SampleDistortedBoundingBoxV2": lambda **s: RAW.SampleDistortedBoundingBoxV2(
        image_size=[90, 90, 3], bounding_boxes=BOXES, min_object_covered=0.1, **s
    ),
    "AllCandidateSampler": lambda **s: RAW.AllCandidateSampler(true_classes=classes() % 3, **SAMPLED, **s),
    "UniformCandidateSampler": lambda **s: RAW.UniformCandidateSampler(
        true_classes=classes(), range_max=90, **SAMPLED, **s
    ),
    "LogUniformCandidateSampler": lambda **s: RAW.LogUniformCandidateSampler(
        true_classes=classes(), range_max=90, **SAMPLED, **s
    ),
    "LearnedUnigramCandidateSampler": lambda **s: RAW.LearnedUnigramCandidateSampler(
        true_classes=classes(), range_max=90, **SAMPLED, **s
    ),
    "ThreadUnsafeUnigramCandidateSampler": lambda **s: RAW.ThreadUnsafeUnigramCandidateSampler(
        true_classes=classes(), range_max=90, **SAMPLED, **s
    ),
    "FixedUnigramCandidateSampler": lambda **s: RAW.FixedUnigramCandidateSampler(
        true_classes=classes(), **UNIGRAMS, **SAMPLED, **s
    ),
}


def every_op() -> list[op_def_pb2.OpDef]:
    registered = op_def_pb2.OpList()
    registered.ParseFromString(pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList()))
    return list(registered.op)


def test_every_op_that_keeps_a_position_is_listed_here() -> None:
    """What has seeds and is not here keeps nothing in its kernel, or needs a GPU: cuDNN's recurrent layers."""
    library = load()
    found = {op.name for op in every_op() if not op.name.startswith("TfmemShared") and library.share_op(op.name)}
    gpu = {name for name in found if name.startswith("CudnnRNN")}
    gone = {"RandomCrop", "RandomPoisson"}  # TensorFlow refuses them in new graphs
    assert found - gpu - gone - {"RecordInput", "Skipgram"} == set(DRAWS)
    assert not any(library.share_op(op) for op in ("RandomDataset", "RandomShuffleQueueV2", "PyFunc", "MatMul", "None"))


def flat(tensors: object) -> list[bytes]:
    return [np.asarray(tensor).tobytes() for tensor in tf.nest.flatten(tensors)]


class Run:
    """A step that draws, in TensorFlow and under a budget."""

    def __init__(self, make_step, batch, steps=STEPS, seed=5):
        self.make_step, self.batch, self.steps, self.seed = make_step, batch, steps, seed

    def __call__(self, budget=None, before=lambda index: None, **options):
        tf.random.set_seed(self.seed)
        function = tf.function(self.make_step())
        if budget is not None:
            function = tfmem.optimize(function, memory_budget=budget, **options)
        results = []
        for index in range(self.steps):
            before(index)
            results.append(flat(function(*self.batch)))
        self.report = tfmem.report(function) if budget is not None else None
        self.function = function
        return results


def check_equal(run, smallest, **options):
    expected = run()
    assert len({tuple(result[1:]) for result in expected}) == len(expected)  # each step draws other numbers
    budget = SPARE + smallest(run)
    assert run(budget, **options) == expected
    assert run.report.decision == "moved"
    return budget, expected


@pytest.fixture(name="drawing")
def fixture_drawing(new_net, batch, flow):
    """Makes a run of the net's step, with draws: a function of the batch, called before the loss."""

    def make(draws, wrap=lambda net: net.step):
        def make_step():
            net = new_net()
            train = wrap(net)

            def step(x, y):
                drawn = draws()
                return train(x, y), drawn

            return step

        return Run(make_step, batch)

    return make


def seeds(op_seed):
    first, second = tf.compat.v1.get_seed(op_seed)
    return {"seed": first or 0, "seed2": second or 0}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["global", "op", "both"])
def test_every_random_op_goes_on_where_it_stopped(kind, drawing, smallest):
    def draws():
        own = (lambda place: None) if kind == "global" else (lambda place: 10 + place)
        return {name: draw(**seeds(own(place))) for place, (name, draw) in enumerate(DRAWS.items())}

    run = drawing(draws)
    if kind == "op":
        run.seed = None
    check_equal(run, smallest)


def test_the_readme_of_a_random_step(drawing, smallest):
    _, expected = check_equal(drawing(lambda: tf.random.normal([])), smallest)
    values = [np.frombuffer(result[1], np.float32)[0] for result in expected[:4]]
    np.testing.assert_allclose(values, [-1.714, 0.236, -0.295, -1.303], atol=1e-3)


def test_draws_in_loops_and_branches(drawing, smallest):
    """Both calls of `walk` have the same body, and each its own stream; one branch is taken late."""
    calls = tf.Variable(0)

    @tf.function
    def walk(value):
        def body(i, x):
            return i + 1, tf.tensor_scatter_nd_update(x, [[i]], tf.random.normal([1]))

        # in TensorFlow, too, iterations that run side by side draw in any order
        return tf.while_loop(lambda i, x: i < 3, body, [0, tf.fill([3], value)], parallel_iterations=1)[1]

    def branch(count):
        return tf.cond(count % 7 == 6, lambda: tf.random.uniform([]), lambda: tf.random.normal([], seed=3))

    def draws():
        count = calls.assign_add(1)
        case = tf.switch_case(count % 2, [lambda: tf.random.normal([2]), lambda: tf.random.uniform([2])])
        nested = tf.cond(count > 2, lambda: walk(1.0), lambda: tf.random.normal([3]))
        return walk(0.0), walk(0.0), branch(count), case, nested

    run = drawing(draws)
    make_step = run.make_step

    def from_zero():
        calls.assign(0)
        return make_step()

    run.make_step = from_zero
    check_equal(run, smallest)


def test_draws_in_what_moves(new_net, batch, flow, smallest):
    """Dropout, before and after tensors that move."""

    def make_step():
        net = new_net()

        def loss(x, y):
            x = tf.nn.dropout(x, 0.1)
            for weights, bias in zip(net.variables[0:5], net.variables[5:10], strict=True):
                x = tf.nn.dropout(tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, weights, 1, "SAME"), bias)), 0.2)
            logits = tf.reduce_mean(x, [1, 2]) @ net.variables[10]
            return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))

        def step(x, y):
            value = net._replace(loss=loss).step(x, y)
            return value, tf.identity(value)

        return step

    check_equal(Run(make_step, batch), smallest)


def test_with_a_profile_of_an_earlier_process(drawing, smallest, monkeypatch, tmp_path):
    run = drawing(lambda: (tf.random.normal([3]), tf.random.shuffle(tf.range(9))))
    monkeypatch.setenv("TFMEM_CACHE_DIR", str(tmp_path))
    budget, expected = check_equal(run, smallest)
    assert run(budget) == expected
    assert any("measured by an earlier process" in note for note in run.report.notes)


def test_a_step_that_fits(drawing):
    run = drawing(lambda: tf.random.normal([3]))
    expected = run()
    assert run(1 << 33) == expected  # by far: not observed
    assert run.report.decision.startswith("unchanged")
    assert run(in_use() + (1 << 22)) == expected  # seen to fit when it was observed
    assert run.report.decision != "moved"


def test_a_seed_set_in_between_begins_anew_as_in_tensorflow(drawing, smallest):
    run = drawing(lambda: tf.random.normal([3]))
    budget = SPARE + smallest(run)
    for calls in ((1, 2), (3,), (4, 7), (5, 12)):

        def set_seed(index, calls=calls):
            if index in calls:
                tf.random.set_seed(index)

        assert run(budget, before=set_seed) == run(before=set_seed)


def test_each_trace_and_each_function_has_streams_of_its_own(new_net, flow, batch, smallest):
    def interleaved(optimize):
        tf.random.set_seed(5)
        one, other = (optimize(tf.function(make())) for _ in range(2))
        x, y = batch
        results = []
        for index in range(12):
            results += flat(one(x, y)), flat(one(x[:8], y[:8]))
            if index % 2:
                results.append(flat(other(x, y)))
        return results

    def make():
        net = new_net()
        return lambda x, y: (net.step(x, y), tf.random.normal([2]))

    budget = SPARE + smallest(lambda size: tfmem.optimize(tf.function(make()), memory_budget=size)(*batch))
    assert interleaved(lambda function: tfmem.optimize(function, memory_budget=budget)) == interleaved(lambda f: f)


def test_a_concrete_function_goes_on_and_can_be_saved(drawing, smallest, tmp_path):
    run = drawing(lambda: tf.random.normal([3]))
    run.steps = STEPS + 2
    *_, first, second = run()
    run.steps = STEPS
    check_equal(run, smallest)
    concrete = run.function.get_concrete_function(*run.batch)
    ops = {node.op for node in concrete.graph.as_graph_def().node}
    assert "RandomStandardNormal" in ops
    assert "MemOpOffload" in ops
    assert not any(op.startswith("TfmemShared") for op in ops)
    assert [flat(concrete(*run.batch)), flat(run.function(*run.batch))] == [first, second]
    module = tf.Module()
    module.kept = concrete.graph.variables
    tf.saved_model.save(module, str(tmp_path), signatures=concrete)
    loaded = tf.saved_model.load(str(tmp_path)).signatures["serving_default"]
    drawn = [loaded(x=run.batch[0], y=run.batch[1])["output_1"] for _ in range(2)]
    outer = tf.function(lambda x, y: run.function(x, y)[1])  # a separate graph has separate kernels, in TensorFlow too
    assert [flat(outer(*run.batch)) for _ in range(2)] == [flat(each) for each in drawn] == [run()[0][1:], run()[1][1:]]


def test_what_reads_records_reads_on(drawing, smallest, tmp_path):
    path = str(tmp_path / "records")
    with tf.io.TFRecordWriter(path) as writer:
        for index in range(100):
            writer.write(b"%d" % index)
    options = {"file_pattern": path, "file_buffer_size": 1, "file_parallelism": 1, "batch_size": 3}
    run = drawing(lambda: tf.strings.to_number(RAW.RecordInput(**options)))
    steps = run(SPARE + smallest(run))
    assert run.report.decision == "moved"
    read = np.concatenate([np.frombuffer(drawn, np.float32) for _, drawn in steps])
    assert len(set(read.tolist())) == 3 * STEPS  # in any order, and none twice before all were read


def test_a_step_that_fits_still_has_a_gradient(new_net, batch):
    """What moves nothing runs unmodified, also where others build on it."""
    net = new_net()
    function = tfmem.optimize(
        tf.function(lambda x, y: net.loss(tf.nn.dropout(x, 0.5, seed=1), y)), memory_budget=1 << 33
    )
    x, y = batch
    for _ in range(5):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = function(x, y)
        assert float(tf.norm(tape.gradient(loss, x))) > 0

    @tf.function
    def outer(x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = function.get_concrete_function(x, y)(x, y)
        return tape.gradient(loss, x)

    assert float(tf.norm(outer(x, y))) > 0


def test_nothing_is_kept_of_a_step_that_is_gone(drawing):
    library = load()
    opened = []
    draws = Draws(library)
    opened.append(draws._stream)
    graph = tf.Graph()
    with graph.as_default():
        tf.random.normal([2], seed=1, name="x")
    shared = draws.shared(graph.as_graph_def())

    def call():
        function = tf.compat.v1.wrap_function(
            lambda: tf.graph_util.import_graph_def(shared, return_elements=["x:0"])[0], []
        )
        return function().numpy()

    first = call()
    assert np.array_equal(first, call())  # the first function's kernels are gone, and with them the stream
    del draws
    with pytest.raises(tf.errors.FailedPreconditionError, match="optimise the original again"):
        call()


def test_a_graph_of_another_process_is_refused(tmp_path):
    graph = tf.Graph()
    with graph.as_default():
        tf.random.normal([2], seed=1, name="x")
    shared = Draws(load()).shared(graph.as_graph_def())
    path = tmp_path / "graph.pb"
    path.write_bytes(shared.SerializeToString())
    program = (
        "import sys, tensorflow as tf, tfmem\nlibrary = tfmem.load_ops()\n"
        "if sys.argv[2] == 'known': library.share_op('RandomStandardNormal')\n"
        "graph_def = tf.compat.v1.GraphDef.FromString(open(sys.argv[1], 'rb').read())\n"
        "with tf.Graph().as_default() as graph:\n"
        "    tf.graph_util.import_graph_def(graph_def, name='')\n"
        "    print(tf.compat.v1.Session().run('x:0'))\n"
    )
    for known, expected in (("unknown", "Op type not registered"), ("known", "optimise the original again")):
        done = run_python(["-c", program, str(path), known])
        assert done.returncode != 0
        assert expected in done.stderr

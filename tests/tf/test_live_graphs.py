"""Graphs that their users hold on to: `optimize(tf.Graph)`, `avm_gradients`, `wrap_optimizer`; and serialised ones."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfmem

v1 = tf.compat.v1
KIB = 1 << 10
IMAGES = np.random.default_rng(0).normal(size=(16, 32, 32, 2)).astype("float32")
LABELS = np.arange(16) % 5
SPARE = 256 * KIB


class Session:
    """Listing 6.1's: a net of `tf.compat.v1`, its gradients, Adam, and a session."""

    def __init__(self, *, gradients=None, wrap=None, resource=True, batch=16, build=None):
        self.graph = tf.Graph()
        with self.graph.as_default():
            x = v1.placeholder(tf.float32, [batch, 32, 32, 2], name="x")
            y = v1.placeholder(tf.int64, [batch], name="y")
            for place in range(5):
                initializer = v1.glorot_uniform_initializer(seed=place)
                shape = [3, 3, x.shape[-1], 8]
                weights = v1.get_variable(f"w{place}", shape, initializer=initializer, use_resource=resource)
                x = tf.nn.relu(tf.nn.conv2d(x, weights, 1, "SAME"))
            last = v1.get_variable("last", [8, 5], initializer=initializer, use_resource=resource)
            logits = tf.reduce_mean(x, [1, 2]) @ last
            self.loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits), name="loss")
            optimizer = v1.train.AdamOptimizer(0.01)
            variables = v1.trainable_variables()
            if wrap:
                self.train = wrap(optimizer).minimize(self.loss)
            else:
                found = (gradients or tf.gradients)(self.loss, variables)
                self.train = optimizer.apply_gradients(zip(found, variables, strict=True))
            self.init = v1.global_variables_initializer()
            self.saver = v1.train.Saver()

    def losses(self, steps=4, graph=None, config=None):
        with v1.Session(graph=graph or self.graph, config=config or tfmem.session_config()) as session:
            session.run(self.init.name)
            return self.more(session, steps)

    def more(self, session, steps):
        feeds = {"x:0": IMAGES, "y:0": LABELS}
        return [session.run([self.loss.name, self.train.name], feeds)[0] for _ in range(steps)]


def memory_ops(graph):
    return [op.name for op in graph.get_operations() if op.type.startswith("MemOp")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("resource", [True, False], ids=["resource variables", "reference variables"])
def test_graph_is_edited_in_place(resource, flow, smallest):
    expected = Session().losses()  # with reference variables, plain TensorFlow reads and updates them in any order
    mine = Session(resource=resource)
    before = mine.graph.as_graph_def()
    budget = SPARE + smallest(lambda size: tfmem.optimize(mine.graph, memory_budget=size))
    assert mine.graph.as_graph_def() == before
    assert tfmem.optimize(mine.graph, memory_budget=budget) is mine.graph
    assert memory_ops(mine.graph)
    assert mine.losses() == expected  # so initializers are not run by the step, either
    report = tfmem.report(mine.graph)
    assert flow.moved == 4 * report.bytes_out_predicted > 0
    assert mine.losses(config=v1.ConfigProto()) == expected  # another config only loses the order
    with pytest.raises(tfmem.AlreadyOptimizedError, match="optimised before"):
        tfmem.optimize(mine.graph, memory_budget=budget)


def test_graph_that_fits_is_not_touched(flow):
    mine = Session()
    before = mine.graph.as_graph_def()
    tfmem.optimize(mine.graph, memory_budget="8GiB")
    assert mine.graph.as_graph_def() == before
    assert tfmem.report(mine.graph).decision == "unchanged: fits"


def test_graph_in_use_is_refused(flow):
    mine = Session()
    before = mine.graph.as_graph_def()
    with v1.Session(graph=mine.graph) as session:
        session.run(mine.init)
        with pytest.raises(tfmem.GraphInUseError, match="close the session first"):
            tfmem.optimize(mine.graph, memory_budget="1MiB")
    mine.graph.finalize()
    with pytest.raises(tfmem.GraphInUseError, match="finalized"):
        tfmem.optimize(mine.graph, memory_budget="1MiB")
    assert mine.graph.as_graph_def() == before


def test_open_batch(flow, smallest):
    def within(budget, **shapes):
        mine = Session(batch=None)
        tfmem.optimize(mine.graph, memory_budget=budget, **shapes)
        return mine

    with pytest.raises(tfmem.UnknownShapeError, match=r"input_shapes=\{'x'"):
        within("1MiB")
    shapes = {"input_shapes": {"x": (16, 32, 32, 2), "y": (16,)}}
    assert within(SPARE + smallest(lambda size: within(size, **shapes)), **shapes).losses() == Session().losses()
    assert flow.moved > 0


def test_one_of_several_training_steps(flow, smallest):
    def two_steps():
        graph = tf.Graph()
        with graph.as_default():
            x = v1.placeholder(tf.float32, [16, 32, 32, 2], name="x")
            for name in ("one", "two"):
                h, weights = x, []
                for place in range(4):
                    initializer = v1.glorot_uniform_initializer(seed=place)
                    weights.append(v1.get_variable(f"{name}/w{place}", [3, 3, h.shape[-1], 8], initializer=initializer))
                    h = tf.nn.relu(tf.nn.conv2d(h, weights[-1], 1, "SAME"))
                loss = tf.reduce_mean(h * h, name=f"{name}/loss")
                v1.train.GradientDescentOptimizer(0.1).minimize(loss, var_list=weights, name=f"{name}/train")
            v1.global_variables_initializer()
        return graph

    def losses(graph):
        with v1.Session(graph=graph, config=tfmem.session_config()) as session:
            session.run("init")
            first = [session.run(["one/loss:0", "one/train"], {"x:0": IMAGES})[0] for _ in range(3)]
            return [*first, session.run("two/loss:0", {"x:0": IMAGES})]

    with pytest.raises(tfmem.GraphError, match=r"several training steps, 'one/train', 'two/train'.*fetches="):
        tfmem.optimize(two_steps(), memory_budget="1MiB")
    expected = losses(two_steps())
    step = {"fetches": ["one/train"]}
    budget = SPARE + smallest(lambda size: tfmem.optimize(two_steps(), memory_budget=size, **step))
    assert losses(tfmem.optimize(two_steps(), memory_budget=budget, **step)) == expected
    assert flow.moved > 0


# --- the thesis's two ways in ---------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("resource", [True, False], ids=["resource variables", "reference variables"])
def test_avm_gradients_in_a_graph(resource, flow, smallest):
    def within(budget):
        return Session(gradients=lambda *given: tfmem.avm_gradients(*given, memory_budget=budget), resource=resource)

    mine = within(SPARE + smallest(within))
    assert memory_ops(mine.graph)
    assert mine.losses() == Session().losses()
    assert flow.moved == 4 * tfmem.report(mine.graph).bytes_out_predicted > 0


def test_wrapped_v1_optimizer(flow, smallest):
    def within(budget):
        return Session(wrap=lambda optimizer: tfmem.wrap_optimizer(optimizer, memory_budget=budget))

    mine = within(SPARE + smallest(within))
    assert memory_ops(mine.graph)
    assert mine.losses() == Session().losses()
    assert flow.moved > 0


def test_avm_gradients_in_a_function(new_net, batch, flow, smallest):
    def make(gradients):
        net = new_net()

        @tf.function
        def step(x, y):
            loss = net.loss(x, y)
            for variable, gradient in zip(net.variables, gradients(loss, net.variables), strict=True):
                variable.assign_sub(0.1 * gradient)
            return loss

        return step

    def within(budget):
        return make(lambda *given: tfmem.avm_gradients(*given, memory_budget=budget))

    expected = [float(function(*batch)) for function in [make(tf.gradients)] for _ in range(4)]
    function = within(SPARE + smallest(lambda size: within(size)(*batch)))
    assert [float(function(*batch)) for _ in range(4)] == expected
    assert memory_ops(function.get_concrete_function(*batch).graph)
    assert flow.moved > 0


def test_avm_gradients_needs_a_graph_and_a_gradient(new_net, batch):
    with pytest.raises(tfmem.GraphError, match=r"inside a tf.function or under tf.Graph"):
        tfmem.avm_gradients(tf.constant(1.0), [tf.Variable(1.0)])
    with tf.Graph().as_default():
        variable = v1.get_variable("v", [3])
        with pytest.raises(tfmem.NoGradientError, match="depends on none of the 1 variables"):
            tfmem.avm_gradients(tf.constant(1.0), [variable], memory_budget="1MiB")


def keras_loop(new_net, library, wrap=lambda optimizer: optimizer, call="apply_gradients"):
    net = new_net()
    optimizer = wrap(library.optimizers.Adam(0.01))
    optimizer.build(net.variables)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = net.loss(x, y)
        gradients = tape.gradient(loss, net.variables)
        if call == "apply":
            optimizer.apply(gradients, net.variables)
        else:
            optimizer.apply_gradients(zip(gradients, net.variables, strict=True))
        return loss

    return optimizer, step


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("library", "call"), [(keras, "apply"), (keras, "apply_gradients"), (tf_keras, "apply_gradients")]
)
def test_wrapped_keras_optimizer(library, call, new_net, batch, flow, smallest):
    def within(budget):
        return keras_loop(
            new_net, library, lambda optimizer: tfmem.wrap_optimizer(optimizer, memory_budget=budget), call
        )

    _, plain = keras_loop(new_net, library, call=call)
    optimizer, function = within(SPARE + smallest(lambda size: within(size)[1](*batch)))
    assert [float(function(*batch)) for _ in range(4)] == [float(plain(*batch)) for _ in range(4)]
    assert flow.moved > 0
    assert int(optimizer.iterations) == 4
    assert isinstance(optimizer, library.optimizers.Adam)
    assert (
        library.optimizers.deserialize(library.optimizers.serialize(optimizer)).get_config() == optimizer.get_config()
    )


@pytest.mark.parametrize("library", [keras, tf_keras], ids=lambda library: library.__name__)
def test_a_wrapped_optimizer_shares_state_and_leaves_the_original(library):
    original = library.optimizers.SGD(0.1)
    kind = type(original)
    wrapped = tfmem.wrap_optimizer(original, memory_budget="1GiB")
    assert type(original) is kind
    wrapped.learning_rate = 0.25
    assert float(original.learning_rate) == 0.25
    variable = tf.Variable(1.0)
    with pytest.raises(tfmem.GraphError, match=r"put the step into a tf.function"):
        wrapped.apply_gradients([(tf.constant(1.0), variable)])
    with pytest.raises(tfmem.GraphError, match="cannot wrap a list"):
        tfmem.wrap_optimizer([])
    with pytest.raises(tfmem.InvalidBudgetError):
        tfmem.wrap_optimizer(original, memory_budget=0)


# --- serialised -----------------------------------------------------------------------------


def imported(graph_def):
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(graph_def, name="")
    return graph


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fetches", [(), ("loss:0", "Adam")], ids=["found", "named"])
def test_graph_def(fetches, flow, smallest):
    mine = Session()
    expected, graph_def = mine.losses(), mine.graph.as_graph_def()
    before = graph_def.SerializeToString(deterministic=True)
    least = smallest(lambda size: tfmem.optimize(graph_def, memory_budget=size, fetches=fetches))
    result = tfmem.optimize(graph_def, memory_budget=least + SPARE, fetches=fetches)
    assert graph_def.SerializeToString(deterministic=True) == before
    assert mine.losses(graph=imported(result)) == expected
    assert flow.moved > 0
    assert tfmem.optimize(graph_def, memory_budget="8GiB", fetches=fetches) == graph_def
    with pytest.raises(tfmem.AlreadyOptimizedError):
        tfmem.optimize(result, memory_budget=least + SPARE)
    with pytest.raises(tfmem.GraphError, match="no op 'nothing'"):
        tfmem.optimize(graph_def, memory_budget=least, fetches=["nothing"])


def test_meta_graph_keeps_its_saver_and_collections(flow, smallest, tmp_path):
    mine = Session()
    expected = mine.losses(6)
    with mine.graph.as_default():
        meta_graph = v1.train.export_meta_graph(saver_def=mine.saver.as_saver_def())
    least = smallest(lambda size: tfmem.optimize(meta_graph, memory_budget=size))
    result = tfmem.optimize(meta_graph, memory_budget=least + SPARE)
    report = tfmem.report(result)
    assert report.decision == "moved"
    assert report.budget == least + SPARE
    assert type(result) is type(meta_graph)
    with tf.Graph().as_default() as graph:
        saver = v1.train.import_meta_graph(result)
        assert len(v1.trainable_variables()) == 6
        with v1.Session(graph=graph, config=tfmem.session_config()) as session:
            session.run(mine.init.name)
            assert mine.more(session, 3) == expected[:3]
            saver.save(session, str(tmp_path / "saved"))
            session.run(mine.init.name)
            saver.restore(session, str(tmp_path / "saved"))
            assert mine.more(session, 3) == expected[3:]
    assert flow.moved > 0

"""`tfmem.optimize`: the same kind of object comes out, equal to the bit, and moves tensors only if it must."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfmem

KIB = 1 << 10
SPARE = 256 * KIB  # beside the smallest budget, so that what a test's process allocates by the way has room
SIGNATURE = [tf.TensorSpec([16, 32, 32, 2], name="x"), tf.TensorSpec([16], tf.int64, name="y")]


def bits(results):
    return [np.asarray(result).tobytes() for result in tf.nest.flatten(results)]


def run(function, batch, steps=6):
    return [bits(function(*batch)) for _ in range(steps)]


# --- functions ------------------------------------------------------------------------------


def test_function_is_equal_to_the_bit_within_its_budget(new_net, batch, flow, smallest):
    expected = run(tf.function(new_net().step), batch)
    budget = SPARE + smallest(lambda size: tfmem.optimize(tf.function(new_net().step), memory_budget=size)(*batch))
    function = tfmem.optimize(tf.function(new_net().step), memory_budget=budget)
    assert run(function, batch) == expected
    report = tfmem.report(function)
    assert report.decision == "moved"
    assert flow.moved >= report.bytes_out_predicted > 0
    assert report.bytes_out_achieved == report.bytes_in_achieved == report.bytes_out_predicted
    assert report.peak_measured <= budget < report.peak_before
    assert tfmem.Report.from_json(report.to_json()) == report
    assert str(report.transfers[0].bytes) or report.to_text()


def test_nothing_moves_when_it_fits(new_net, batch, flow):
    plain = tf.function(new_net().step)
    function = tfmem.optimize(plain, memory_budget="8GiB")
    function(*batch)
    assert function.get_concrete_function(*batch) is plain.get_concrete_function(*batch)
    assert tfmem.report(function).decision == "unchanged: fits"
    assert not tfmem.report(function).transfers
    unlimited = tfmem.optimize(tf.function(new_net().step))
    unlimited(*batch)
    assert tfmem.report(unlimited).decision == "unchanged: no budget"
    assert flow.moved == 0


def test_each_trace_is_planned(new_net, batch, flow, smallest):
    def quarter(batch):
        return [tensor[:4] for tensor in batch]

    plain = tf.function(new_net().step)
    expected = [run(plain, batch), run(plain, quarter(batch))]
    budget = SPARE + smallest(lambda size: tfmem.optimize(tf.function(new_net().step), memory_budget=size)(*batch))
    function = tfmem.optimize(tf.function(new_net().step), memory_budget=budget)
    assert run(function, batch) == expected[0]
    moved = flow.moved
    assert moved > 0
    assert run(function, quarter(batch)) == expected[1]
    assert flow.moved == moved  # a quarter of a batch fits
    assert tfmem.report(function).decision == "moved"


def test_concrete_function(new_net, batch, flow, smallest):
    nets = []  # a function holds its variables weakly

    def concrete():
        nets.append(new_net())
        return tf.function(nets[-1].step).get_concrete_function(*batch)

    expected = run(concrete(), batch)
    budget = SPARE + smallest(lambda size: tfmem.optimize(concrete(), memory_budget=size))
    optimized = tfmem.optimize(concrete(), memory_budget=budget)
    assert isinstance(optimized, type(concrete()))
    assert run(optimized, batch) == expected
    assert flow.moved == 6 * tfmem.report(optimized).bytes_out_predicted > 0
    fits = concrete()
    assert tfmem.optimize(fits, memory_budget="8GiB") is fits


def test_called_in_another_function(new_net, batch, flow, smallest):
    """Nothing is observed there, and no probes are left in the caller's graph."""
    expected = run(tf.function(new_net().step), batch)
    budget = SPARE + smallest(lambda size: tfmem.optimize(tf.function(new_net().step), memory_budget=size)(*batch))
    inner = tfmem.optimize(tf.function(new_net().step), memory_budget=budget)

    @tf.function
    def outer(x, y):
        return inner(x, y)

    assert run(outer, batch) == expected
    assert flow.moved == 6 * tfmem.report(inner).bytes_out_predicted > 0
    ops = [op.type for op in inner.get_concrete_function(*batch).graph.get_operations()]
    assert "MemOpOffload" in ops
    assert "MemOpProbe" not in ops
    with pytest.raises(tfmem.AlreadyOptimizedError):
        tfmem.optimize(outer, memory_budget=budget)(*batch)


def test_input_shapes_make_an_open_batch_known(new_net, batch, flow, smallest):
    signature = [tf.TensorSpec([None, 32, 32, 2], name="x"), tf.TensorSpec([None], tf.int64, name="y")]

    def within(budget, **shapes):
        function = tf.function(new_net().step, input_signature=signature)
        return tfmem.optimize(function, memory_budget=budget, **shapes)

    shapes = {"input_shapes": {"x": (16, 32, 32, 2), "y": (16,)}}
    with pytest.raises(tfmem.UnknownShapeError, match=r"dimension 0 of .* 'x' \(\?, 32, 32, 2\).*input_shapes=\{'x'"):
        within(4 * KIB)(*batch)
    with pytest.raises(tfmem.GraphError, match="'images', which is no input of the graph; its inputs are: x, y"):
        within(4 * KIB, input_shapes={"images": (16,)})(*batch)
    assert flow.moved == 0
    budget = SPARE + smallest(lambda size: within(size, **shapes)(*batch))
    assert run(within(budget, **shapes), batch) == run(tf.function(new_net().step), batch)
    assert flow.moved > 0


def test_options_and_environment(new_net, batch, flow, smallest, monkeypatch):
    function = tf.function(new_net().step)
    budget = 4 * SPARE + smallest(lambda size: tfmem.optimize(function, memory_budget=size)(*batch))
    monkeypatch.setenv("TFMEM_MEMORY_BUDGET", str(budget))
    monkeypatch.setenv("TFMEM_POLICY", "vdnn_all")
    monkeypatch.setenv("TFMEM_OBSERVE", "0")
    function = tfmem.optimize(tf.function(new_net().step))
    expected = run(tf.function(new_net().step), batch)
    assert run(function, batch) == expected
    report = tfmem.report(function)
    assert (report.budget, report.policy) == (budget, "vdnn_all")
    assert flow.moved == 6 * report.bytes_out_predicted > 0
    options = tfmem.Options(memory_budget="8GiB")
    assert tfmem.optimize(tf.function(new_net().step), options=options)(*batch).shape == ()


# --- graphs of all kinds --------------------------------------------------------------------


def layers(count=5, channels=(2, 8)):
    first, wide = channels
    return [
        tf.Variable(tf.random.stateless_normal([3, 3, wide if place else first, wide], [place, 1], stddev=0.15))
        for place in range(count)
    ]


def convolve(x, weights):
    return tf.nn.relu(tf.nn.conv2d(x, weights, 1, "SAME"))


def descend(variables, gradients):
    for variable, gradient in zip(variables, gradients, strict=True):
        variable.assign_sub(0.05 * gradient)


def with_tf_gradients():
    weights = layers()

    def step(x, y):
        for each in weights:
            x = convolve(x, each)
        loss = tf.reduce_mean(x * x)
        descend(weights, tf.gradients(loss, weights))
        return loss

    return step


def skip_connections():
    weights = layers()

    def step(x, y):
        with tf.GradientTape() as tape:
            outputs = [convolve(x, weights[0])]
            for each in weights[1:]:
                outputs.append(convolve(outputs[-1], each) + outputs[-1])
            loss = tf.reduce_mean(tf.concat([outputs[-1] + outputs[0], outputs[1]], -1) ** 2)
        descend(weights, tape.gradient(loss, weights))
        return loss

    return step


def shared_layers_and_clipping():
    weights = layers(2)

    def step(x, y):
        with tf.GradientTape() as tape:
            x = convolve(x, weights[0])
            for _ in range(5):
                x = convolve(x, weights[1])
            loss = tf.reduce_mean(x * x)
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, weights), 0.1)
        descend(weights, gradients)
        return loss, norm

    return step


def misleading_scopes_and_custom_gradients():
    weights = layers()

    @tf.custom_gradient
    def swish(x):
        gate = tf.sigmoid(x)
        return x * gate, lambda upstream: upstream * (gate * (1 + x * (1 - gate)))

    def step(x, y):
        with tf.name_scope("gradients"), tf.GradientTape() as tape:
            for each in weights:
                with tf.name_scope("backward"):
                    x = swish(tf.nn.conv2d(x, each, 1, "SAME"))
            loss = tf.reduce_mean(x * x)
        with tf.name_scope("forward"):
            descend(weights, tape.gradient(loss, weights))
        return loss

    return step


def several_losses():
    weights = layers()

    def step(x, y):
        with tf.GradientTape(persistent=True) as tape:
            losses = []
            for each in weights:
                x = convolve(x, each)
                losses.append(tf.reduce_mean(x * x))
            early, late = losses[2], losses[-1] + 0.1 * losses[0]
        descend(weights, tape.gradient(late, weights))
        descend(weights[:3], tape.gradient(early, weights[:3]))
        return early, late

    return step


def gradients_of_gradients():
    weights = layers(4)

    def step(x, y):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                h = x
                for each in weights:
                    h = tf.nn.softplus(tf.nn.conv2d(h, each, 1, "SAME"))
                loss = tf.reduce_mean(h * h)
            slope = tf.norm(tf.reshape(inner.gradient(loss, x), [16, -1]), axis=1)
            penalised = loss + tf.reduce_mean((slope - 1.0) ** 2)
        descend(weights, outer.gradient(penalised, weights))
        return penalised

    return step


STEPS = [
    with_tf_gradients,
    skip_connections,
    shared_layers_and_clipping,
    misleading_scopes_and_custom_gradients,
    several_losses,
    gradients_of_gradients,
]


@pytest.mark.parametrize("make_step", STEPS, ids=lambda make: make.__name__)
def test_roles_are_read_from_the_structure(make_step, batch, flow, smallest):
    expected = run(tf.function(make_step()), batch)
    offload = tfmem.OffloadOptions(reuse_distance=1)
    least = smallest(lambda size: tfmem.optimize(tf.function(make_step()), memory_budget=size, offload=offload)(*batch))
    function = tfmem.optimize(tf.function(make_step()), memory_budget=least + SPARE, offload=offload)
    assert run(function, batch) == expected
    assert flow.moved > 0


def python_op(x, y):
    result = tf.py_function(lambda tensor: 2.0 * tensor, [x], tf.float32)
    result.set_shape(x.shape)
    return result


def while_loop(x, y):
    return tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(h)), [0, x])[1]


def condition(x, y):
    return tf.cond(tf.reduce_sum(y) > 0, lambda: tf.sin(x), lambda: tf.cos(x))


def boolean_mask(x, y):
    return x + tf.reduce_mean(tf.boolean_mask(x, y < 3))


def strings(x, y):
    with tf.control_dependencies([tf.debugging.assert_equal(tf.strings.length(tf.strings.as_string(y)), 1)]):
        return tf.identity(x)


def integers(x, y):
    return x * tf.cast(tf.cast(tf.round(x), tf.int32), tf.float32)


UNUSUAL = {
    python_op: "EagerPyFunc:0: its size is not known before it runs",
    while_loop: "",
    condition: "",
    boolean_mask: "boolean_mask/GatherV2:0: its size is not known before it runs",
    strings: "",
    integers: "Cast:0: TensorFlow keeps int32 tensors in host memory",
}


@pytest.mark.parametrize("middle", UNUSUAL, ids=lambda middle: middle.__name__)
def test_what_cannot_be_moved_is_left_alone(middle, batch, flow, smallest):
    def make_step():
        weights = layers()

        def step(x, y):
            with tf.GradientTape() as tape:
                for place, each in enumerate(weights):
                    x = convolve(x, each)
                    if place == 2:
                        x = middle(x, y)
                loss = tf.reduce_mean(x * x)
            descend(weights, tape.gradient(loss, weights))
            return loss

        return tf.function(step)

    expected = run(make_step(), batch)
    budget = SPARE + smallest(lambda size: tfmem.optimize(make_step(), memory_budget=size)(*batch))
    function = tfmem.optimize(make_step(), memory_budget=budget)
    assert run(function, batch) == expected
    assert flow.moved > 0
    assert UNUSUAL[middle] in " ".join(tfmem.report(function).notes)


def test_lookup_tables_are_left_alone(new_net, batch, flow, smallest):
    keys = tf.range(5, dtype=tf.int64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, (keys + 2) % 5), 0)

    def plain():
        net = new_net()
        return tf.function(lambda x, y: net.step(x, table.lookup(y)))

    def within(budget):
        return tfmem.optimize(plain(), memory_budget=budget)

    expected = run(plain(), batch)
    assert run(within(SPARE + smallest(lambda size: within(size)(*batch))), batch) == expected
    assert flow.moved > 0


# --- Keras ----------------------------------------------------------------------------------

X = np.random.default_rng(1).normal(size=(40, 32, 32, 1)).astype("float32")
Y = np.arange(40) % 5


def model(library, policy="float32", **clip):
    library.utils.set_random_seed(3)
    library.mixed_precision.set_global_policy(policy)
    try:
        inputs = outputs = library.Input((32, 32, 1))
        for _ in range(4):
            outputs = library.layers.Conv2D(8, 3, padding="same")(outputs)
            outputs = library.layers.ReLU()(outputs)
        outputs = library.layers.GlobalAveragePooling2D()(library.layers.BatchNormalization()(outputs))
        result = library.Model(inputs, library.layers.Dense(5, dtype="float32")(outputs))
        loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
        result.compile(library.optimizers.Adam(0.01, **clip), loss, metrics=["accuracy"], jit_compile=False)
    finally:
        library.mixed_precision.set_global_policy("float32")
    return result


def fit(made, callbacks=()):
    options = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
    return made.fit(X, Y, validation_data=(X[:9], Y[:9]), callbacks=list(callbacks), **options).history


# TensorFlow's CPU fuses bfloat16 convolutions with what follows, which a graph that it imports cannot say: the sums are
# rounded at other places.
CASES = {
    "keras": (keras, {"clipnorm": 0.1}, 0.0),
    "keras, loss scaling": (keras, {"policy": "mixed_float16"}, 0.0),
    "tf_keras": (tf_keras, {"clipnorm": 0.1}, 0.0),
    "tf_keras, bfloat16": (tf_keras, {"policy": "mixed_bfloat16"}, 0.2),
}


@pytest.mark.parametrize("case", CASES)
def test_keras_models_train_the_same(case, flow, smallest):
    library, how, tolerance = CASES[case]
    expected = model(library, **how)
    history, batches = fit(expected), []
    optimized = model(library, **how)
    weights = [np.copy(weight) for weight in optimized.get_weights()]
    least = smallest(lambda size: fit(tfmem.optimize(optimized, memory_budget=size)))
    for one, other in zip(weights, optimized.get_weights(), strict=True):
        assert np.array_equal(one, other)  # it failed before anything ran
    assert tfmem.optimize(optimized, memory_budget=least + SPARE) is optimized
    counter = library.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch))
    found = fit(optimized, [counter])
    assert batches == 2 * [0, 1, 2]
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose(found[name], history[name], rtol=tolerance)
    batch = X[:16], Y[:16]
    np.testing.assert_allclose(optimized.train_on_batch(*batch), expected.train_on_batch(*batch), rtol=tolerance)
    for one, other in zip(expected.get_weights(), optimized.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
    assert tfmem.report(optimized).decision == "moved"
    assert flow.moved > 0


@pytest.mark.parametrize("library", [keras, tf_keras], ids=lambda library: library.__name__)
def test_keras_models_that_fit_are_left_alone(library, flow):
    optimized = tfmem.optimize(model(library), memory_budget="8GiB")
    assert fit(optimized) == fit(model(library))
    assert tfmem.report(optimized).decision == "unchanged: fits"
    assert flow.moved == 0


# --- SavedModels and serialised graphs ------------------------------------------------------


def save(net, path):
    module = tf.Module()
    module.all_variables = net.variables
    module.train = tf.function(lambda x, y: {"loss": net.step(x, y)}, input_signature=SIGNATURE)
    module.evaluate = tf.function(net.loss, input_signature=SIGNATURE)
    tf.saved_model.save(module, str(path), signatures={"train": module.train})
    return str(path)


def test_saved_model(new_net, batch, flow, tmp_path, smallest):
    x, y = batch
    expected = run(tf.function(new_net().step), batch)
    path = save(new_net(), tmp_path / "model")
    before = {file: file.read_bytes() for file in (tmp_path / "model").rglob("*") if file.is_file()}
    least = smallest(lambda size: tfmem.optimize(path, memory_budget=size))
    assert not (tmp_path / "model_tfmem").exists()
    output = tfmem.optimize(path, memory_budget=least + SPARE)
    assert output == str(tmp_path / "model_tfmem")
    loaded = tf.saved_model.load(output)
    served = [bits(loaded.signatures["train"](x=x, y=y)["loss"]) for _ in range(3)]
    called = [bits(loaded.train(x, y)["loss"]) for _ in range(3)]
    assert served + called == expected
    assert bits(loaded.evaluate(x, y))
    report = tfmem.report(output)
    assert report.decision == "moved"
    assert flow.moved == 6 * report.bytes_out_predicted > 0
    json.loads(report.to_json())
    assert {file: file.read_bytes() for file in before} == before
    with pytest.raises(tfmem.AlreadyOptimizedError, match="optimised before"):
        tfmem.optimize(output, memory_budget=least + SPARE, output=tmp_path / "twice")
    with pytest.raises(tfmem.GraphError, match="is not empty"):
        tfmem.optimize(path, memory_budget=least + SPARE, output=output)
    with pytest.raises(tfmem.GraphError, match="not a SavedModel"):
        tfmem.optimize(tmp_path / "nothing", memory_budget="1GiB")
    assert not (tmp_path / "twice").exists()


def test_reports_are_of_optimised_objects(new_net):
    with pytest.raises(tfmem.GraphError, match="no report"):
        tfmem.report(object())
    with pytest.raises(tfmem.GraphError, match="never called"):
        tfmem.report(tfmem.optimize(tf.function(new_net().step), memory_budget="1GiB"))
    with pytest.raises(tfmem.GraphError, match="cannot optimise a list"):
        tfmem.optimize([])

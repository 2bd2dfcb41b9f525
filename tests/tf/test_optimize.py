"""`tfmem.optimize`: the same kind of object comes out, equal to the bit, and moves tensors only if it must."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfmem
from tests.tf.optimized_runs import KIB, SPARE, bits, run

SIGNATURE = [tf.TensorSpec([16, 32, 32, 2], name="x"), tf.TensorSpec([16], tf.int64, name="y")]


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


@pytest.mark.long
def test_gradients_of_gradients(smallest):
    # A tensor: each call would make another one of an array, of 256 KiB, and the last call's may still be in memory.
    x = tf.constant(np.random.default_rng(0).random((512, 128)).astype(np.float32))
    first = np.random.default_rng(1).normal(size=(4, 128, 128)).astype(np.float32) / 10

    def made():
        weights = [tf.Variable(each) for each in first]

        @tf.function
        def step(x):
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    y = x
                    for weight in weights:
                        y = tf.nn.softplus(y @ weight)
                    loss = tf.reduce_mean(y)
                penalty = loss + sum(tf.reduce_sum(each**2) for each in inner.gradient(loss, weights))
            for weight, gradient in zip(weights, outer.gradient(penalty, weights), strict=True):
                weight.assign_sub(gradient)
            return penalty

        return step

    expected = [float(step(x)) for step in [made()] for _ in range(8)]
    budget = SPARE + smallest(lambda size: tfmem.optimize(made(), memory_budget=size)(x))
    step = tfmem.optimize(made(), memory_budget=budget)
    assert [float(step(x)) for _ in range(8)] == expected
    assert tfmem.report(step).decision == "moved"
    assert expected[0] != expected[-1]


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


def test_a_step_that_fits_is_watched_for_what_it_takes(new_net, batch):
    function = tfmem.optimize(tf.function(new_net().step), memory_budget="8GiB")
    for _ in range(2):
        function(*batch)
    estimated = tfmem.report(function)
    assert estimated.peak_measured is None
    function(*batch)
    report = tfmem.report(function)
    assert report.decision == "unchanged: fits"
    assert report.peak_predicted == pytest.approx(report.peak_measured, rel=0.5)  # a CPU runs ops as it likes
    assert report.notes[0].startswith(f"{estimated.peak_predicted:,} bytes were estimated")
    unobserved = tfmem.optimize(tf.function(new_net().step), memory_budget="8GiB", observe=False)
    for _ in range(3):
        unobserved(*batch)
    assert tfmem.report(unobserved).peak_measured is None


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


@pytest.mark.sampled(2)
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
    compared = slice(1 if tolerance else None)  # one row of 16 more or less is right
    for one, other in zip(expected.train_on_batch(*batch)[compared], optimized.train_on_batch(*batch), strict=False):
        np.testing.assert_allclose(other, one, rtol=tolerance)
    for one, other in zip(expected.get_weights(), optimized.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
    assert tfmem.report(optimized).decision == "moved"
    assert flow.moved > 0


@pytest.mark.sampled(2)
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

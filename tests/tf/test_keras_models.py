"""What is installed into a Keras model, what stays Keras's own, and what its report says."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfmem

LIBRARIES = pytest.mark.parametrize("library", [keras, tf_keras], ids=lambda library: library.__name__)
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(50, 7, 5)).astype("float32"), RANDOM.normal(size=(50, 1)).astype("float32")
FIT = {"batch_size": 24, "epochs": 2, "shuffle": False, "verbose": 0}


def recurrent(library: Any, steps: int = 1, last: Any = None, dropout: float = 0.3) -> Any:
    library.utils.set_random_seed(1)
    layers = library.layers
    inputs = library.Input((7, 5))
    hidden = layers.Dropout(dropout)(layers.LSTM(8, dropout=dropout)(inputs))
    model = library.Model(inputs, layers.Dense(1)(last(hidden) if last else hidden))
    model.compile("sgd", "mse", metrics=["mae"], steps_per_execution=steps, jit_compile=False)
    return model


def runs(model: Any) -> list[Any]:
    history = model.fit(X, Y, validation_data=(X[:30], Y[:30]), **FIT).history
    return [*history.values(), model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0), *model.get_weights()]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("steps", [1, 2])
@LIBRARIES
def test_recurrent_layers_are_replaced_and_nothing_else_changes(library: Any, steps: int, flow: Any) -> None:
    """Partial batches and dropout included: a step is traced as often as Keras traces it."""
    wanted = runs(recurrent(library, steps))
    model = tfmem.optimize(recurrent(library, steps))
    for found, expected in zip(runs(model), wanted, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    report = tfmem.report(model)
    assert [part.function for part in (report, *report.others)] == ["train", "test", "predict"]
    assert all(part.replaced for part in (report, *report.others))
    assert "tfmem.frontends.keras" in type(model.train_function).__module__


@pytest.mark.sampled(2)
@LIBRARIES
def test_a_trace_serves_all_batches(library: Any, flow: Any) -> None:
    """Without a budget nothing is planned for another batch size."""
    model = tfmem.optimize(recurrent(library))
    shapes = []
    optimized = model.train_function._step
    original = optimized.call_as

    def call_as(traced: Any, batch: Any) -> Any:
        shapes.append((id(traced), traced.inputs[0].shape[0], batch[0].shape[0]))
        return original(traced, batch)

    optimized.call_as = call_as
    model.fit(X, Y, **FIT)
    traces, open_sizes, sizes = map(set, zip(*shapes, strict=True))
    assert (len(traces), open_sizes, sizes) == (1, {None}, {24, 2})


@pytest.mark.sampled(2)
@LIBRARIES
def test_what_is_not_recurrent_is_traced_once(library: Any, flow: Any) -> None:
    """Without a budget; Python code of a layer runs as often as it does under Keras."""
    traces: list[str] = []

    class Counting(library.layers.Layer):
        def call(self, inputs: Any) -> Any:
            traces.append("")
            return inputs

    counts = []
    for optimize in (lambda model: model, tfmem.optimize):
        traces.clear()
        model = library.Sequential([library.layers.Input((5,)), Counting(), library.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
        optimize(model)
        model.fit(X[:, 0], Y, **FIT)
        counts.append(len(traces))
    assert counts[0] == counts[1]


@pytest.mark.sampled(2)
@LIBRARIES
def test_the_report_tells_of_training_first(library: Any, flow: Any) -> None:
    model = tfmem.optimize(recurrent(library), memory_budget="8GiB")
    with pytest.raises(tfmem.GraphError, match="never run; call fit, evaluate or predict"):
        tfmem.report(model)
    model.predict(X, verbose=0)
    assert tfmem.report(model).function == "predict"
    model.evaluate(X, Y, verbose=0)
    assert [part.function for part in tfmem.report(model).others] == ["predict"]
    model.fit(X, Y, **FIT)
    model.evaluate(X, Y, verbose=0)
    report = tfmem.report(model)
    assert report.budget == 8 << 30
    assert [report.function, *(part.function for part in report.others)] == ["train", "test", "predict"]
    text = str(report)
    assert text.index(".fit`") < text.index(".evaluate`") < text.index(".predict`")


@pytest.mark.sampled(2)
@LIBRARIES
def test_functions_of_the_users_own_stay(library: Any, flow: Any) -> None:
    batches = []

    class Own(library.Sequential):
        def make_train_function(self, force: bool = False) -> Any:
            def train_function(iterator: Any) -> Any:
                batches.append(next(iterator))
                return {"loss": tf.constant(1.0)}

            self.train_function = train_function
            return train_function

    model = Own([library.layers.Input((7, 5)), library.layers.LSTM(4), library.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    tfmem.optimize(model)
    model.fit(X, Y, **FIT)
    assert len(batches) == 6
    model.evaluate(X, Y, verbose=0)
    assert tfmem.report(model).replaced
    with pytest.raises(tfmem.GraphError, match=r"overrides `make_train_function` \(Own\)"):
        tfmem.optimize(model, memory_budget="1GiB")


@pytest.mark.sampled(2)
@LIBRARIES
def test_nothing_is_installed_where_nothing_can_change(library: Any, flow: Any) -> None:
    model = tfmem.optimize(recurrent(library), passes=("offload",))
    assert model.train_function is None
    assert model.test_function is None
    assert tfmem.report(model).decision == "unchanged: no budget"


@pytest.mark.long
def test_control_flow_in_layers_of_tf_keras(flow: Any) -> None:
    """tf_keras lets autograph convert a layer's `call`; a `train_step` it does not."""

    class Clipped(tf_keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            if tf.reduce_max(inputs) > 1:
                inputs = inputs / 2
            return inputs

    for options in ({}, {"memory_budget": "8GiB"}):
        wanted, model = (recurrent(tf_keras, last=Clipped(), dropout=0.0) for _ in range(2))
        for found, expected in zip(runs(tfmem.optimize(model, **options)), runs(wanted), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("budget", [None, "4MiB"])
@LIBRARIES
def test_functions_that_run_eagerly_run_eagerly(library: Any, budget: str | None) -> None:
    """`tf.config.run_functions_eagerly`, set after a model is optimised: its Python code runs at every step."""

    class Seen(library.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            seen.append(tf.is_symbolic_tensor(data[0]))
            return super().train_step(data)

    seen: list[bool] = []
    inputs = library.Input((7, 5))
    model = Seen(inputs, library.layers.Dense(1)(library.layers.LSTM(4)(inputs)))
    model.compile("sgd", "mse", jit_compile=False)
    tfmem.optimize(model, memory_budget=budget)
    tf.config.run_functions_eagerly(True)
    try:
        model.fit(X, Y, **FIT)
    finally:
        tf.config.run_functions_eagerly(False)
    assert seen == [False] * 6

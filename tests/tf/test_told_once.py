"""What a user should know of is a warning, once for each function or model and cause; what is well warns of nothing."""

import warnings
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.decision import Xla
from tests.tf import optimized_runs
from tests.tf.optimized_runs import SPARE, run
from tfmem.api import make_engine, optimize_with
from tfmem.runtime.measured_call import Meter
from tfmem.runtime.notices import Notices
from tfmem.steps import checking, measuring


def recorded(call):
    """What `call` gives, and tfmem's warnings meanwhile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    mine = [each for each in caught if each.category is tfmem.TfmemWarning]
    assert all(each.filename in (__file__, optimized_runs.__file__) for each in mine)
    return result, [str(each.message) for each in mine]


def optimized(net, budget, jit_compile=None, **changes):
    return tfmem.optimize(tf.function(net.step, jit_compile=jit_compile), memory_budget=budget, **changes)


@pytest.fixture(name="budget")
def fixture_budget(new_net, batch, flow, smallest):
    return SPARE + smallest(lambda size: optimized(new_net(), size)(*batch))


def test_a_budget_that_is_met_warns_of_nothing(new_net, batch, budget):
    function, messages = recorded(lambda: optimized(new_net(), budget))
    _, more = recorded(lambda: run(function, batch, steps=9))
    assert messages + more == []
    assert tfmem.report(function).peak_measured <= budget


def test_a_step_that_fits_warns_of_nothing(new_net, batch, flow):
    function = optimized(new_net(), "1GiB", jit_compile=True)
    assert recorded(lambda: run(function, batch, steps=5))[1] == []


def test_a_missed_budget(new_net, batch, budget, monkeypatch):
    """The step is seen to take more than any plan for it should, with probes and without; three batch sizes, and one
    warning."""
    watched = measuring.observe

    def more(*given):
        seen = watched(*given)
        return type(seen)(**{**seen.__dict__, "peak": seen.peak + (64 << 20)})

    class Larger(Meter):
        def watched(self, function, waits):
            result, peak = super().watched(function, waits)
            return result, peak + (64 << 20)

    monkeypatch.setattr(measuring, "observe", more)
    engine = make_engine(tfmem.Options(memory_budget=budget), called=True)
    engine = replace(engine, meter=Larger(engine.library, engine.settings.target))
    function = optimize_with(engine, tf.function(new_net().step))

    def train():
        for rows in (16, 15, 14):
            for _ in range(12):
                function(batch[0][:rows], batch[1][:rows])

    _, messages = recorded(train)
    assert len(messages) == 1
    assert "OVER BUDGET by" in messages[0]
    assert "tfmem.report" in messages[0]


def test_a_missed_budget_of_a_step_that_was_left_as_it_was(new_net, batch, flow, monkeypatch):
    class Larger(Meter):
        """Every call takes 2 GiB."""

        def watched(self, function, waits):
            return function(), 2 << 30

    monkeypatch.setattr(checking, "REPLANS", 0)
    engine = make_engine(tfmem.Options(memory_budget="1GiB", cache_directory=""), called=True)
    engine = replace(engine, meter=Larger(engine.library, engine.settings.target))
    function = optimize_with(engine, tf.function(new_net().step))
    _, messages = recorded(lambda: run(function, batch, steps=6))
    assert len(messages) == 1
    over = (1 << 30) + tfmem.report(function).peak_uncounted
    assert f"OVER BUDGET by {over:,} bytes" in messages[0]


def test_a_step_that_loses_xla(new_net, batch, budget):
    function = optimized(new_net(), budget, jit_compile=True)
    _, messages = recorded(lambda: run(function, batch, steps=9))
    assert len(messages) == 1
    assert "XLA is off: XLA cannot compile memory ops" in messages[0]


def lstm(**changes):
    layer = keras.layers.LSTM(8)
    layer(tf.zeros([2, 5, 3]))
    return tfmem.optimize(tf.function(layer.__call__, **changes))


def test_a_recurrent_layer_that_loses_xla(flow):
    _, messages = recorded(lambda: lstm(jit_compile=True)(tf.zeros([2, 5, 3])))
    assert len(messages) == 1
    assert "XLA is off: XLA cannot compile recurrent kernels" in messages[0]


@tf.function
def counted(x):
    return tf.while_loop(lambda i, y: i < 5, lambda i, y: (i + 1, tf.sort(y) * 2), [0, x])[1]


@pytest.mark.parametrize("asked", [True, False])
def test_a_recurrence_that_stays_although_asked_for(asked, flow):
    function = tfmem.optimize(counted, **({"passes": ("recurrent", "offload")} if asked else {}))
    _, messages = recorded(lambda: [function(tf.zeros([rows])) for rows in (3, 4)])
    assert tfmem.report(function).not_replaced
    assert len(messages) == asked
    if asked:
        assert "is not replaced:" in messages[0]


def test_a_budget_without_the_pass_that_keeps_it(new_net, batch, flow):
    function, messages = recorded(lambda: optimized(new_net(), "1GiB", passes=("recurrent",)))
    _, more = recorded(lambda: run(function, batch, steps=2))
    assert len(messages + more) == 1
    assert "memory_budget='1GiB' has no effect without 'offload' in passes=('recurrent',)" in messages[0]


def test_nothing_can_be_observed(new_net, batch, budget):
    engine = make_engine(tfmem.Options(memory_budget=budget, cache_directory=""), called=True)
    function = optimize_with(engine.under(replace(engine.settings, counts=False)), tf.function(new_net().step))
    _, messages = recorded(lambda: run(function, batch, steps=3))
    assert len(messages) == 1
    assert "tfmem cannot measure memory" in messages[0]


@pytest.mark.parametrize("kind", ["function", "graph"])
def test_memory_that_is_not_planned(kind, new_net, batch, flow):
    """As on a GPU, whose memory is the budget where none is given."""
    engine = make_engine(tfmem.Options(), called=kind == "function")
    engine = engine.under(replace(engine.settings, budget=1 << 20))
    net = new_net()
    shapes = [tf.TensorSpec([None, 32, 32, 2]), tf.TensorSpec([None], tf.int64)]
    step = tf.function(net.step, input_signature=shapes)
    if kind == "function":
        function = optimize_with(engine, step)
        _, messages = recorded(lambda: run(function, batch, steps=2))
    else:
        graph_def = step.get_concrete_function().graph.as_graph_def()
        _, messages = recorded(lambda: optimize_with(engine, graph_def))
    assert len(messages) == 1
    assert "its memory was not planned" in messages[0]


def test_a_keras_model_under_a_budget_warns_of_nothing(flow):
    model = keras.Sequential([keras.layers.Input([8, 8, 2]), keras.layers.Conv2D(4, 3), keras.layers.Flatten()])
    model.add(keras.layers.Dense(3))
    model.compile("sgd", "mse")
    x, y = np.ones([20, 8, 8, 2], "float32"), np.zeros([20, 3], "float32")

    def train():
        tfmem.optimize(model, memory_budget="1GiB")
        model.fit(x, y, batch_size=8, epochs=3, verbose=0)
        model.evaluate(x, y, verbose=0)
        model.predict(x, verbose=0)

    assert recorded(train)[1] == []


def test_a_warning_ends_with_its_cure():
    """`Notices.warn` takes no warning without one; what comes twice is told once."""
    notices = Notices()

    def warns():
        notices.warn("copy", "nothing was changed", "use the original")
        notices.warn("copy", "nothing was changed again", "use the original")

    _, messages = recorded(warns)
    assert messages == ["tfmem: nothing was changed; use the original"]
    assert all(why.cure for why in (Xla.RECURRENT, Xla.MOVED, Xla.ORDERED))
    assert not any(why.cure for why in (Xla.NO_PART, Xla.LEFT_ON, Xla.STITCHED, Xla.EXECUTOR, Xla.RUNS))

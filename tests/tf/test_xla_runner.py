"""XLA as a runner: it runs a step that it computes alike and faster, and where the user allows it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.decision import Decision, Fusion, Xla
from tests.tf.stitched_steps import Softmax, batch, close, optimized, run
from tests.tf.xla_contest import FAST, FULL, LOSES, WINS, fixture_compared, step_in  # noqa: F401 - a fixture
from tfmem.capture.xla_function import XlaFunction
from tfmem.steps.phases import Phase
from tfmem.steps.results import StepResults, unexplained
from tfmem.timing.ab_timing import Times


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", [WINS, LOSES], ids=["stitched", "executor"])
@pytest.mark.parametrize("second", [WINS, LOSES], ids=["XLA wins", "XLA loses"])
def test_the_fastest_of_three_runs(first: Times, second: Times, compared: Any) -> None:
    times = compared(first, second)
    plain, step = Softmax(), optimized(Softmax().step, fusion=FULL)
    close(run(step), run(plain.step))
    report = tfmem.report(step)
    assert not times.left
    assert isinstance(step_in(step).running, XlaFunction) == (second is WINS)
    beside = "stitched" if first is WINS else "without XLA"
    if second is WINS:
        assert report.fusion == f"left to XLA: 1 ms a step against 2 ms {beside}, on copies"
        assert (report.decision, report.fusion_state, report.jit_compile) == (Decision.XLA, Fusion.LEFT, Xla.RUNS)
        assert "XLA runs the step: its sums have another order" in report.notes[-1]
    else:
        assert report.notes[-1] == "XLA took 2 ms a step against 1 ms"
        assert (report.fusion_state is Fusion.STITCHED) == (first is WINS)
        assert report.jit_compile is Xla.NO_PART


def test_it_compiles_in_a_thread_while_steps_go_on(compared: Any) -> None:
    compared(WINS, WINS)
    plain, step = Softmax(), optimized(Softmax().step, fusion=FAST)
    expected = run(plain.step, 6)
    found = run(step, 1)
    step_in(step).wait()
    found += [step(*batch(1))]
    assert step_in(step).phase is Phase.COMPILING
    assert step_in(step).decided
    assert tfmem.report(step).fusion_state is Fusion.STITCHED
    step_in(step).wait()
    found += [step(*batch(seed)) for seed in range(2, 6)]
    close(found, expected)
    assert step_in(step).settled
    assert tfmem.report(step).decision is Decision.XLA


def test_never_where_the_user_forbids_it(compared: Any) -> None:
    for model, options in ((tf.function(Softmax().run, jit_compile=False), FULL), (Softmax().step, None)):
        compared(WINS)
        step = optimized(model, fusion=options or tfmem.FusionOptions(tune="full", xla=False))
        run(step, 2)
        report = tfmem.report(step)
        assert report.fusion_state is Fusion.STITCHED
        assert report.notes == ()


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        (lambda x: x + tf.random.normal([], seed=3), "would draw other numbers"),
        (lambda x: x - tf.reduce_max(x), "(Max) would lose NaN"),
        (lambda x: tf.minimum(x, tf.square(x)), "(Minimum) would lose NaN"),
        (lambda x: x + tf.cast(tf.strings.length(tf.strings.as_string(x)), tf.float32), "XLA does not run the step"),
    ],
    ids=["random", "largest", "smaller", "no kernel"],
)
def test_not_where_it_computes_something_else(extra: Any, why: str, compared: Any) -> None:
    compared(LOSES, with_largest=False)

    @tf.function
    def step(x: Any) -> Any:
        return tf.reduce_sum(tf.tanh(extra(x)) * 2.0 + 1.0)

    step = optimized(step, fusion=FULL)
    run(step, 2, batch()[0])
    report = tfmem.report(step)
    assert why in report.notes[-1]
    assert report.fusion_state is Fusion.LEFT


def test_rows_of_a_table_are_updated_by_what_xla_compiles(compared: Any) -> None:
    """An op that writes a variable's rows writes those of its copy while the step is timed."""
    compared(LOSES, WINS)

    def made() -> tuple[Any, tf.Variable]:
        table = tf.Variable(np.linspace(0.0, 1.0, 40, dtype=np.float32).reshape(10, 4))

        @tf.function
        def step(ids: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.tanh(tf.gather(table, ids)) ** 2)
            rows = tape.gradient(loss, table)
            table.scatter_sub(tf.IndexedSlices(0.5 * rows.values, rows.indices))
            return loss

        return step, table

    (plain, expected), (given, table) = made(), made()
    step, ids = optimized(given, fusion=FULL), tf.constant([3, 1, 3, 9])
    close(run(step, 4, ids), run(plain, 4, ids))
    close(table, expected)
    assert tfmem.report(step).decision is Decision.XLA


def test_the_gradient_of_conditions_is_compiled(compared: Any) -> None:
    """XLA has no kernel for what their branches keep. A concat's gradient divides by a rank, which Grappler folds."""
    compared(LOSES, WINS)

    def made() -> tuple[Any, tf.Variable]:
        weight = tf.Variable(np.linspace(-1.0, 1.0, 48, dtype=np.float32).reshape(12, 4))

        @tf.function
        def step(x: Any, last: Any) -> Any:
            with tf.GradientTape() as tape:
                state = tf.zeros([x.shape[0], 4])
                for number in range(3):
                    joined = tf.concat([x, state], 1)[:, :12]
                    state = tf.cond(
                        number < last,
                        lambda joined=joined: tf.tanh(joined @ weight),
                        lambda joined=joined, state=state: tf.concat([joined, state], 1)[:, -4:] * 0.5,
                    )
                loss = tf.reduce_mean(state**2)
            weight.assign_sub(0.5 * tape.gradient(loss, weight))
            return loss

        return step, weight

    (plain, expected), (given, weight) = made(), made()
    step, x = optimized(given, fusion=FULL), batch()[0]
    for last in (2, 0, 3, 1):
        close(run(step, 2, x, tf.constant(last)), run(plain, 2, x, tf.constant(last)))
    close(weight, expected)
    assert tfmem.report(step).decision is Decision.XLA, tfmem.report(step).notes


def test_results_that_differ_too_much_are_refused(compared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compared(LOSES)
    monkeypatch.setattr("tfmem.steps.results.MOST", -1.0)
    step = optimized(Softmax().step, fusion=FULL)
    run(step, 2)
    assert "its results differ by" in tfmem.report(step).notes[-1]


def test_results_that_rounding_decides_are_no_difference(compared: Any) -> None:
    """The bias has a gradient of zero but for rounding, of whose sign Adam makes a step of the learning rate."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.build((None, 12))
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - 1.0) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables))
        return loss

    compared(LOSES, WINS)
    step = optimized(step, fusion=FULL)
    run(step, 4, batch()[0])
    report = tfmem.report(step)
    assert report.decision is Decision.XLA, report
    assert "where rounding decides" in report.notes[-1]


def test_what_rounding_explains() -> None:
    assert unexplained([0.04, 0.0], pytest.fail) is None
    assert unexplained([0.04, 1.0], lambda: [0.0, 0.3]) is None
    assert unexplained([0.06, 1.0], lambda: [0.0, 0.3]) == 0.06
    assert unexplained([0.04, 1.0], lambda: [0.0, 0.2]) == 1.0
    assert unexplained([float("inf")], lambda: [float("inf")]) == float("inf")


@pytest.mark.parametrize("wrong", [1.2, float("nan")])
def test_a_wrong_result_is_found_beside_those(wrong: float, compared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compared(LOSES)
    of = StepResults.of.__func__  # type: ignore[attr-defined]
    calls = []

    def first_is_wrong(cls: Any, copies: Any, runner: Any) -> StepResults:
        found = of(cls, copies, runner)
        calls.append(runner)
        return StepResults(tuple(each * wrong for each in found.numbers)) if len(calls) == 1 else found

    monkeypatch.setattr(StepResults, "of", classmethod(first_is_wrong))
    step = optimized(Softmax().step, fusion=FULL)
    run(step, 2)
    assert len(calls) == 4  # two runners, and one of them on two sets of numbers
    assert "its results differ by" in tfmem.report(step).notes[-1]


def test_dropout_draws_what_it_drew(compared: Any) -> None:
    """Also at another batch size, which runs as before; nothing compiles in a call."""

    def made() -> tuple[Any, Any]:
        state = tf.Variable([7, 0], dtype=tf.int64)

        @tf.function(input_signature=[tf.TensorSpec([None, 12])])
        def step(x: Any) -> Any:
            state.assign_add([0, 1])
            return tf.nn.experimental.stateless_dropout(x, 0.5, seed=state) * 2.0 + 1.0

        return step, state

    compared(LOSES, WINS)
    plain, _ = made()
    step, state = made()
    step = optimized(step, fusion=FULL)
    for seed, rows in enumerate([32, 32, 8, 32]):
        x, _ = batch(seed, rows)
        np.testing.assert_array_equal(step(x), plain(x))
    assert tfmem.report(step).decision is Decision.XLA
    assert state.numpy()[1] == 4
    graph = tf.function(step).get_concrete_function(batch()[0]).graph
    assert not any(b"_XlaMustCompile" in each.SerializeToString() for each in graph.as_graph_def().library.function)


@pytest.mark.parametrize("second", [WINS, LOSES], ids=["XLA wins", "XLA loses"])
def test_what_was_timed_is_known(second: Times, compared: Any, tmp_path: Path) -> None:
    @tf.function
    def function(x: Any) -> Any:
        return tf.reduce_sum(tf.tanh(x) * 2.0 + 1.0)

    times = compared(WINS, second)
    for _ in range(2):
        step = optimized(function, fusion=FULL, cache_directory=str(tmp_path))
        run(step, 2, batch()[0])
        assert not times.left
        assert (tfmem.report(step).decision is Decision.XLA) == (second is WINS)
    assert "known from the cache" in tfmem.report(step).fusion


@pytest.mark.parametrize("second", [WINS, LOSES], ids=["XLA wins", "XLA loses"])
def test_a_choice_without_xla_does_not_end_the_contest(second: Times, compared: Any, tmp_path: Path) -> None:
    """The first process ends before XLA has compiled. The second knows its choice, and times XLA as the first would
    have; the third knows both."""

    @tf.function
    def function(x: Any) -> Any:
        return tf.reduce_sum(tf.tanh(x) * 2.0 + 1.0)

    def begun() -> Any:
        step = optimized(function, fusion=FAST, cache_directory=str(tmp_path))
        for _ in range(2):
            step(batch()[0])
            known = step_in(step)
            while known.phase in (Phase.FUSING, Phase.COMPARING):
                known.wait()
                step(batch()[0])
        return step

    compared(WINS)
    step = begun()
    assert step_in(step).phase is Phase.COMPILING
    for last in (False, True):
        times = compared(*([] if last else [second]))
        step = begun()
        if not last or second is WINS:
            assert step_in(step).phase is Phase.COMPILING
            report = tfmem.report(step)
            assert report.fusion.endswith("; known from the cache")
            assert report.notes[-1] == "XLA compiles the step, and will be timed against what runs"
            step_in(step).wait()
            step(batch()[0])
        assert step_in(step).settled
        assert not times.left
        report = tfmem.report(step)
        assert (report.decision is Decision.XLA) == (second is WINS)
        assert not any("will be timed" in note for note in report.notes)


def with_xla(jit_compile: Any = True, dropout: bool = False) -> Any:
    """A Keras model that Keras compiles with XLA."""
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(16, activation="gelu"), keras.layers.LayerNormalization(), keras.layers.Dense(3)]
    layers += [keras.layers.Dropout(0.3)] if dropout else []
    model = keras.Sequential([keras.Input([12]), *layers])
    model.compile("adam", "mse", jit_compile=jit_compile)
    return model


def trained(model: Any, steps: int = 5) -> list[float]:
    x, y = (np.random.default_rng(0).normal(size=(32, size)).astype(np.float32) for size in (12, 3))
    return [float(model.train_on_batch(x, y)) for _ in range(steps)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("first", [WINS, LOSES], ids=["stitched", "executor"])
@pytest.mark.parametrize("second", [WINS, LOSES], ids=["XLA wins", "XLA loses"])
def test_a_keras_model_has_three_runners(first: Times, second: Times, compared: Any) -> None:
    times = compared(first, second)
    expected = trained(with_xla())
    model = tfmem.optimize(with_xla(), passes=("recurrent", "fusion"), fusion=FULL, cache_directory="")
    close(trained(model), expected)
    report = tfmem.report(model)
    assert not times.left
    assert (report.decision is Decision.XLA) == (second is WINS)
    if second is LOSES:
        assert report.jit_compile is (Xla.STITCHED if first is WINS else Xla.EXECUTOR)
        assert not isinstance(step_in(model.train_function._step).running, XlaFunction)


def test_predict_and_evaluate_have_three_runners(compared: Any) -> None:
    x, y = (np.random.default_rng(0).normal(size=(32, size)).astype(np.float32) for size in (12, 3))
    model = with_xla()
    expected = model.predict(x, verbose=0), model.test_on_batch(x, y)
    compared(WINS, WINS)
    model = tfmem.optimize(model, passes=("recurrent", "fusion"), fusion=FULL, cache_directory="")
    close(model.predict(x, verbose=0), expected[0])
    assert tfmem.report(model).decision is Decision.XLA
    compared(WINS, LOSES)
    close(model.test_on_batch(x, y), expected[1])
    assert tfmem.report(model).decision is Decision.STITCHED


@pytest.mark.long
def test_a_keras_model_says_that_dropout_draws_other_numbers(compared: Any) -> None:
    compared(WINS, WINS)
    expected = trained(with_xla(jit_compile=False, dropout=True))
    model = tfmem.optimize(with_xla(dropout=True), passes=("fusion",), fusion=FULL, cache_directory="")
    with pytest.warns(tfmem.TfmemWarning, match="those of dropout, are TensorFlow's and not XLA's"):
        close(trained(model), expected)
    compared(WINS)
    quiet = tfmem.optimize(with_xla(False, dropout=True), passes=("fusion",), fusion=FULL, cache_directory="")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(trained(quiet), expected)
    assert tfmem.report(quiet).decision is Decision.STITCHED


def test_under_op_determinism_it_does_not_run(compared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("comparing", "xla_runner"):
        monkeypatch.setattr(f"tfmem.steps.{module}.is_deterministic", lambda: True)
    compared()
    step = optimized(Softmax().step, fusion=FULL)
    run(step, 2)
    assert "op determinism is on" in tfmem.report(step).fusion

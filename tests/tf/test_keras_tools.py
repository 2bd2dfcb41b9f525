"""For Keras users: the callback, TensorBoard, the largest batch; plans given to models; names in what is printed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes import splitting
from graph_passes.decision import Decision
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.report import RECOMPUTED, Report, TransferRecord
from graph_passes.splitting import CLEARLY
from tests.tf.memory_in_use import in_use
from tests.tf.test_loop_memory import Net
from tfmem.options import Options
from tfmem.steps import dividing
from tfmem.steps.given_plan import DIVIDED

MIB = 1 << 20
DIVIDING = Options(cache_directory="", progress=False)
UNCACHED = replace(DIVIDING, offload=OffloadOptions(split="never"))
X = np.random.default_rng(0).random((128, 64, 64, 3), np.float32)
Y = np.zeros(128, np.int32)


def net(width: int = 8) -> keras.Model:
    keras.utils.set_random_seed(0)
    blocks = [
        layer
        for number in range(3)
        for layer in (
            keras.layers.Conv2D(width, 3, padding="same", activation="relu", name=f"conv{number}a"),
            keras.layers.Conv2D(width, 3, padding="same", activation="relu", name=f"conv{number}b"),
            keras.layers.MaxPooling2D(),
        )
    ]
    layers = [keras.Input((64, 64, 3)), *blocks, keras.layers.Flatten(), keras.layers.Dense(10)]
    model = keras.Sequential(layers, name="tiny")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def fit(model: keras.Model, epochs: int = 1, **more: object) -> list[float]:
    return model.fit(X, Y, batch_size=64, shuffle=False, verbose=0, epochs=epochs, **more).history["loss"]


def tight() -> tfmem.Plan:
    """A plan in which something moves: what else the process holds counts, so the budget is found first."""
    free = tfmem.plan(net(), 64, curve=False, options=UNCACHED)
    budget = (free.smallest_budget + free.peak_before) // 2
    return tfmem.plan(net(), 64, budget=budget, curve=False, options=UNCACHED)


def test_a_plan_is_carried_out_and_refused_for_another_graph() -> None:
    expected = fit(net())
    plan = tight()
    assert plan.feasible
    assert plan.moves
    model = tfmem.optimize(net(), plan=tfmem.Plan.from_json(plan.to_json()), options=UNCACHED)
    assert fit(model) == expected
    report = tfmem.report(model)
    assert report.headline.startswith("`tiny.fit`: ")
    assert len(report.transfers) == len(plan.moves)
    assert "by the given plan" in " ".join(report.notes)
    moved = report.transfers[0].tensor
    assert tfmem.explain(model, moved.replace("_1", "")) == tfmem.explain(model, moved)
    with pytest.raises(tfmem.StalePlanError, match=r"the plan of `tiny\.fit` does not fit this graph: .*changed"):
        fit(tfmem.optimize(net(4), plan=plan, options=UNCACHED))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("splits", [False, True])
def test_a_plan_is_refused_where_the_optimizer_keeps_other_variables_and_evaluation_is_not(splits: bool) -> None:
    free = tfmem.plan(net(), 64, curve=False, options=UNCACHED)
    plan = tfmem.plan(net(), 64, budget=int(0.85 * free.smallest_budget), options=DIVIDING) if splits else tight()
    assert plan.split is splits
    model = net()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(tfmem.StalePlanError, match=r"ops are new .*; make the plan again"):
        fit(tfmem.optimize(model, plan=plan, options=DIVIDING))
    same = tfmem.optimize(net(), plan=plan, options=DIVIDING)
    fit(same)
    same.evaluate(X, Y, batch_size=64, verbose=0)


def test_a_plan_is_for_its_batch_and_others_are_planned_by_themselves() -> None:
    plan = tight()
    model = tfmem.optimize(net(), plan=plan, options=Options(cache_directory="", observe=False))
    model.train_on_batch(X[:32], Y[:32])
    assert any("was planned by itself" in note for note in tfmem.report(model).notes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": None}, "was made without a budget"),
        ({"budget": "1MiB"}, "does not fit its budget"),
    ],
)
def test_plans_that_plan_nothing_are_refused(changes: dict[str, object], message: str) -> None:
    plan = tfmem.plan(net(), 64, **changes, curve=False, options=UNCACHED)  # type: ignore[arg-type]
    with pytest.raises(tfmem.OptionsError, match=message):
        tfmem.optimize(net(), plan=plan)


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(tfmem.OptionsError, match=r"plan=.*cannot be read: this is no plan"):
        tfmem.optimize(net(), plan=tmp_path / "plan.json")
    with pytest.raises(tfmem.OptionsError, match=r"plan=3: expected what tfmem\.plan returned"):
        tfmem.optimize(net(), plan=3)
    plan = tight()
    with pytest.raises(tfmem.OptionsError, match="was passed with a plan, which has a budget"):
        tfmem.optimize(net(), plan=plan, memory_budget="30MiB")
    with pytest.raises(tfmem.OptionsError, match="plan= is not supported for a Graph"):
        tfmem.optimize(tf.Graph(), plan=plan)


def test_plans_of_functions_and_of_what_is_none() -> None:
    weights = tf.Variable(tf.ones([64, 64]))

    @tf.function(input_signature=[tf.TensorSpec([None, 64], name="x")])
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(tf.tanh(x @ weights) @ weights))
        weights.assign_sub(0.1 * tape.gradient(loss, weights))
        return loss

    small, large = (tfmem.plan(step, batch, device="h100") for batch in (256, 4096))
    assert small.subject == "step"
    assert large.peak_before > 12 * small.peak_before
    assert tfmem.plan(step, (tf.TensorSpec([256, 64]),), device="h100").peak_before == small.peak_before
    assert tfmem.plan(step, 256, device="h100", curve=False).device == "GPU:0, h100 (profile)"
    with pytest.raises(tfmem.GraphError, match="cannot plan a int"):
        tfmem.plan(3)
    with pytest.raises(tfmem.GraphError, match="`tiny` needs a batch"):
        tfmem.plan(net())
    with pytest.raises(tfmem.OptionsError, match=r"no such device; this process has CPU:0.* profiles of a100, h100"):
        tfmem.plan(step, 256, device="h1000")
    with pytest.raises(tfmem.GraphError, match=r"`step` may leave its batch open: give one \(`--batch`"):
        tfmem.plan(step)


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    most = tfmem.keras.largest_batch(net(), "20MiB", start=16, device="v100", options=UNCACHED)
    fits, over = (
        tfmem.plan(net(), size, budget="20MiB", device="v100", curve=False, options=UNCACHED)
        for size in (most, most + 1)
    )
    assert fits.feasible
    assert not over.feasible


@pytest.mark.long  # some twenty plans
def test_splits_along_the_batch_make_room_for_a_larger_one() -> None:
    first, second = tf.Variable(tf.ones([64, 512])), tf.Variable(tf.ones([512, 64]))

    @tf.function(input_signature=[tf.TensorSpec([None, 64])])
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(tf.tanh(x @ first) @ second))
        for variable, gradient in zip((first, second), tape.gradient(loss, (first, second)), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    found = tfmem.plan(step, 512, budget="4MiB", device="v100", curve=False, max_batch=True, options=DIVIDING)
    assert found.max_batch_whole is not None
    assert found.max_batch is not None
    assert found.max_batch > found.max_batch_whole > 0
    assert f"{found.max_batch} with parts split along the batch, {found.max_batch_whole} with nothing" in str(found)
    largest = tfmem.plan(step, found.max_batch, budget="4MiB", device="v100", curve=False, options=DIVIDING)
    assert largest.feasible
    assert largest.split


def test_the_callback_logs_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tight()
    model = tfmem.optimize(net(), plan=plan, options=UNCACHED)
    callback = tfmem.keras.MemoryReport(tmp_path / "logs", html=tmp_path / "report.html")
    history = model.fit(X, Y, batch_size=64, verbose=0, epochs=2, callbacks=[callback]).history
    assert len(history["tfmem_step_ms"]) == len(history["tfmem_peak_planned"]) == 2
    assert callback.report is not None
    assert 0 < history["tfmem_peak_measured"][-1] == callback.report.peak_measured
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tfmem: `tiny.fit`: ")]
    assert told
    assert len(told) == len(set(told))
    assert "<code>tiny.fit</code>" in (tmp_path / "report.html").read_text()
    (events,) = (tmp_path / "logs").iterdir()
    tags = {
        value.tag
        for record in tf.compat.v1.io.tf_record_iterator(str(events))
        for value in tf.compat.v1.Event.FromString(record).summary.value
    }
    assert {"tfmem/peak_planned", "tfmem/step_ms", "tfmem/memory"} <= tags


def test_every_layer_of_a_model_has_a_fate_by_the_users_name_without_a_budget() -> None:
    layers = [keras.layers.LSTM(4, name="reader"), keras.layers.Dense(1, name="out"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3, 2), name="words"), *layers], name="small")
    model.compile("sgd", "mse")
    model.predict(np.zeros((2, 3, 2)), verbose=0)  # so Keras numbers the names of the training step
    model = tfmem.optimize(model, options=replace(UNCACHED, passes=("recurrent", "offload")))
    model.fit(np.zeros((4, 3, 2)), np.zeros((4, 1)), verbose=0)
    assert tfmem.explain(model, "reader") == "recurrent layer 'reader' is replaced by one op."
    for name in ("out", layers[-1].name):
        assert tfmem.explain(model, name) == f"layer '{name}': nothing was changed."
    assert "replaced    small/reader/while (While and its gradient)" in str(tfmem.report(model))
    with pytest.raises(tfmem.GraphError, match=r"names no layer and no changed op 'readr'; there are: reader$"):
        tfmem.explain(model, "readr")


def test_the_callback_tells_a_verdict_again_only_if_another_plan_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    move = TransferRecord("a:0", MIB, "a", "b", "c", "d")
    found = Report("net.fit", "CPU", "optimal", Decision.MOVED, 20 * MIB, 8 * MIB, budget=9 * MIB, transfers=(move,))
    measured = [replace(found, peak_measured=count * MIB) for count in (7, 8, 10, 10)]
    again = replace(found, transfers=(replace(move, offload_after=RECOMPUTED),))
    callback, told = tfmem.keras.MemoryReport(), []
    for epoch, each in enumerate([*measured, again]):
        monkeypatch.setattr(tfmem.keras.MemoryReport, "report", each)
        callback.on_epoch_end(epoch, {})
        told.append(capsys.readouterr().err.strip())
    assert ["OVER BUDGET" in line for line in told] == [False, False, True, False, False]
    assert [bool(line) for line in told] == [True, False, True, False, True]


def test_the_callback_says_nothing_of_a_model_without_tfmem(capsys: pytest.CaptureFixture[str]) -> None:
    history = net().fit(X[:64], Y[:64], verbose=0, callbacks=[tfmem.keras.MemoryReport()]).history
    assert list(history) == ["loss"]
    assert capsys.readouterr().err == ""


def test_the_callback_works_with_tf_keras() -> None:
    tf_keras = pytest.importorskip("tf_keras")
    layers = [tf_keras.layers.Dense(8, input_shape=(4,), activation="relu"), tf_keras.layers.Dense(2)]
    model = tf_keras.Sequential(layers)
    model.compile("sgd", "mse")
    model = tfmem.optimize(model, memory_budget="1GiB", options=UNCACHED)
    callback = tfmem.keras.MemoryReport(verbose=0)
    model.fit(X[:16, 0, 0, :1].repeat(4, 1), X[:16, 0, 0, :2], verbose=0, callbacks=[callback])
    assert callback.report is not None
    assert callback.report.graph == f"{model.name}.fit"


def test_the_callback_reports_a_wrapped_optimizer() -> None:
    model = net()
    optimizer = tfmem.wrap_optimizer(keras.optimizers.SGD(), memory_budget="200MiB")
    model.compile(optimizer, model.loss)
    history = model.fit(X, Y, batch_size=64, verbose=0, callbacks=[tfmem.keras.MemoryReport(verbose=0)]).history
    assert history["tfmem_peak_planned"][0] > 0
    assert tfmem.report(optimizer).headline.endswith("MiB")


def test_a_plan_that_splits_the_batch_is_divided_again_within_its_budget() -> None:
    free = tfmem.plan(net(), 64, curve=False, options=UNCACHED)
    plan = tfmem.plan(net(), 64, budget=int(0.85 * free.smallest_budget), options=DIVIDING)
    assert plan.feasible
    assert plan.split
    assert "parts split along the batch" in plan.headline
    assert any(point.budget == plan.budget and point.seconds for point in plan.curve)
    model = tfmem.optimize(net(), plan=plan, options=DIVIDING)
    assert fit(model) == pytest.approx(fit(net()), rel=1e-4)
    report = tfmem.report(model)
    assert report.splits
    assert "1 part split along the batch" in report.headline
    with pytest.raises(tfmem.StalePlanError):
        fit(tfmem.optimize(net(4), plan=plan, options=UNCACHED))


def test_the_curve_goes_on_in_the_pieces_of_the_plan_to_the_smallest_budget_that_they_meet() -> None:
    free = tfmem.plan(net(), 64, budget="15GiB", device="v100", curve=False, options=UNCACHED)
    plan = tfmem.plan(net(), 64, budget=free.smallest_budget // 2, device="v100", options=DIVIDING)
    assert plan.split
    whole = [point for point in plan.curve if not point.split]
    pieces = [point for point in plan.curve if point.split]
    assert plan.curve == (*pieces, *whole)
    assert [point.budget for point in plan.curve] == sorted({point.budget for point in plan.curve})
    assert pieces[0].budget == plan.smallest_budget < free.smallest_budget <= whole[0].budget
    assert whole[-1].budget == free.peak_before
    assert [point.seconds for point in pieces if point.budget == plan.budget] == [plan.seconds]
    assert len(pieces) > 2
    apart = [after.budget - before.budget for before, after in pairwise(whole[:-1])]
    assert all(gap > (free.peak_before - plan.smallest_budget) / 20 for gap in apart)
    assert all(point.seconds is not None for point in plan.curve)
    assert f"{plan.smallest_budget / MIB:.1f} MiB  #" in str(plan)
    assert str(plan).count(", split") == len(pieces)


def test_the_curve_has_no_points_that_are_too_near_to_each_other() -> None:
    """The op that needs most of the memory sets the smallest budget, which is nearly all that the step needs."""
    layers = [keras.layers.Conv2D(32, 3, activation="relu"), keras.layers.MaxPooling2D(), keras.layers.Flatten()]
    model = keras.Sequential([keras.Input((64, 64, 3)), *layers, keras.layers.Dense(2)], name="one")
    model.compile("sgd", "mse")
    plan = tfmem.plan(model, 64, budget="30MiB", device="v100", options=DIVIDING)
    budgets = [point.budget for point in plan.curve if point.budget != 30 * MIB]
    assert plan.split
    assert len([point for point in plan.curve if not point.split]) == 2
    assert all(after - before > 2 * MIB for before, after in pairwise(budgets))
    assert "of the device's 16.0 GiB; no budget was given" in tfmem.plan(model, 64, device="v100", curve=False).headline


@pytest.mark.long
def test_a_plan_splits_where_the_step_would_be_found_to_be_faster_so() -> None:
    """By the cost model moves keep a fifth of the rate within the smallest budget that they meet, and a split more."""
    free = tfmem.plan(net(), 64, budget="15GiB", device="v100", curve=False, options=UNCACHED)
    asked = {"budget": free.smallest_budget, "device": "v100"}
    whole = tfmem.plan(net(), 64, **asked, curve=False, options=UNCACHED)
    plan = tfmem.plan(net(), 64, **asked, options=DIVIDING)
    assert whole.feasible
    assert plan.split
    assert plan.seconds <= CLEARLY * whole.seconds
    assert plan.peak <= free.smallest_budget
    assert any(note.startswith("with nothing split the step is predicted to take ") for note in plan.notes)
    assert tfmem.Plan.from_json(plan.to_json()) == plan
    for point in plan.curve:  # what meets the budget also meets more
        assert point.seconds is not None
        assert CLEARLY * point.seconds <= plan.seconds
    needed = replace(DIVIDING, offload=OffloadOptions(split="needed"))
    assert not tfmem.plan(net(), 64, **asked, curve=False, options=needed).split
    assert not tfmem.plan(net(), 64, **asked, curve=False, options=replace(DIVIDING, observe=False)).split
    loose = tfmem.plan(net(), 64, budget=int(0.9 * free.peak_before), device="v100", curve=False, options=DIVIDING)
    assert loose.moves
    assert not loose.split


def test_no_clock_decides_on_a_cpu_unless_it_is_asked_for_and_such_a_plan_is_carried_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (splitting, dividing):
        monkeypatch.setattr(module, "CLEARLY", float("inf"))
    faster = replace(DIVIDING, offload=OffloadOptions(split="faster"))
    budget = tfmem.plan(net(), 64, curve=False, options=UNCACHED).smallest_budget + MIB
    assert not tfmem.plan(net(), 64, budget=budget, curve=False, options=DIVIDING).split
    plan = tfmem.plan(net(), 64, budget=budget, curve=False, options=faster)
    assert plan.split
    assert any(note.startswith("with nothing split ") for note in plan.notes)
    model = tfmem.optimize(net(), plan=plan, options=faster)
    assert fit(model) == pytest.approx(fit(net()), rel=1e-4)
    report = tfmem.report(model)
    assert report.splits
    assert DIVIDED in report.notes


def test_a_plan_has_loops_in_pieces_and_is_carried_out() -> None:
    """Its budget is less than the loop's lists take with what else is there, so only pieces of them fit.

    The step is not observed: on a busy machine one result is freed late, and a tighter plan would follow.
    """
    x = tf.random.stateless_normal([2048, 64], [3, 4])
    alone = replace(UNCACHED, passes=("offload",), observe=False)  # without passes the loop is a recurrent layer
    plain, function = tf.function(Net().step), tf.function(Net().step)
    expected = [float(plain(x)) for _ in range(3)]
    plan = tfmem.plan(function, (x,), budget=10 * MIB + in_use(), curve=False, options=alone)
    assert plan.feasible
    assert plan.moves
    assert "loops run in pieces" in plan.notes
    ours = tfmem.optimize(function, plan=plan, options=alone)
    assert [float(ours(x)) for _ in range(3)] == expected
    report = tfmem.report(ours)
    assert len(report.transfers) == len(plan.moves)
    assert any("by the given plan" in str(note) for note in report.notes)


@pytest.mark.usefixtures("flow")
def test_an_observed_plan_of_loops_in_pieces_stays_within_its_budget() -> None:
    """Also on a busy machine, on which other plans may follow: what must hold is asserted, not the plan's moves."""
    x = tf.random.stateless_normal([2048, 64], [3, 4])
    alone = replace(UNCACHED, passes=("offload",))
    plain, function = tf.function(Net().step), tf.function(Net().step)
    plan = tfmem.plan(function, (x,), budget=10 * MIB + in_use(), curve=False, options=alone)
    assert "loops run in pieces" in plan.notes
    ours = tfmem.optimize(function, plan=plan, options=alone)
    for _ in range(8):
        assert ours(x).numpy() == plain(x).numpy()
    report = tfmem.report(ours)
    assert "OVER BUDGET" not in str(report)
    assert 0 < report.peak_measured <= report.budget == plan.budget
    for moves in (plan.moves, report.transfers):
        assert any("/piece_" in move.tensor for move in moves)

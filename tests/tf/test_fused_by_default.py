"""On a CPU steps are stitched by default, bodies of their loops included, where that was timed to be faster."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem
from benchmarks.fusion.loop_nets import Bahdanau, LoopNet, Luong, Sinkhorn
from graph_passes.decision import Decision, Fusion, Xla
from graph_passes.report import STITCHED
from tests.tf.stitched_steps import Softmax, batch, close, values
from tfmem.steps import comparing, on_copies
from tfmem.steps.phases import Phase
from tfmem.timing.ab_timing import Times

NETS: dict[str, Callable[[], LoopNet]] = {  # too large for the recurrent pass
    "bahdanau": lambda: Bahdanau(2, 30, 128, 4),
    "luong": lambda: Luong(2, 30, 128, 4),
    "sinkhorn": lambda: Sinkhorn(4, 40, 16, 4),
}
FASTER, SLOWER = Times(0.002, 0.001), Times(0.001, 0.002)
WON = "stitched: 1 ms a step against 2 ms, "
LOST = "left unchanged: stitched it took 2 ms a step against 1 ms, "
MOST = 60  # calls until it has to be decided

pytestmark = pytest.mark.filterwarnings("ignore:.*is not replaced:tfmem.TfmemWarning")


@pytest.fixture(params=[FASTER, SLOWER], ids=["faster", "slower"])
def found(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Times:
    """Times that are found, in place of measured ones: on copies, or by the step's own calls in turn."""

    class OnCopies:
        def go_on(self, given: Any, stitched: Any, limit: float) -> Times:
            given(), stitched()
            return request.param

    class InTurn:
        def __init__(self) -> None:
            self.calls = 0

        @property
        def stitched(self) -> bool:
            return self.calls % 2 == 1

        def add(self, seconds: float) -> Times | None:
            self.calls += 1
            return request.param if self.calls == 6 else None

    monkeypatch.setattr(on_copies, "Slices", OnCopies)
    monkeypatch.setattr(comparing, "Turns", InTurn)
    return request.param


def optimized(step: Any, **options: Any) -> Any:
    return tfmem.optimize(step, **{"cache_directory": "", **options})


def managed(step: Any) -> Any:
    (known,) = step._steps.values()
    return known[()]


def settled(step: Any, call: Callable[[], object]) -> list[Any]:
    """Results of calls until it is decided how the step runs, and of three more."""
    results = [call()]
    while not managed(step).settled:
        assert len(results) < MOST, tfmem.report(step)
        managed(step).wait()
        results.append(call())
    return [*results, *(call() for _ in range(3))]


def require_loops(report: tfmem.Report) -> None:
    assert any(re.search("while.*/body/", region.name) for region in report.regions)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("net", NETS)
def test_the_faster_one_runs_and_both_compute_the_same(net: str, mode: str, found: Times) -> None:
    plain, other = NETS[net](), NETS[net]()
    step = optimized(getattr(other, mode))

    def beside() -> None:
        """Both from the same weights: in many steps a loss that jumps makes much of a difference in rounding."""
        for variable, same in zip(other.variables, plain.variables, strict=True):
            variable.assign(same)
        close(step(*other.inputs), getattr(plain, mode)(*plain.inputs), 2e-6)
        close(values(other.variables), values(plain.variables), 2e-6)

    settled(step, beside)
    report = tfmem.report(step)
    require_loops(report)
    assert report.fusion.startswith(WON if found.is_faster else LOST)
    assert (report.decision == STITCHED) == bool(report.running) == found.is_faster
    backward = any("grad" in region.name and "/body/" in region.name for region in report.regions)
    assert backward == (mode == "train")
    if found.is_faster:
        op = next(op for op in inside(report) if "while/body/" in op and ("anh" in op or "Exp" in op))
        assert re.search("while/body/fusion_[0-9]", tfmem.explain(step, op))


def inside(report: tfmem.Report) -> list[str]:
    return [name for region in report.regions for part in region.steps for name, _ in part.ops]


def test_what_did_not_win_is_the_users_trace(found: Times) -> None:
    net = NETS["bahdanau"]()
    step = optimized(net.train)
    settled(step, lambda: step(*net.inputs))
    assert (managed(step).running is managed(step)._given) == (not found.is_faster)


def test_it_is_timed_on_a_clock() -> None:
    """Nothing is put in the place of anything: one of the two wins, and the report has the times."""
    net = NETS["sinkhorn"]()
    step = optimized(net.train)
    settled(step, lambda: step(*net.inputs))
    report = tfmem.report(step)
    assert "stitched" in report.fusion
    assert " ms a step against " in report.fusion
    assert report.fusion_state in (Fusion.STITCHED, Fusion.LEFT)


def compiled() -> tuple[Any, tuple[Any, ...]]:
    """A step of XLA's, which draws its random numbers."""

    @tf.function(jit_compile=True)
    def drawn(x: Any) -> Any:
        return tf.nn.softmax(tf.random.stateless_uniform([8, 16], [1, 2]) * tf.tanh(x))

    return drawn, (tf.ones([8, 16]),)


def convolved() -> tuple[Any, tuple[Any, ...]]:
    """A step whose convolution no region holds."""
    kernel = tf.ones([3, 3, 2, 4])
    return tf.function(lambda x: tf.nn.softmax(tf.tanh(tf.nn.conv2d(x, kernel, 1, "SAME")))), (tf.ones([2, 8, 8, 2]),)


def with_a_loop() -> tuple[Any, tuple[Any, ...]]:
    net = NETS["sinkhorn"]()
    return net.infer, net.inputs


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (compiled, {}),
        (convolved, {}),
        (with_a_loop, {"passes": ("recurrent", "offload")}),
        (with_a_loop, {"observe": False}),
        (with_a_loop, {"fusion": tfmem.FusionOptions(tune="off")}),
        (with_a_loop, {"memory_budget": "1GiB"}),
    ],
    ids=["XLA", "convolution", "passes", "unobserved", "untimed", "budget"],
)
def test_nothing_changes_elsewhere(make: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """No contest, no thread, and no word in the report: without a budget all is settled from the first call on."""
    monkeypatch.setattr(comparing, "Fuser", None)
    given, inputs = make()
    step = optimized(given, **options)
    step(*inputs)
    assert managed(step).settled or "memory_budget" in options
    settled(step, lambda: step(*inputs))
    report = tfmem.report(step)
    assert report.fusion == ""
    assert report.fusion_state is Fusion.NOT_ASKED
    assert not report.regions


def test_evaluation_is_not_tried_under_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing limits its memory, and its results are equal to the bit as those of training are."""
    monkeypatch.setattr(comparing, "Fuser", None)
    model = keras.Sequential([keras.Input([16]), keras.layers.Dense(8, "gelu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model = optimized(model, memory_budget="1GiB")
    for _ in range(3):
        model.evaluate(np.ones((8, 16), np.float32), np.ones((8, 1), np.float32), verbose=0)
    assert not tfmem.report(model).fusion


def test_under_op_determinism_nothing_is_stitched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "is_deterministic", lambda: True)
    given, inputs = with_a_loop()
    step = optimized(given)
    step(*inputs)
    assert managed(step).phase is Phase.SETTLED
    assert tfmem.report(step).fusion == ""


def test_loops_and_conditions_within_each_other(found: Times) -> None:
    """The function that a condition calls is stitched, too, and so is one that a loop within it calls."""

    def rows(x: Any) -> Any:
        return tf.reduce_sum(tf.nn.softmax(tf.tanh(x * 2.0 + 1.0) * 3.0), 0, keepdims=True)

    def loop(x: Any) -> Any:
        def body(count: Any, value: Any) -> Any:
            changed = tf.cond(tf.reduce_sum(value) > 0.5, lambda: rows(value) * value, lambda: value * 0.5)
            return count + 1, tf.tanh(changed - rows(changed)) * x

        return tf.while_loop(lambda count, _: count < 4, body, (0, x))[1]

    def step(x: Any) -> Any:
        beside = tf.cond(tf.reduce_sum(x) > 0.0, lambda: rows(x) * x - 1.0, lambda: tf.sigmoid(x * 3.0 + 2.0) * x - 1.0)
        return tf.cond(tf.reduce_max(x) > 0.1, lambda: loop(x + beside), lambda: x * 2.0), tf.tanh(x * 2.0 + 1.0) - 1.0

    plain, x = tf.function(step), batch()[0]
    other = optimized(tf.function(step))
    for result in settled(other, lambda: other(x)):
        close(result, plain(x))
    report = tfmem.report(other)
    require_loops(report)
    names = [region.name for region in report.regions]
    assert any("/while/cond/then/" in name for name in names), names


def without_a_loop() -> tuple[Any, tuple[Any, ...]]:
    return Softmax().step, batch()


def test_a_step_without_loops(found: Times) -> None:
    """XLA compiles no step of which the user did not ask it."""
    (given, inputs), (other, _) = without_a_loop(), without_a_loop()
    step = optimized(given)
    for result in settled(step, lambda: step(*inputs)):
        close(result, other(*inputs), 2e-6)
    report = tfmem.report(step)
    assert report.fusion_state is (Fusion.STITCHED if found.is_faster else Fusion.LEFT)
    assert report.jit_compile is not Xla.RUNS
    assert len(report.regions) == 1
    assert report.passes == ("recurrent", "fusion", "offload")


@pytest.mark.parametrize("dropped", [0.0, 0.5])
def test_a_keras_model_that_xla_compiles(dropped: float, found: Times) -> None:
    """The faster of XLA's and the stitched step stays. XLA's numbers of dropout would be others, so that step stays."""

    def model() -> Any:
        keras.utils.set_random_seed(5)
        inner = [keras.layers.Dense(32, "gelu"), keras.layers.Dropout(dropped), keras.layers.LayerNormalization()]
        made = keras.Sequential([keras.Input([16]), *inner, keras.layers.Dense(3)])
        made.compile("adam", "mse", jit_compile=True)
        return made

    random = np.random.default_rng(0)
    x, y = random.normal(size=(640, 16)).astype(np.float32), random.normal(size=(640, 3)).astype(np.float32)
    how: dict[str, Any] = {"batch_size": 8, "epochs": 4, "verbose": 0, "shuffle": False}
    plain, other = model(), optimized(model())
    expected = plain.fit(x, y, **how).history["loss"]
    np.testing.assert_allclose(other.fit(x, y, **how).history["loss"], expected, 1e-5)
    while not tfmem.report(other).decided:
        other.fit(x, y, **how)
    report = tfmem.report(other)
    assert report.fusion_state is (Fusion.NOT_ASKED if dropped else Fusion.STITCHED if found.is_faster else Fusion.LEFT)


def test_random_numbers_go_on(found: Times) -> None:
    """What a loop draws is what it draws in TensorFlow: before, while and after it is decided how it runs."""

    def losses(change: Callable[[Any], Any]) -> tuple[list[float], Any]:
        tf.random.set_seed(7)
        weights = tf.Variable(tf.random.stateless_normal([16, 16], [1, 2], stddev=0.2))

        @tf.function
        def train(x: Any) -> Any:
            def body(count: Any, state: Any) -> Any:
                mixed = tf.nn.softmax(tf.einsum("bu,cu->bc", state, state)) @ tf.nn.dropout(state, 0.4, seed=3)
                return count + 1, tf.tanh(mixed @ weights)

            with tf.GradientTape() as tape:
                state = tf.while_loop(lambda count, _: count < 5, body, (0, x), parallel_iterations=1)[1]
                loss = tf.reduce_mean((state - 0.3) ** 2)
            weights.assign_sub(0.1 * tape.gradient(loss, weights))
            return loss

        step, x = change(train), tf.random.stateless_normal([8, 16], [3, 4])
        calls = settled(step, lambda: step(x)) if change is optimized else [step(x) for _ in range(12)]
        return [float(loss) for loss in calls], step

    expected, _ = losses(lambda step: step)
    results, step = losses(optimized)
    np.testing.assert_allclose(results, expected[: len(results)], 1e-5)
    require_loops(tfmem.report(step))


def test_a_loop_with_effects_runs_once_a_call(found: Times) -> None:
    """It cannot run on copies, so the user's calls time it in turn: each has its effects, and one result."""
    seen: list[float] = []
    total = tf.Variable(0.0)

    @tf.function
    def step(x: Any) -> Any:
        def body(count: Any, value: Any) -> Any:
            value = tf.nn.softmax(tf.tanh(value * 2.0 + 1.0) * 3.0 - tf.reduce_sum(value, 0, keepdims=True))
            total.assign_add(1.0)
            told = tf.py_function(lambda number: seen.append(float(number)), [total], [])
            with tf.control_dependencies(told if isinstance(told, list) else [told]):
                return count + 1, tf.identity(value)

        return tf.while_loop(lambda count, _: count < 3, body, (0, x), parallel_iterations=1)[1]

    x = batch()[0]
    expected = step(x)
    seen.clear()
    total.assign(0.0)
    other = optimized(step)
    results = settled(other, lambda: other(x))
    for result in results:
        close(result, expected)
    assert seen == [float(number + 1) for number in range(3 * len(results))]
    report = tfmem.report(other)
    assert report.fusion.endswith(", in turn")
    assert (report.decision == STITCHED) == found.is_faster


def test_errors_in_a_loop_are_tensorflows(found: Times) -> None:
    @tf.function
    def step(x: Any, most: Any) -> Any:
        def body(count: Any, value: Any) -> Any:
            tf.debugging.assert_less(count, most, "too many turns")
            return count + 1, tf.nn.softmax(tf.tanh(value * 2.0 + 1.0) * 3.0 - tf.reduce_sum(value, 0, keepdims=True))

        return tf.while_loop(lambda count, _: count < 3, body, (0, x))[1]

    x = batch()[0]
    other = optimized(step)
    for result in settled(other, lambda: other(x, tf.constant(9))):
        close(result, step(x, tf.constant(9)))
    with pytest.raises(tf.errors.InvalidArgumentError, match="too many turns"):
        other(x, tf.constant(2))


def test_a_loop_without_anything_to_stitch_says_so() -> None:
    @tf.function
    def given(x: Any) -> Any:
        return tf.while_loop(lambda count, _: count < 3, lambda count, x: (count + 1, tf.linalg.inv(x)), (0, x))[1]

    step, x = optimized(given), tf.eye(3, batch_shape=[4]) * 2.0
    for result in settled(step, lambda: step(x)):
        close(result, given(x))
    report = tfmem.report(step)
    assert report.fusion == "nothing to stitch"
    assert report.decision is Decision.NO_BUDGET


@pytest.mark.sampled(2)
def test_a_keras_model_with_a_loop(found: Times) -> None:
    """Without XLA, which Keras asks for by itself."""

    class Matches(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight(shape=[shape[-1], 40], initializer="glorot_uniform", name="kernel")

        def call(self, x: Any) -> Any:
            scores = tf.einsum("bnf,fg->bng", x, self.kernel)

            def body(count: Any, value: Any) -> Any:
                value = value - tf.reduce_logsumexp(value, 2, keepdims=True)
                return count + 1, value - tf.reduce_logsumexp(value, 1, keepdims=True)

            return tf.exp(tf.while_loop(lambda count, _: count < 4, body, (0, scores))[1])

    def model() -> Any:
        keras.utils.set_random_seed(5)
        made = keras.Sequential([keras.Input([40, 16]), Matches(), keras.layers.Flatten(), keras.layers.Dense(3)])
        made.compile("sgd", "mse", jit_compile=False)
        return made

    random = np.random.default_rng(0)
    x, y = random.normal(size=(320, 40, 16)).astype(np.float32), random.normal(size=(320, 3)).astype(np.float32)
    how: dict[str, Any] = {"batch_size": 8, "epochs": 3, "verbose": 0, "shuffle": False}
    plain, other = model(), optimized(model())
    expected = plain.fit(x, y, **how).history["loss"]
    np.testing.assert_allclose(other.fit(x, y, **how).history["loss"], expected, 1e-5)
    close(other.predict(x, verbose=0), plain.predict(x, verbose=0), 1e-5)
    assert tfmem.report(other).fusion_state is not Fusion.NOT_ASKED

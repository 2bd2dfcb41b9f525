"""Every way of calling a `tf.function`, at every place that it can be called from: plain beside optimised."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.errors import InfeasibleBudgetError
from tests.tf.ways_of_calling import WAYS, Net, Way

CALLS = 5  # the last runs the final plan
SPARE = 1 << 21
# The graph that TensorFlow puts around a function in a replica forgets names and defaults beside a signature.
PLAIN_FAILS = {"a signature by keyword", "a signature of a default"}
# One of each kind: a budget makes no other difference to how arguments travel.
UNDER_A_BUDGET = {
    "a tensor", "a tensor by keyword", "an array", "a dictionary", "a namedtuple", "a number", "None", "a variable",
    "a ragged tensor", "an iterator", "defaults that are tensors", "many and a keyword", "everything",
    "a signature by keyword", "a partial with keywords", "a method of a class",
}  # fmt: skip

Call = Callable[[Any, Way], Any]


def eagerly(function: Any, way: Way) -> Any:
    for _ in range(CALLS):
        args, kwargs = way.call()
        result = function(*args, **kwargs)
    return result


def within_another(function: Any, way: Way) -> Any:
    args, kwargs = way.call()
    return tf.function(lambda: function(*args, **kwargs))()


def handed_on(function: Any, way: Way) -> Any:
    """Its arguments are those of the other function."""
    args, kwargs = way.call()
    return tf.function(function)(*args, **kwargs)


def under_a_tape(function: Any, way: Way) -> Any:
    args, kwargs = way.call()
    given = [item for item in tf.nest.flatten((args, kwargs)) if getattr(item, "dtype", None) == tf.float32]
    given = [item for item in given if isinstance(item, tf.Tensor | tf.Variable)]
    with tf.GradientTape() as tape:
        tape.watch(given)
        result = function(*args, **kwargs)
        parts = tf.nest.flatten(result, expand_composites=True)
        losses = [part for part in parts if getattr(part, "dtype", None) == tf.float32]
    return result, tape.gradient(losses, [*given, *tape.watched_variables()])


def run_eagerly(function: Any, way: Way) -> Any:
    args, kwargs = way.call()
    tf.config.run_functions_eagerly(True)
    try:
        return function(*args, **kwargs)
    finally:
        tf.config.run_functions_eagerly(False)


def on_one_device(function: Any, way: Way) -> Any:
    args, kwargs = way.call()
    return tf.distribute.OneDeviceStrategy("CPU:0").run(function, args=args, kwargs=kwargs)


def in_one_replica(function: Any, way: Way) -> Any:
    args, kwargs = way.call()
    return tf.distribute.MirroredStrategy(["CPU:0"]).run(function, args=args, kwargs=kwargs)


PLACES = [eagerly, within_another, handed_on, under_a_tape, run_eagerly, on_one_device, in_one_replica]


@pytest.fixture(autouse=True)
def what_tests_leave_behind() -> Iterator[None]:
    yield
    tf.keras.backend.clear_session()
    gc.collect()


def outcome(place: Call, function: Any, way: Way) -> tuple[str, Any]:
    try:
        return "", place(function, way)
    except (AssertionError, LookupError, TypeError, ValueError, tf.errors.OpError) as error:
        return type(error).__name__, None


def require_equal(found: Any, expected: Any) -> None:
    tf.nest.assert_same_structure(found, expected, expand_composites=True)
    assert [type(part) for part in tf.nest.flatten(found)] == [type(part) for part in tf.nest.flatten(expected)]
    for a, b in zip(*(tf.nest.flatten(each, expand_composites=True) for each in (found, expected)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def ways(some: set[str] | None = None) -> Any:
    return pytest.mark.parametrize("way", [way for way in WAYS if some is None or way.name in some], ids=str)


def as_given(function: Any) -> Any:
    return function


def compare(plain: Any, optimized: Any, way: Way, place: Call) -> None:
    if place is in_one_replica and way.name in PLAIN_FAILS:
        return
    expected, found = outcome(place, plain, way), outcome(place, optimized, way)
    assert found[0] == expected[0], place
    require_equal(found[1], expected[1])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("all_places", [False, pytest.param(True, marks=pytest.mark.long)], ids=["one", "all"])
@ways()
def test_without_a_budget(way: Way, all_places: bool) -> None:
    """In the short tier each way is called in one place, another for the next way. Fused, results would be rounded."""
    unfused = partial(tfmem.optimize, passes=("recurrent", "offload"))
    made = [way.traced(as_given), way.traced(unfused)]  # holds the nets, which methods do not
    plain, optimized = (function for function, _ in made)
    for place in PLACES if all_places else [PLACES[WAYS.index(way) % len(PLACES)]]:
        compare(plain, optimized, way, place)


@pytest.mark.sampled(10)
@ways(UNDER_A_BUDGET)
def test_with_a_budget(way: Way) -> None:
    def within(budget: int) -> tuple[Any, Net, list[Any]]:
        made: list[Any] = []

        def decorate(function: Any) -> Any:
            made.append(tfmem.optimize(function, memory_budget=budget, cache_directory=""))
            return made[-1]

        return *way.traced(decorate), made

    plain, net = way.traced(as_given)
    with pytest.raises(InfeasibleBudgetError) as caught:
        eagerly(within(1000)[0], way)
    budget = caught.value.smallest_budget + SPARE
    del caught  # its traceback holds the step that was refused
    gc.collect()
    optimized, other, made = within(budget)
    assert net is not other  # both live: a method does not hold its object
    for place in PLACES:
        compare(plain, optimized, way, place)
    moved = list(made[0]._methods.values()) or made
    assert tfmem.report(moved[0]).transfers, tfmem.report(moved[0])


@pytest.mark.sampled(6)
@ways()
def test_in_verify(way: Way) -> None:
    args, kwargs = way.call()
    if way.name == "an iterator":
        pytest.skip("goes on from call to call")
    made = [way.traced(as_given), way.traced(tfmem.optimize)]  # holds the nets, which methods do not
    plain, optimized = (function for function, _ in made)
    verification = tfmem.verify(lambda: plain(*args, **kwargs), lambda: optimized(*args, **kwargs), (), steps=2)
    assert verification.bit_equal
    if not kwargs:
        assert tfmem.verify(plain, optimized, args, steps=2) == verification


def test_methods_of_each_object_are_their_own() -> None:
    class Model(tf.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale

        @tfmem.optimize
        @tf.function
        def scaled(self, x: Any, twice: bool = False) -> Any:
            return self.scale * x * (2.0 if twice else 1.0)

    models = [Model(2.0), Model(3.0)]
    assert [float(model.scaled(tf.constant(5.0))) for model in models * 2] == [10, 15, 10, 15]
    assert float(models[1].scaled(5.0, twice=True)) == 30
    assert models[0].scaled is models[0].scaled
    assert isinstance(Model.scaled, type(models[0].scaled))
    kept = Model.scaled._methods  # type: ignore[attr-defined]
    assert len(kept) == 2
    assert tfmem.report(models[0].scaled)
    with pytest.raises(tfmem.GraphError, match="ask for the report of an object's method"):
        tfmem.report(Model.scaled)
    models.pop()
    gc.collect()
    assert len(kept) == 1  # nothing holds an object for the sake of its method


def test_what_a_default_holds_is_read_in_each_call() -> None:
    shift, scale = np.zeros(2, np.float32), tf.Variable(1.0)

    def run(x: Any, shift: Any = shift, scale: Any = scale) -> Any:
        return x * scale + shift

    optimized = tfmem.optimize(tf.function(run))
    x = tf.ones(2)
    assert list(optimized(x)) == [1, 1]
    scale.assign(3.0)
    shift += 1
    assert list(optimized(x)) == [4, 4]


@pytest.mark.parametrize("wrong", [((), {}), ((1, 2, 3), {}), ((tf.zeros(2),), {"other": 1})])
def test_wrong_calls_are_refused_as_tensorflow_refuses_them(wrong: Any) -> None:
    @tf.function
    def run(x: Any, training: bool = False) -> Any:
        return x

    args, kwargs = wrong
    messages = []
    for function in (run, tfmem.optimize(run)):
        with pytest.raises(TypeError) as caught:
            function(*args, **kwargs)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_a_net_makes_the_same_weights() -> None:
    np.testing.assert_array_equal(Net().weights, Net().weights)

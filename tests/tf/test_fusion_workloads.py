"""The workloads of the fusion benchmark: as large as the notes have them, and they train."""

from __future__ import annotations

import gc
import math
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem
from benchmarks.fusion import graphs
from benchmarks.fusion.cases import TEN
from benchmarks.fusion.moves import next_numbers
from benchmarks.fusion.published import KERNELS
from benchmarks.fusion.systems import System
from benchmarks.fusion.workloads import make, models


@pytest.fixture(autouse=True)
def without_remapper():
    tf.random.set_seed(0)
    tf.config.optimizer.set_experimental_options({"remapping": False})
    yield
    tf.config.optimizer.set_experimental_options({"remapping": True})
    gc.collect()  # tables of 40 MB, which would count as in use, too


@pytest.fixture(scope="module", name="apart")
def fixture_apart() -> Iterator[ProcessPoolExecutor]:
    """A separate process: oneDNN keeps 80 MB of rokid, and TensorFlow all variables of a Keras model that ran in a
    `tf.function`, which would count as in use in the tests that follow."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


def seen_of(name: str) -> dict[str, Any]:
    """What a workload's graph holds, and the results of two steps."""
    tf.random.set_seed(0)
    tf.config.optimizer.set_experimental_options({"remapping": False})
    with graphs.collected() as found:
        system = System.begun("graph", lambda: make(name))
    workload = system.workload
    return {
        "ops": graphs.kernels(found),
        "clusters": graphs.clusters(found),
        "scalars": [system.scalar(), system.scalar()],
        "draws": workload.draws,
        "training": workload.training,
    }


@pytest.mark.timeout(900)
@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", TEN)
def test_the_step_is_the_one_of_the_notes(name: str, apart: ProcessPoolExecutor) -> None:
    seen = apart.submit(seen_of, name).result(timeout=580)
    assert seen["ops"]["products"] == KERNELS[name].products
    assert seen["ops"]["memory"] == pytest.approx(KERNELS[name].memory, rel=0.15)
    assert seen["clusters"] == 0
    scalars = seen["scalars"]
    assert all(map(math.isfinite, scalars))
    if seen["draws"]:
        assert scalars[0] != scalars[1]  # the noise is another
    elif seen["training"]:
        assert scalars[1] < scalars[0]
    else:
        assert scalars[1] == scalars[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["vae", "word2vec", "multi_interests"])
def test_two_of_a_name_draw_the_same(name: str) -> None:
    one, other = (System.begun("graph", lambda: make(name)) for _ in range(2))
    assert one.scalar() == pytest.approx(other.scalar(), rel=1e-6)
    assert len(one.start) == len(other.start)


@pytest.mark.long
def test_both_forms_of_the_dynamic_rnn_are_one_network() -> None:
    masked, conditional = (System.begun("graph", lambda name=name: make(name)) for name in ("dynrnn", "dynrnn_if"))
    assert masked.scalar() == pytest.approx(conditional.scalar(), rel=1e-6)


def test_a_word_is_nearest_to_itself() -> None:
    system = System.begun("graph", lambda: make("word2vec_evaluation"))
    similarities, words = system.values()
    np.testing.assert_allclose(similarities[:, 0], 1, rtol=1e-5)
    np.testing.assert_array_equal(words[:, 0], system.workload.inputs[0])


def trained(step: Any, inputs: tuple[Any, ...], steps: int, report: Any = None) -> list[float]:
    """Losses of so many steps, and then of as many more as it takes until it is decided how the step runs."""
    losses = [float(step(*inputs)) for _ in range(steps)]
    deadline = time.monotonic() + 300
    while report and report(step).fusion.startswith("not decided yet") and time.monotonic() < deadline:
        losses.append(float(step(*inputs)))
    return losses


@pytest.mark.timeout(900)
@pytest.mark.long
def test_bert_trains_stitched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one, without dropout, so that losses can be compared: planned at once, and after it was timed."""
    for name, value in {"BLOCKS": 1, "SIZE": 96, "INNER": 128, "VOCABULARY": 500, "DROPPED": 0.0}.items():
        monkeypatch.setattr(models, name, value)
    plain, at_once, timed = (models.bert_base() for _ in range(3))
    expected = trained(plain.step, plain.inputs, 10)
    options: dict[str, Any] = {"passes": ("recurrent", "fusion", "offload"), "cache_directory": ""}
    step = tfmem.optimize(at_once.step, fusion=tfmem.FusionOptions(tune="off"), **options)
    np.testing.assert_allclose(trained(step, at_once.inputs, 10), expected, rtol=1e-4)
    ops = {op for region in tfmem.report(step).regions for each in region.steps for _, op in each.ops}
    assert {"Softmax", "Mean", "AssignSubVariableOp"} <= ops, sorted(ops)
    step = tfmem.optimize(timed.step, **options)
    losses = trained(step, timed.inputs, 10, tfmem.report)
    more = trained(plain.step, plain.inputs, len(losses) - 10)
    np.testing.assert_allclose(losses, expected + more, rtol=1e-4, atol=1e-5)
    assert tfmem.report(step).fusion.startswith(("stitched: ", "left unchanged: stitched it took")), "with both times"


def resnet_after_a_step() -> tuple[list[float], float, float]:
    """Losses of ResNet-50 as it is, with moved inputs and stitched; how far the last two stray from the first."""

    def small() -> tuple[Any, list[Any]]:
        keras.utils.set_random_seed(0)
        shape = (64, 64, 3)
        model = keras.applications.ResNet50(weights=None, classes=10, classifier_activation=None, input_shape=shape)
        random = np.random.default_rng(0)
        images, labels = random.random((4, *shape), np.float32), random.integers(0, 10, 4).astype(np.int32)
        made = models.training(model, keras.optimizers.SGD(0.01, momentum=0.9), (images,), labels)
        return made, model.trainable_variables

    def after_a_step(made: Any, variables: list[Any], how: Any = lambda step: step, moved: bool = False) -> list[Any]:
        before = [variable.numpy() for variable in variables]
        inputs = [tf.constant(next_numbers(each.numpy())) if moved else each for each in made.inputs]
        losses.append(float(how(made.step)(*inputs)))
        return [variable.numpy() - old for variable, old in zip(variables, before, strict=True)]

    def stitched(step: Any) -> Any:
        return tfmem.optimize(step, passes=("fusion",), fusion=tfmem.FusionOptions(tune="off"), cache_directory="")

    losses: list[float] = []
    plain, moved, found = after_a_step(*small()), after_a_step(*small(), moved=True), after_a_step(*small(), stitched)
    of_moved, of_found = (
        float(np.median([np.abs(a - b).max() / np.abs(b).max() for a, b in zip(other, plain, strict=True)]))
        for other in (moved, found)
    )
    return losses, of_moved, of_found


@pytest.mark.timeout(900)
@pytest.mark.long
def test_resnet_strays_no_further_stitched_than_with_moved_inputs(apart: ProcessPoolExecutor) -> None:
    (plain, moved, found), of_moved, of_found = apart.submit(resnet_after_a_step).result(timeout=580)
    assert found == pytest.approx(plain, rel=max(1e-5, abs(moved / plain - 1)))
    assert of_found <= 2 * of_moved


def outputs_of(name: str) -> list[np.ndarray]:
    return [np.asarray(each) for each in System.begun("graph", lambda: make(name))()]


@pytest.mark.timeout(900)
@pytest.mark.long
@pytest.mark.parametrize("name", ["nmt", "rokid"])
def test_weights_that_are_joined_in_a_step_give_the_same(apart: ProcessPoolExecutor, name: str) -> None:
    """`benchmarks.fusion.merging` compares their times."""
    given, joined = (apart.submit(outputs_of, each).result(timeout=580) for each in (name, f"merged/{name}_copied"))
    for one, other in zip(given, joined, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-4)

"""The workloads of the fusion benchmark: as large as the notes have them, and they train."""

from __future__ import annotations

import gc
import math
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.fusion import graphs
from benchmarks.fusion.cases import TEN
from benchmarks.fusion.published import KERNELS
from benchmarks.fusion.systems import System
from benchmarks.fusion.workloads import make


@pytest.fixture(autouse=True)
def without_remapper():
    tf.random.set_seed(0)
    tf.config.optimizer.set_experimental_options({"remapping": False})
    yield
    tf.config.optimizer.set_experimental_options({"remapping": True})
    gc.collect()  # tables of 40 MB, which would count as in use, too


@pytest.fixture(scope="module", name="apart")
def fixture_apart() -> Iterator[ProcessPoolExecutor]:
    """A process of its own: of rokid oneDNN keeps 80 MB, which would count as in use in the tests that follow."""
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


@pytest.mark.parametrize("name", TEN)
def test_the_step_is_the_one_of_the_notes(name: str, apart: ProcessPoolExecutor) -> None:
    seen = apart.submit(seen_of, name).result(timeout=300)
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


@pytest.mark.parametrize("name", ["vae", "word2vec", "multi_interests"])
def test_two_of_a_name_draw_the_same(name: str) -> None:
    one, other = (System.begun("graph", lambda: make(name)) for _ in range(2))
    assert one.scalar() == pytest.approx(other.scalar(), rel=1e-6)
    assert len(one.start) == len(other.start)


def test_both_forms_of_the_dynamic_rnn_are_one_network() -> None:
    masked, conditional = (System.begun("graph", lambda name=name: make(name)) for name in ("dynrnn", "dynrnn_if"))
    assert masked.scalar() == pytest.approx(conditional.scalar(), rel=1e-6)


def test_a_word_is_nearest_to_itself() -> None:
    system = System.begun("graph", lambda: make("word2vec_evaluation"))
    similarities, words = system.values()
    np.testing.assert_allclose(similarities[:, 0], 1, rtol=1e-5)
    np.testing.assert_array_equal(words[:, 0], system.workload.inputs[0])

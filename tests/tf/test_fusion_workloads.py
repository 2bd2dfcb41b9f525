"""The workloads of the fusion benchmark: as large as the notes have them, and they train."""

from __future__ import annotations

import math

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


@pytest.mark.parametrize("name", TEN)
def test_the_step_is_the_one_of_the_notes(name: str) -> None:
    with graphs.collected() as found:
        system = System.begun("graph", lambda: make(name))
    ops = graphs.kernels(found)
    assert ops["products"] == KERNELS[name].products
    assert ops["memory"] == pytest.approx(KERNELS[name].memory, rel=0.15)
    assert graphs.clusters(found) == 0
    scalars = [system.scalar(), system.scalar()]
    assert all(map(math.isfinite, scalars))
    if system.workload.draws:
        assert scalars[0] != scalars[1]  # the noise is another
    elif system.workload.training:
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

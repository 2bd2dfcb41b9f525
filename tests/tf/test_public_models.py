"""Training steps of public models: stitched, they compute and learn what TensorFlow's do."""

from __future__ import annotations

import numpy as np
import pytest

import tfmem
from benchmarks.fusion.workloads import make
from benchmarks.fusion.workloads.public import WORKLOADS, source
from graph_passes.decision import Fusion
from tests.tf.stitched_steps import optimized

SHORT = ("graph_attention", "wgan_gp")
LONG = ("word2vec", "llama", "gemma", "bloom", "mixtral", "t5", "bert", "deep_fm", "ft_transformer", "diffusion")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [*SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_a_step_learns_what_it_learnt(name: str) -> None:
    """Later losses depend on the gradients of earlier steps. Dropout draws the same numbers.

    Weights are not compared: the gradient of a key's bias is 0 but for rounding, and Adam makes steps of its sign.
    """
    plain, other = make(f"public/{name}"), make(f"public/{name}")
    step = optimized(other.step)
    for _ in range(4):
        np.testing.assert_allclose(step(*other.inputs), plain.step(*plain.inputs), rtol=2e-4)
    assert tfmem.report(step).fusion_state is Fusion.STITCHED


def test_every_model_says_what_it_was_written_after() -> None:
    assert len(WORKLOADS) >= 48
    assert all(map(source, WORKLOADS))

"""Random training steps whose batch nobody knows, as on a GPU, on the fake driver. Run by test_fusion_gpu.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import tfmem
from tests.tf.fake_gpu import FakeGpu
from tests.tf.stitched_steps import optimized
from tests.tf.test_fusion_random import BATCHES, Net, data

pytest_plugins = ("tests.tf.fake_gpu", "tests.tf.planned_on_fake_gpu")


@pytest.mark.filterwarnings("error::tfmem.TfmemWarning")
@pytest.mark.parametrize("seed", range(100, 108))
def test_steps_of_any_batch(gpu: FakeGpu, on_gpu: Callable[..., None], seed: int) -> None:
    on_gpu()
    plain, net = Net(seed), Net(seed)
    step, stitched = plain.step(), optimized(net.step())
    launched = gpu.calls("cuGraphLaunch")
    for batch in BATCHES:
        given = data(batch, seed)
        for found, expected in zip(stitched(*given), step(*given), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    for found, expected in zip(net.variables, plain.variables, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert tfmem.report(stitched).regions
    assert gpu.calls("cuGraphLaunch") >= launched + len(BATCHES)

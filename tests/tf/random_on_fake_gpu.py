"""Random training steps whose batch size is unknown, as on a GPU, on the fake driver. Run by test_fusion_gpu.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.tf.fake_gpu import FakeGpu
from tests.tf.random_steps import BATCHES, MORE, ROWS, compare

pytest_plugins = ("tests.tf.fake_gpu", "tests.tf.planned_on_fake_gpu")


@pytest.mark.filterwarnings("error::tfmem.TfmemWarning")
@pytest.mark.parametrize("seed", [*range(100, 108), *range(MORE, MORE + 6), *range(ROWS, ROWS + 8)])
def test_steps_of_any_batch(gpu: FakeGpu, on_gpu: Callable[..., None], seed: int) -> None:
    on_gpu()
    launched = gpu.calls("cuGraphLaunch")
    assert compare(seed).regions
    assert gpu.calls("cuGraphLaunch") >= launched + len(BATCHES)

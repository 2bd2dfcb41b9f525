"""Random training steps: stitched for a CPU, they compute what TensorFlow computes, at every batch size."""

from __future__ import annotations

import pytest

from tests.tf.random_steps import MORE, ROWS, compare


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", [*range(40), *range(MORE, MORE + 30), *range(ROWS, ROWS + 20)])
def test_steps_of_any_batch(seed: int) -> None:
    report = compare(seed)
    assert report.regions
    assert not [note for note in report.notes if "a bug" in note]

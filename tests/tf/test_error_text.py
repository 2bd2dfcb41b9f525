"""The line of an error that says what was wrong."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfmem.capture.error_text import said


def test_errors_of_graphs() -> None:
    @tf.function(autograph=False)
    def run(table: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        return tf.gather(table, index)

    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        run(tf.zeros([3]), tf.constant([7]))
    assert said(raised.value) == "indices[0] = 7 is not in [0, 3)"


@pytest.mark.parametrize(
    ("error", "line"),
    [(ValueError("first\nsecond"), "first"), (ValueError(), "ValueError"), (KeyError("x"), "'x'")],
)
def test_other_errors(error: Exception, line: str) -> None:
    assert said(error) == line

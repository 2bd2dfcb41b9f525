"""What an error says that is raised within a region."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import tfmem

AT_ONCE = {
    "passes": ("recurrent", "fusion", "offload"),
    "observe": False,
    "fusion": tfmem.FusionOptions(tune="off"),
    "cache_directory": "",
}


def stitched(function: Any, *given: Any) -> Any:
    step = tfmem.optimize(tf.function(function, autograph=False), **AT_ONCE)
    step(*given)
    assert tfmem.report(step).running
    return step


@pytest.mark.parametrize(("place", "words"), [(7, r"indices = 7 is"), ([1, 7], r"indices\[1\] = 7 is")])
def test_an_index_out_of_range_is_said_with_the_ops_of_its_kernel(place: Any, words: str) -> None:
    def function(x: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        return tf.tanh(tf.gather(x, index, name="looked_up")) * 2.0

    inside = tf.zeros_like(tf.constant(place))
    step = stitched(function, tf.random.normal([4, 64]), inside)
    with pytest.raises(tf.errors.InvalidArgumentError, match=words) as raised:
        step(tf.random.normal([4, 64]), tf.constant(place))
    assert "; the step that failed computes looked_up" in str(raised.value)
    assert "Tanh" in str(raised.value)


def test_an_error_names_six_ops_at_most() -> None:
    def function(x: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        y = tf.gather(x, index)
        for number in range(10):
            y = tf.sin(y, name=f"sine_{number}") + tf.cos(y)
        return y

    step = stitched(function, tf.random.normal([4, 64]), tf.constant([0]))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r" and \d+ more") as raised:
        step(tf.random.normal([4, 64]), tf.constant([9]))
    assert sum(f"sine_{number}" in str(raised.value) for number in range(10)) <= 6

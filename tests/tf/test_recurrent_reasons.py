"""The reasons why recurrences stay say what is in the way."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import tfmem
from tests.tf.recurrent_training import UNITS, numbers

BATCH, TIME, WORDS = 3, 6, 5


@pytest.mark.parametrize("words", [WORDS, 8 * UNITS])
@pytest.mark.parametrize("samples", [False, True])
def test_decoding(samples: bool, words: int) -> None:
    """A word of each row is a whole number, which small recurrences may have as a state: that alone is no reason."""
    table, head, recurrent = (numbers(*shape) for shape in ((words, UNITS), (UNITS, words), (UNITS, UNITS)))

    @tf.function(autograph=False)
    def run(h: Any) -> Any:
        def body(i: Any, word: Any, h: Any) -> Any:
            h = tf.tanh(tf.gather(table, word) + h @ recurrent)
            if samples:
                return i + 1, tf.random.stateless_categorical(h @ head, 1, [1, i], tf.int32)[:, 0], h
            return i + 1, tf.argmax(h @ head, 1, tf.int32), h

        return tf.while_loop(lambda i, *_: i < TIME, body, (0, tf.zeros([BATCH], tf.int32), h))

    optimized = tfmem.optimize(run, passes=("recurrent",))
    optimized(tf.constant(numbers(BATCH, UNITS)))
    report = tfmem.report(optimized)
    if not samples and words == WORDS:
        assert report.replaced
        return
    (why,) = report.not_replaced
    assert ("no op of a cell computes" if samples else "ops on single numbers") in why


def test_a_lambda_that_autograph_translated_has_a_name() -> None:
    draw = lambda i: tf.random.stateless_gamma([4], [i, 3], 2.0)  # noqa: E731

    @tf.function
    def run(state: Any) -> Any:
        for i in tf.range(5):
            state = state * 0.5 + draw(i)
        return state

    with pytest.warns(tfmem.TfmemWarning, match=r"test_recurrent_reasons\.py:\d+, in <lambda>\)"):
        tfmem.optimize(run, passes=("recurrent",), cache_directory="")(tf.ones([2, 4]))

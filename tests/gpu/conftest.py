"""Where tests run, and what products of float32 may round to on a GPU: TensorFlow allows TF32 there unless told
otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def allowed(tf32: bool) -> Iterator[None]:
    import tensorflow as tf  # the kernels' own tests need none

    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(tf32)
    yield
    tf.config.experimental.enable_tensor_float_32_execution(before)


@pytest.fixture
def float32_products() -> Iterator[None]:
    """In float32."""
    with allowed(tf32=False):
        yield


@pytest.fixture
def tf32_products(float32_products: None) -> Iterator[None]:
    """In TF32, also in a module that asks for float32: what a test asks for would be set up before that otherwise."""
    with allowed(tf32=True):
        yield


@pytest.fixture
def first_gpu() -> Iterator[None]:
    """Ops run there."""
    import tensorflow as tf

    if not tf.config.list_logical_devices("GPU"):
        pytest.skip("needs a GPU")
    with tf.device("GPU:0"):
        yield

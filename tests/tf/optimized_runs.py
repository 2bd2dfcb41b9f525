"""Room beside the smallest budget, and results to the bit: what the tests of `tfmem.optimize` share."""

import numpy as np
import tensorflow as tf

from tests.tf.python_server import call as in_a_process  # in which no earlier model holds memory

__all__ = ["in_a_process"]

KIB = 1 << 10
SPARE = 256 * KIB  # beside the smallest budget, so that what a test's process allocates by the way has room


def bits(results):
    return [np.asarray(result).tobytes() for result in tf.nest.flatten(results)]


def run(function, batch, steps=6):
    return [bits(function(*batch)) for _ in range(steps)]

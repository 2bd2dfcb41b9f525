"""Room beside the smallest budget, and results to the bit: what the tests of `tfmem.optimize` share."""

import numpy as np
import tensorflow as tf

KIB = 1 << 10
SPARE = 256 * KIB  # beside the smallest budget, so that what a test's process allocates by the way has room


def bits(results):
    return [np.asarray(result).tobytes() for result in tf.nest.flatten(results)]


def run(function, batch, steps=6):
    return [bits(function(*batch)) for _ in range(steps)]

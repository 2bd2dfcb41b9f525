"""Room beside the smallest budget, and results to the bit: what the tests of `tfmem.optimize` share."""

from multiprocessing import get_context

import numpy as np
import tensorflow as tf

KIB = 1 << 10
SPARE = 256 * KIB  # beside the smallest budget, so that what a test's process allocates by the way has room


def bits(results):
    return [np.asarray(result).tobytes() for result in tf.nest.flatten(results)]


def in_a_process(function, *arguments):
    """What `function` returns in a new process, in which no earlier model holds memory."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def run(function, batch, steps=6):
    return [bits(function(*batch)) for _ in range(steps)]

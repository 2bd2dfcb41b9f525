"""Numbers of others, and of graphs that were counted, beside which the measured ones stand."""

from __future__ import annotations

from typing import NamedTuple

PAPER = "FusionStitching: Boosting Execution Efficiency of Memory Intensive Computations (arXiv:1911.11576v1), V100"


class Speedups(NamedTuple):
    """A row of the paper's Table 3, everything over TensorFlow: how many times fewer kernels, how many times faster."""

    name: str  # in the paper
    xla_kernels: float
    kernels: float
    xla: float
    stitched: float


TABLE_3 = {
    "logistic": Speedups("logistic", 1.5, 4.6, 1.46, 1.83),
    "word2vec": Speedups("word2vec", 2.9, 4.9, 2.6, 3.3),
    "birnn": Speedups("bi-rnn", 2.8, 6.8, 2.5, 4.1),
    "dynrnn": Speedups("dyn-rnn", 3.2, 7.8, 3.8, 5.7),
    "mlp": Speedups("perceptron", 1.1, 1.3, 0.94, 1.18),
    "vae": Speedups("var-encoder", 1.5, 1.9, 0.8, 1.09),
    "nmt": Speedups("nmt", 1.65, 3.25, 1.36, 1.84),
    "multi_interests": Speedups("multi-interests", 1.63, 2.27, 1.25, 1.57),
    "rokid": Speedups("rokid", 1.3, 13.5, 1.09, 1.35),
    "aiwriter": Speedups("aiwriter", 2.6, 5.7, 2.53, 4.6),
}


APPLICATIONS = ("nmt", "multi_interests", "rokid", "aiwriter")  # private in the paper; published networks stand in
FIGURE_7 = 0.61  # the kernel time of the four over XLA's: section 6.5 claims 39% less on average


class SharedMemory(NamedTuple):
    """A row of the paper's Table 4: the share of patterns that use shared memory, and of the time; KB; bytes allocated
    over bytes requested."""

    patterns: float
    time: float
    average: float
    largest: float
    allocated: float


TABLE_4 = {
    "nmt": SharedMemory(0.42, 0.87, 3.6, 18.6, 0.81),
    "multi_interests": SharedMemory(0.24, 0.56, 7.5, 36.0, 0.88),
    "rokid": SharedMemory(0.90, 0.95, 5.5, 16.4, 0.98),
    "aiwriter": SharedMemory(0.34, 0.62, 1.4, 4.1, 0.87),
}


class Kernels(NamedTuple):
    """Kernels of a step: products and memory-intensive ones, as TensorFlow 2.21 runs it, and as XLA compiles it for an
    H200; and the least number of memory-intensive ones, if all of one depth (the largest number of products on any
    path to an op) are one kernel."""

    products: int
    memory: int
    xla_products: int
    xla_memory: int
    bound: int


# counted for this project from Grappler's graphs (remapper off) and from XLA's thunks of TensorFlow's HLO
KERNELS = {
    "logistic": Kernels(2, 17, 2, 7, 3),
    "word2vec": Kernels(6, 54, 3, 11, 3),
    "birnn": Kernels(88, 823, 88, 143, 59),
    "dynrnn": Kernels(62, 803, 62, 104, 43),
    "mlp": Kernels(8, 19, 8, 20, 7),
    "vae": Kernels(14, 66, 12, 30, 9),
    "nmt": Kernels(133, 537, 74, 101, 94),
    "multi_interests": Kernels(27, 142, 18, 39, 14),
    "rokid": Kernels(100, 379, 76, 93, 77),
    "aiwriter": Kernels(161, 1604, 21, 481, 131),
}

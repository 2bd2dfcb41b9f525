"""One process of the benchmark: the example's Tree-LSTM, trained by eager calls of `Handle.step`."""

from __future__ import annotations

import json
import secrets
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.dynamic.timing import measure, parts_of, show, words_of
from benchmarks.dynamic.traffic import products_of, weight_traffic
from custom_ops.dynamic.codegen.gpu_program import DynamicProgram, build, kinds_of
from custom_ops.dynamic.op import forward_backward
from custom_ops.jit.device import DeviceContext
from custom_ops.load import load
from examples.tree_lstm import TreeLSTM
from tfmem import dynamic

EMBEDDING = 128
LONGEST_CHOICE = 20.0  # seconds


def main(data: str, hidden: int, seconds: float, batch_sizes: list[int]) -> None:
    given = json.loads(Path(data).read_text())
    words = 1 + max(max(words_of(tree)) for tree in given)
    net = TreeLSTM(words, EMBEDDING, hidden)
    vocabulary = {word: word for word in range(words)}
    roots = [net.node(tree, vocabulary) for tree in given]
    facts: dict[str, object] = {"system": "tfmem", "hidden": hidden}
    if net.handle.plan is not None:
        facts |= specialisation(net, words, hidden)
        facts["difference"] = difference(net, net.handle.batch(roots[:8]))
        settle(net, [net.handle.batch(part) for part in parts_of(roots, 16)])
    for size in batch_sizes:
        parts = parts_of(roots, size)
        batches = [(net.handle.batch(part), len(part)) for part in parts]
        found = measure(batches, lambda batch: net.handle.step(batch).losses, lambda losses: losses.numpy(), seconds)
        if net.handle.plan is None:
            show(system="tfmem, batches made before", hidden=hidden, batch=size, **found)
            trees = [(part, len(part)) for part in parts_of(given, size)]
            found = measure(trees, partial(losses_of, net, vocabulary), lambda losses: losses.numpy(), seconds)
        show(**facts, batch=size, **found, **traffic(net, batches[0][0]))


def losses_of(net: TreeLSTM, vocabulary: dict[int, int], trees: list) -> tf.Tensor:
    """Makes the trees' nodes and a batch of them, as DyNet has to, and trains on it."""
    return net.handle.step(net.handle.batch([net.node(tree, vocabulary) for tree in trees])).losses


def settle(net: TreeLSTM, batches: list[dynamic.Batch]) -> None:
    """Trains until the fastest kernel is known, which is found out once and kept in the cache."""
    end = time.monotonic() + LONGEST_CHOICE
    while net.handle.choosing and time.monotonic() < end:
        for batch in batches:
            net.handle.step(batch).losses.numpy()


def specialisation(net: TreeLSTM, words: int, hidden: int) -> dict[str, float]:
    """Seconds to make the kernel, and to specialise again when it is in the cache.

    Some versions of NVRTC keep what they compiled, so the source is one that it has not seen: it has another bound of
    polls.
    """
    assert net.handle.plan is not None
    with DeviceContext(0) as device:
        arch = device.arch
    began = time.perf_counter()
    build(net.handle.spec, arch, net.handle.plan.chip, polls=(1 << 22) - 1 - secrets.randbelow(1 << 16))
    cold = time.perf_counter() - began
    began = time.perf_counter()
    TreeLSTM(words, EMBEDDING, hidden)
    return {"cold": cold, "warm": time.perf_counter() - began}


def difference(net: TreeLSTM, batch: dynamic.Batch, other: DynamicProgram | None = None) -> float:
    """The largest relative difference of a gradient on the GPU to the CPU's, or to that of another kernel.

    It is small only for a net that has not learnt yet: see `benchmarks.dynamic.distances`.
    """
    on_gpu = net.handle.forward_backward(batch).gradients
    with tf.device("/CPU:0"):
        expected = forward_backward(load().ops, net.handle.spec, net.handle.parameters, batch, 0, None, other)[2]
    largest = 0.0
    for a, b in zip(on_gpu, expected, strict=True):
        x, y = (tf.convert_to_tensor(gradient).numpy() for gradient in (a, b))
        largest = max(largest, float(np.abs(x - y).max() / np.abs(y).max()))
    return largest


def traffic(net: TreeLSTM, batch: dynamic.Batch) -> dict[str, int]:
    """Bytes of weights that a batch reads from off the chip, by plan, and if every node read its matrices."""
    plan = net.handle.plan
    if plan is None:
        return {}
    kinds = kinds_of(net.handle.spec)
    nodes = np.bincount(batch.kinds.values.numpy(), minlength=len(kinds))
    planned, each = weight_traffic(plan, products_of(plan, kinds, list(map(int, nodes))))
    return {"weight_bytes": planned, "weight_bytes_by_node": each, "resident_bytes": plan.resident_bytes}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), [int(size) for size in sys.argv[4:]])

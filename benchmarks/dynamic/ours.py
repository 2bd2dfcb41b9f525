"""One process of the benchmark: the example's Tree-LSTM, trained by `Handle.step` in a tf.function."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import tensorflow as tf

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tree_lstm import TreeLSTM
from tfmem import dynamic

EMBEDDING = 128


def main(data: str, hidden: int, batch_sizes: list[int]) -> None:
    given = json.loads(Path(data).read_text())
    words = 1 + max(max(words_of(tree)) for tree in given)
    net = TreeLSTM(words, EMBEDDING, hidden)
    step = tf.function(
        lambda *batch: net.handle.step(dynamic.Batch(*batch)).losses,
        input_signature=[tf.RaggedTensorSpec([None, None], tf.int32)] * 3,
    )
    vocabulary = {word: word for word in range(words)}
    roots = [net.node(tree, vocabulary) for tree in given]
    for size in batch_sizes:
        batches = [net.handle.batch(roots[first : first + size]) for first in range(0, len(roots), size)]
        for batch in batches[:2]:
            step(*batch)
        wall, processor = time.perf_counter(), time.process_time()
        for batch in batches:
            losses = step(*batch)
        losses.numpy()
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        row = {"hidden": hidden, "batch": size, "sentences": len(roots), "wall": wall, "processor": processor}
        print(json.dumps({"system": "tfmem", **row}))


def words_of(tree: list) -> list[int]:
    return [tree[1]] if len(tree) == 2 else words_of(tree[1]) + words_of(tree[2])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), [int(size) for size in sys.argv[3:]])

"""One process of the benchmark: the same Tree-LSTM in DyNet, with autobatching. Imports nothing of this project."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import dynet_config

EMBEDDING, CLASSES = 128, 5


def main(data: str, hidden: int, batch_sizes: list[int]) -> None:
    dynet_config.set(mem=2048, autobatch=1)
    import dynet as dy

    given = json.loads(Path(data).read_text())
    words = 1 + max(max(words_of(tree)) for tree in given)
    model = dy.ParameterCollection()
    trainer = dy.AdamTrainer(model)
    table = model.add_lookup_parameters((words, EMBEDDING))
    word, word_bias = model.add_parameters((3 * hidden, EMBEDDING)), model.add_parameters(3 * hidden)
    pair, pair_bias = model.add_parameters((5 * hidden, 2 * hidden)), model.add_parameters(5 * hidden)
    output, output_bias = model.add_parameters((CLASSES, hidden)), model.add_parameters(CLASSES)

    def parts(gates: dy.Expression, count: int) -> list:
        return [dy.pick_range(gates, number * hidden, (number + 1) * hidden) for number in range(count)]

    def walk(tree: list, losses: list) -> tuple:
        if len(tree) == 2:
            i, o, u = parts(dy.affine_transform([word_bias, word, table[tree[1]]]), 3)
            c = dy.cmult(dy.logistic(i), dy.tanh(u))
        else:
            (left_h, left_c), (right_h, right_c) = walk(tree[1], losses), walk(tree[2], losses)
            below = dy.concatenate([left_h, right_h])
            i, f_left, f_right, o, u = parts(dy.affine_transform([pair_bias, pair, below]), 5)
            c = dy.cmult(dy.logistic(i), dy.tanh(u))
            c = c + dy.cmult(dy.logistic(f_left), left_c) + dy.cmult(dy.logistic(f_right), right_c)
        h = dy.cmult(dy.logistic(o), dy.tanh(c))
        losses.append(dy.pickneglogsoftmax(dy.affine_transform([output_bias, output, h]), tree[0]))
        return h, c

    def train(trees: list) -> None:
        dy.renew_cg()
        losses: list = []
        for tree in trees:
            walk(tree, losses)
        total = dy.esum(losses)
        total.forward()
        total.backward()
        trainer.update()

    for size in batch_sizes:
        batches = [given[first : first + size] for first in range(0, len(given), size)]
        for batch in batches[:2]:
            train(batch)
        wall, processor = time.perf_counter(), time.process_time()
        for batch in batches:
            train(batch)
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        row = {"hidden": hidden, "batch": size, "sentences": len(given), "wall": wall, "processor": processor}
        print(json.dumps({"system": "dynet", **row}))


def words_of(tree: list) -> list[int]:
    return [tree[1]] if len(tree) == 2 else words_of(tree[1]) + words_of(tree[2])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), [int(size) for size in sys.argv[3:]])

"""One process of the benchmark of all applications: the same nets in DyNet, with autobatching.

Imports nothing of this project.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dynet_config

HIDDEN = EMBEDDING = 64
CLASSES, SPELLING, MIDDLE = 5, 20, 32


def main(data: str, size: int, names: list[str]) -> None:
    dynet_config.set(mem=2048, autobatch=1)
    import dynet as dy

    for name in names:
        given = json.loads(Path(data).read_text())[name]
        model = dy.ParameterCollection()
        trainer = dy.AdamTrainer(model, 0.003)
        loss = NETS[name](dy, model, given)

        def train(examples: list, dy: Any = dy, trainer: Any = trainer, loss: Any = loss) -> None:
            dy.renew_cg()
            total = dy.esum([each for example in examples for each in loss(example)])
            total.forward()
            total.backward()
            trainer.update()

        examples = given["examples"]
        batches = [examples[first : first + size] for first in range(0, len(examples), size)]
        for batch in batches[:2]:
            train(batch)
        wall, processor = time.perf_counter(), time.process_time()
        for batch in batches:
            train(batch)
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        row = {"application": name, "examples": len(examples), "wall": wall, "processor": processor}
        print(json.dumps({"system": "dynet", **row}), flush=True)


def parts(dy: Any, gates: Any, count: int, width: int = HIDDEN) -> list:
    return [dy.pick_range(gates, number * width, (number + 1) * width) for number in range(count)]


def over_trees(word: Callable, pair: Callable, affine: Callable, dy: Any) -> Callable:
    """The losses of all nodes of a tree."""

    def loss(tree: list) -> list:
        losses: list = []

        def walk(tree: list) -> Any:
            state = word(tree[1]) if len(tree) == 2 else pair(walk(tree[1]), walk(tree[2]))
            losses.append(dy.pickneglogsoftmax(affine(state[0]), tree[0]))
            return state

        walk(tree)
        return losses

    return loss


def tree_lstm(dy: Any, model: Any, given: dict) -> Callable:
    table = model.add_lookup_parameters((given["words"], EMBEDDING))
    w, b = model.add_parameters((3 * HIDDEN, EMBEDDING)), model.add_parameters(3 * HIDDEN)
    u, v = model.add_parameters((5 * HIDDEN, 2 * HIDDEN)), model.add_parameters(5 * HIDDEN)
    o, p = model.add_parameters((CLASSES, HIDDEN)), model.add_parameters(CLASSES)

    def state(c: Any, gate: Any) -> tuple:
        return dy.cmult(dy.logistic(gate), dy.tanh(c)), c

    def word(number: int) -> tuple:
        i, gate, u = parts(dy, dy.affine_transform([b, w, table[number]]), 3)
        return state(dy.cmult(dy.logistic(i), dy.tanh(u)), gate)

    def pair(left: tuple, right: tuple) -> tuple:
        i, f, g, gate, n = parts(dy, dy.affine_transform([v, u, dy.concatenate([left[0], right[0]])]), 5)
        kept = dy.cmult(dy.logistic(f), left[1]) + dy.cmult(dy.logistic(g), right[1])
        return state(dy.cmult(dy.logistic(i), dy.tanh(n)) + kept, gate)

    return over_trees(word, pair, lambda h: dy.affine_transform([p, o, h]), dy)


def rvnn(dy: Any, model: Any, given: dict) -> Callable:
    table = model.add_lookup_parameters((given["words"], HIDDEN))
    u, v = model.add_parameters((HIDDEN, 2 * HIDDEN)), model.add_parameters(HIDDEN)
    o, p = model.add_parameters((CLASSES, HIDDEN)), model.add_parameters(CLASSES)

    def pair(left: tuple, right: tuple) -> tuple:
        return (dy.tanh(dy.affine_transform([v, u, dy.concatenate([left[0], right[0]])])),)

    return over_trees(lambda number: (table[number],), pair, lambda h: dy.affine_transform([p, o, h]), dy)


def time_delay(gates: int) -> Callable:
    def made(dy: Any, model: Any, given: dict) -> Callable:
        table = model.add_lookup_parameters((given["words"], EMBEDDING))
        w, b = model.add_parameters((gates * HIDDEN, EMBEDDING)), model.add_parameters(gates * HIDDEN)
        delayed = [(delay, model.add_parameters((gates * HIDDEN, HIDDEN))) for delay in (1, 2, 4)]
        o, p = model.add_parameters((2, HIDDEN)), model.add_parameters(2)

        def loss(example: list) -> list:
            states: list = []
            cell = None
            for word in example[0]:
                terms = [part for delay, u in delayed if delay <= len(states) for part in (u, states[-delay])]
                sums = dy.affine_transform([b, w, table[word], *terms])
                if gates == 1:
                    states.append(dy.tanh(sums))
                    continue
                i, f, gate, n = parts(dy, sums, 4)
                new = dy.cmult(dy.logistic(i), dy.tanh(n))
                cell = new if cell is None else dy.cmult(dy.logistic(f), cell) + new
                states.append(dy.cmult(dy.logistic(gate), dy.tanh(cell)))
            return [dy.pickneglogsoftmax(dy.affine_transform([p, o, states[-1]]), example[1])]

        return loss

    return made


def lstm(dy: Any, model: Any, inputs: int, width: int) -> Callable:
    """What gives the states of an LSTM over some vectors."""
    w, u = model.add_parameters((4 * width, inputs)), model.add_parameters((4 * width, width))
    b = model.add_parameters(4 * width)

    def run(vectors: list) -> list:
        states: list = []
        cell = None
        for x in vectors:
            terms = [u, states[-1]] if states else []
            i, f, gate, n = parts(dy, dy.affine_transform([b, w, x, *terms]), 4, width)
            new = dy.cmult(dy.logistic(i), dy.tanh(n))
            cell = new if cell is None else dy.cmult(dy.logistic(f), cell) + new
            states.append(dy.cmult(dy.logistic(gate), dy.tanh(cell)))
        return states

    return run


def tagger(spells: bool) -> Callable:
    def made(dy: Any, model: Any, given: dict) -> Callable:
        table = model.add_lookup_parameters((given["words"], EMBEDDING))
        forth, back = (lstm(dy, model, EMBEDDING, HIDDEN) for _ in range(2))
        middle, o = model.add_parameters((MIDDLE, 2 * HIDDEN)), model.add_parameters((given["tags"], MIDDLE))
        spelling = model.add_lookup_parameters((given["characters"], SPELLING))
        ahead, behind = (lstm(dy, model, SPELLING, EMBEDDING // 2) for _ in range(2))

        def word(row: int, characters: list) -> Any:
            if row or not spells:
                return table[row]
            vectors = [spelling[each] for each in characters]
            return dy.concatenate([ahead(vectors)[-1], behind(vectors[::-1])[-1]])

        def loss(example: list) -> list:
            vectors = [word(row, characters) for row, characters in zip(example[0], example[1], strict=True)]
            pairs = zip(forth(vectors), back(vectors[::-1])[::-1], example[2], strict=True)
            return [dy.pickneglogsoftmax(o * dy.tanh(middle * dy.concatenate([f, b])), tag) for f, b, tag in pairs]

        return loss

    return made


def graph_net(dy: Any, model: Any, given: dict) -> Callable:
    encode = model.add_parameters((HIDDEN, given["features"]))
    layers = [
        [model.add_parameters(shape) for shape in ((HIDDEN, HIDDEN), (HIDDEN, HIDDEN), HIDDEN)]
        for _ in range(given["layers"])
    ]
    o, p = model.add_parameters((2, HIDDEN)), model.add_parameters(2)

    def loss(example: dict) -> list:
        states = [encode * dy.inputVector(row) for row in example["features"]]
        for own, near, bias in layers:
            states = [
                dy.rectify(dy.affine_transform([bias, own, state, near, dy.esum([states[at] for at in others])]))
                for state, others in zip(states, example["near"], strict=True)
            ]
        return [dy.pickneglogsoftmax(dy.affine_transform([p, o, dy.esum(states)]), example["label"])]

    return loss


def biaffine_parser(dy: Any, model: Any, given: dict) -> Callable:
    table = model.add_lookup_parameters((given["words"], EMBEDDING))
    forth, back = (lstm(dy, model, EMBEDDING, HIDDEN) for _ in range(2))
    score = given["score"]
    to_head, to_dependent = (model.add_parameters((score, 2 * HIDDEN)) for _ in range(2))
    pairs, alone = model.add_parameters((score, score)), model.add_parameters(score)

    def loss(example: list) -> list:
        vectors = [table[row] for row in example[0]]
        both = [dy.concatenate([f, b]) for f, b in zip(forth(vectors), back(vectors[::-1])[::-1], strict=True)]
        heads = dy.transpose(dy.concatenate_cols([dy.rectify(to_head * each) for each in both]))
        asked = [dy.affine_transform([alone, pairs, dy.rectify(to_dependent * each)]) for each in both[1:]]
        return [dy.pickneglogsoftmax(heads * each, head) for each, head in zip(asked, example[1], strict=True)]

    return loss


NETS = {
    "tree_lstm": tree_lstm,
    "rvnn": rvnn,
    "td_rnn": time_delay(1),
    "td_lstm": time_delay(4),
    "bilstm_tagger": tagger(False),
    "bilstm_character_tagger": tagger(True),
    "graph_net": graph_net,
    "biaffine_parser": biaffine_parser,
}

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[4:])

"""What the host does for a tree before anything is computed, in microseconds of processor time.

    python -m benchmarks.dynamic.host --output benchmarks/results/dynamic_host.json

Trees of 39 nodes of the example's Tree-LSTM, whose vectors have one number each: nothing is left to compute, so that a
step by the op is the time to check a batch, to find its levels and to write and run its script; and a little more.

Of a batch without a gradient it also shows what memory the op takes with the backward pass to come, and without.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.records import FORMAT, machine
from custom_ops.dynamic.spec import Spec
from examples.tree_lstm import TreeLSTM
from tfmem import dynamic

LEAVES = 20
WORDS = 50


def random_tree(random: np.random.Generator, leaves: int = LEAVES) -> tuple:
    """A tree of `2 * leaves - 1` nodes, with labels."""
    label = int(random.integers(5))
    if leaves == 1:
        return label, int(random.integers(WORDS))
    left = int(random.integers(1, leaves))
    return label, random_tree(random, left), random_tree(random, leaves - left)


def nodes(net: TreeLSTM, tree: tuple) -> dynamic.Node:
    """One call for each node."""
    if len(tree) == 2:
        return net.handle.node("leaf", tree[1], tree[0])
    return net.handle.node("pair", nodes(net, tree[1]), nodes(net, tree[2]), tree[0])


def recorded(net: TreeLSTM, tree: tuple) -> dynamic.Expression:
    """The loss, each op of each node a call."""
    losses: list[dynamic.Expression] = []

    def walk(part: tuple) -> Any:
        if len(part) == 2:
            found = net.of_word((), part[1], part[0])
        else:
            found = net.of_pair((walk(part[1]), walk(part[2])), part[0])
        losses.append(found.loss)
        return found.state

    walk(tree)
    return dynamic.add_n(losses)


def ops_of(loss: dynamic.Expression) -> int:
    """How many ops were recorded under a loss."""
    found: dict[int, dynamic.Expression] = {}
    waiting = [loss]
    while waiting:
        current = waiting.pop()
        if id(current) not in found:
            found[id(current)] = current
            waiting += current.values
    return len(found)


def best(work: Callable[[], Any], count: int, rounds: int) -> float:
    """Microseconds of processor time for each of `count`, of the quickest round."""
    work()
    found = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found) / count * 1e6


def floats_of(spec: Spec) -> list[int]:
    """The numbers that a batch keeps for one node, by kind, as the op's text says.

    These are states, kept values, outputs, and the adjoints that the node puts to its children.
    """
    found = []
    for block in spec.text.split("\nkind ")[1:]:
        lines = block.splitlines()
        widths = [int(word) for line in lines if line.startswith(("kept ", "outputs ")) for word in line.split()[1:]]
        kind = spec.kinds[len(found)]
        puts = {tuple(line.split("|")[1].split()) for line in lines if line.startswith("put_child ")}
        widths += [kind.children[int(slot)][int(state)] for slot, state in puts]
        found.append(sum(widths) + sum(kind.state))
    return found


def measure(trees: int, rounds: int) -> dict[str, Any]:
    """All numbers."""
    random = np.random.default_rng(0)
    net = TreeLSTM(WORDS, 1, 1)
    given = [random_tree(random) for _ in range(trees)]
    batch = net.handle.batch([nodes(net, tree) for tree in given])
    by_op = dynamic.specialize(net.handle.parameters)
    few = given[: max(1, trees // 10)]
    by_op.batch([recorded(net, tree) for tree in few])  # writes the kinds
    losses = [recorded(net, tree) for tree in few]
    ops = sum(map(ops_of, losses)) / len(few)
    objects = best(lambda: [dynamic.Expression(1) for _ in range(10_000)], 10_000, rounds)
    wide = TreeLSTM(WORDS, 128, 256)
    spec = wide.handle.spec
    return {
        "nodes": 2 * LEAVES - 1,
        "trees": trees,
        "tensors, forward": best(lambda: net.handle.forward(batch), trees, rounds),
        "tensors, step": best(lambda: net.handle.step(batch), trees, rounds),
        "calls of handle.node": best(lambda: [nodes(net, tree) for tree in given], trees, rounds),
        "nodes to tensors": best(lambda: net.handle.batch([nodes(net, tree) for tree in given]), trees, rounds),
        "recording ops": best(lambda: [recorded(net, tree) for tree in few], len(few), rounds),
        "ops to tensors": best(lambda: by_op.batch([recorded(net, tree) for tree in few]), len(few), rounds),
        "ops": ops,
        "one expression": objects,
        "numbers of a pair, with gradient": floats_of(spec)[1],
        "numbers of a pair, forward alone": floats_of(spec.forward_only)[1],
    }


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(given)
    found = measure(args.trees, args.rounds)
    for name, value in found.items():
        print(f"{name:36s} {value:12.2f}")
    if args.output:
        about = machine() | {"versions": {"tensorflow": tf.__version__, "numpy": np.__version__}}
        args.output.write_text(json.dumps({"format": FORMAT, "machine": about, "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

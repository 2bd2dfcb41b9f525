"""One process of the benchmark: the same Tree-LSTM in PyTorch, node by node, or all nodes of a level at once as DGL
does. Imports nothing of this project but how it is timed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.dynamic.timing import measure, parts_of, show, words_of

EMBEDDING, CLASSES = 128, 5


class TreeLSTM(torch.nn.Module):
    """Parameters, and one node or many."""

    def __init__(self, words: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.table = torch.nn.Embedding(words, EMBEDDING)
        self.word = torch.nn.Linear(EMBEDDING, 3 * hidden)
        self.pair = torch.nn.Linear(2 * hidden, 5 * hidden)
        self.output = torch.nn.Linear(hidden, CLASSES)

    def leaf(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        i, o, u = self.word(self.table(words)).chunk(3, -1)
        c = torch.sigmoid(i) * torch.tanh(u)
        return torch.sigmoid(o) * torch.tanh(c), c

    def combine(
        self, h: torch.Tensor, left_c: torch.Tensor, right_c: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        i, f_left, f_right, o, u = self.pair(h).chunk(5, -1)
        c = torch.sigmoid(i) * torch.tanh(u) + torch.sigmoid(f_left) * left_c + torch.sigmoid(f_right) * right_c
        return torch.sigmoid(o) * torch.tanh(c), c

    def node_by_node(self, trees: list) -> torch.Tensor:
        """The sum of the losses, with separate ops for each node."""
        device, states, labels = self.table.weight.device, [], []

        def walk(tree: list) -> tuple[torch.Tensor, torch.Tensor]:
            if len(tree) == 2:
                h, c = self.leaf(torch.tensor(tree[1], device=device))
            else:
                (left_h, left_c), (right_h, right_c) = walk(tree[1]), walk(tree[2])
                h, c = self.combine(torch.cat([left_h, right_h]), left_c, right_c)
            states.append(self.output(h))
            labels.append(tree[0])
            return h, c

        for tree in trees:
            walk(tree)
        found = torch.stack(states)
        return torch.nn.functional.cross_entropy(found, torch.tensor(labels, device=device), reduction="sum")

    def level_by_level(self, levels: Levels) -> torch.Tensor:
        """The sum of the losses, all nodes of a level at once."""
        h, c = self.leaf(levels.words)
        for left, right in levels.children:
            below = torch.cat([h[left], h[right]], 1)
            new_h, new_c = self.combine(below, c[left], c[right])
            h, c = torch.cat([h, new_h]), torch.cat([c, new_c])
        return torch.nn.functional.cross_entropy(self.output(h), levels.labels, reduction="sum")


class Levels:
    """Trees as index tensors on the device: all leaves, then the pairs of each level."""

    def __init__(self, trees: list, device: torch.device) -> None:
        words: list[int] = []
        labels: list[int] = []
        by_level: list[list[tuple[list, list, list]]] = []
        place: dict[int, int] = {}

        def walk(tree: list) -> int:
            if len(tree) == 2:
                place[id(tree)] = len(words)
                words.append(tree[1])
                labels.append(tree[0])
                return 0
            level = 1 + max(walk(tree[1]), walk(tree[2]))
            while len(by_level) < level:
                by_level.append([])
            by_level[level - 1].append((tree, tree[1], tree[2]))
            return level

        for tree in trees:
            walk(tree)
        self.words = torch.tensor(words, device=device)
        self.children = []
        for pairs in by_level:
            left = [place[id(left)] for _, left, _ in pairs]
            right = [place[id(right)] for _, _, right in pairs]
            for tree, _, _ in pairs:
                place[id(tree)] = len(labels)
                labels.append(tree[0])
            self.children.append((torch.tensor(left, device=device), torch.tensor(right, device=device)))
        self.labels = torch.tensor(labels, device=device)


def systems(net: TreeLSTM, wanted: str, device: torch.device) -> Iterator[tuple[str, object]]:
    """Names and losses of a batch of trees."""
    if wanted in ("eager", "both"):
        yield "torch eager", net.node_by_node
    if wanted in ("levels", "both"):
        yield "torch levels", lambda trees: net.level_by_level(Levels(trees, device))


CAPTURED = 4  # batches of a size


def main(data: str, hidden: int, seconds: float, wanted: str, batch_sizes: list[int]) -> None:
    given = json.loads(Path(data).read_text())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    net = TreeLSTM(1 + max(max(words_of(tree)) for tree in given), hidden).to(device)
    on_gpu = device.type == "cuda"
    adam = torch.optim.Adam(net.parameters(), 0.003, fused=on_gpu, capturable=on_gpu and wanted == "graphs")
    if wanted == "graphs":
        by_replay(net, adam, given, hidden, seconds, batch_sizes)
        return
    for name, losses in systems(net, wanted, device):
        for size in batch_sizes:
            batches = [(part, len(part)) for part in parts_of(given, size)]
            found = measure(
                batches, lambda trees, of=losses: train(adam, lambda: of(trees)), lambda loss: loss.item(), seconds
            )
            show(system=name, hidden=hidden, batch=size, **found)


def train(adam: torch.optim.Optimizer, losses: Callable[[], torch.Tensor]) -> torch.Tensor:
    """One step."""
    adam.zero_grad(set_to_none=True)
    loss = losses()
    loss.backward()
    adam.step()
    return loss.detach()


def by_replay(
    net: TreeLSTM, adam: torch.optim.Optimizer, given: list, hidden: int, seconds: float, batch_sizes: list[int]
) -> None:
    """Level by level, by CUDA graphs of the first batches, which come again and again."""
    device = net.table.weight.device
    for size in batch_sizes:
        captured = []
        for trees in parts_of(given, size)[:CAPTURED]:
            levels = Levels(trees, device)
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(2):
                    train(adam, lambda levels=levels: net.level_by_level(levels))
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            adam.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph):
                loss = train(adam, lambda levels=levels: net.level_by_level(levels))
            captured.append(((graph, loss, levels), len(trees)))  # a graph reads its inputs where they were

        def replay(of: tuple[torch.cuda.CUDAGraph, torch.Tensor, Levels]) -> torch.Tensor:
            of[0].replay()
            return of[1]

        found = measure(captured, replay, lambda loss: loss.item(), seconds)
        show(system="torch graphs", hidden=hidden, batch=size, **found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4], [int(size) for size in sys.argv[5:]])

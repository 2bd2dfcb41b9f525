"""Random training graphs whose tensors can be copied, or recomputed by chains of ops."""

from __future__ import annotations

from hypothesis import strategies as st

from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec

LARGE, SMALL = 1 << 14, 16  # elements of 4 bytes


class Net:
    """A training graph, written forward; `graph` adds gradients that read what they would."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.specs: dict[TensorId, TensorSpec] = {}
        self.kept: list[list[str]] = []  # of each layer: what its gradient reads

    def add(self, name: str, op: str, inputs: list[str], *sizes: int) -> str:
        tensors = [TensorId(each.partition(":")[0], int(each.partition(":")[2] or 0)) for each in inputs]
        self.nodes.append(Node(name, op, tensors, outputs=len(sizes), stateful=op == "VarHandleOp"))
        self.specs.update({TensorId(name, index): TensorSpec("float32", 4, (n,)) for index, n in enumerate(sizes)})
        return name

    def layer(self, kind: str, index: int, top: str, skip: str, units: int) -> str:
        size = self.specs[TensorId(top)].shape[0]
        if kind == "product":
            self.kept.append([top])
            return self.add(f"c{index}", "Conv2D", [top], units * LARGE)
        if kind == "norm":
            y = self.add(f"n{index}", "FusedBatchNormV3", [top], size, SMALL, SMALL)
            self.kept.append([top, f"{y}:1", f"{y}:2"])
            return y
        if kind == "scale" or (kind == "add" and skip == top):
            self.kept.append([])
            return self.add(f"s{index}", "Mul", [top], size)
        if kind == "relu":
            y = self.add(f"r{index}", "Relu", [self.add(f"i{index}", "Identity", [top], size)], size)
            self.kept.append([y])
            return y
        if kind == "dropout":
            key = self.add(f"k{index}", "Neg", [], SMALL)
            mask = self.add(f"u{index}", "StatelessRandomUniformV2", [key], size)
            mask = self.add(f"m{index}", "GreaterEqual", [mask], size)
            self.kept.append([mask])
            return self.add(f"d{index}", "Mul", [top, mask], size)
        self.kept.append([])
        return self.add(f"a{index}", "AddV2", [top, skip], size)

    def graph(self, top: str) -> Graph:
        gradient = self.add("loss", "Mean", [top], SMALL)
        for index, reads in reversed(list(enumerate(self.kept))):
            size = self.specs[TensorId(reads[0])].shape[0] if reads else LARGE
            gradient = self.add(f"g{index}", "Conv3DBackpropFilterV2", [*reads, gradient], size)
        return Graph(self.nodes, self.specs)


@st.composite
def nets(draw) -> Graph:
    net = Net()
    top = skip = net.add("x", "Conv2D", [], LARGE)
    for index in range(draw(st.integers(2, 14))):
        kind = draw(st.sampled_from(["product", "norm", "scale", "relu", "dropout", "add"]))
        top = net.layer(kind, index, top, skip, draw(st.integers(1, 3)))
        if draw(st.booleans()) or net.specs[TensorId(skip)] != net.specs[TensorId(top)]:
            skip = top
    return net.graph(top)

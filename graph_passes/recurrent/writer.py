"""Writes the nodes of a match, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from graph_passes.ir import AttrValue, DataType, Graph, Literal, TensorId
from graph_passes.recurrent.match import Launch, NewNode


class Writer:
    """Collects new nodes under one prefix, with names that the graph does not have yet."""

    def __init__(self, graph: Graph, prefix: str, device: str = "") -> None:
        self.nodes: list[NewNode | Launch] = []
        self._graph = graph
        self._prefix = prefix
        self._device = device
        self._taken: set[str] = set()

    def name(self, wanted: str) -> str:
        """A name under the prefix that nothing has."""
        name, suffix = f"{self._prefix}/{wanted}", 1
        while name in self._graph.nodes or name in self._taken:
            name, suffix = f"{self._prefix}/{wanted}_{suffix}", suffix + 1
        self._taken.add(name)
        return name

    def add(self, op: str, *inputs: TensorId, **attrs: AttrValue) -> TensorId:
        """Output 0 of a new op; `num_split` says how many it has."""
        outputs = attrs.get("num_split", 1)
        node = NewNode(self.name(op), op, inputs, attrs, self._device, outputs=int(str(outputs)))
        self.nodes.append(node)
        return TensorId(node.name)

    def integers(self, values: Sequence[int] | int) -> TensorId:
        """An int32 constant, a vector or a scalar."""
        shape, flat = ((), (values,)) if isinstance(values, int) else ((len(values),), tuple(values))
        dtype = DataType("int32")
        return self.add("Const", dtype=dtype, value=Literal("int32", shape, flat))

    def reshape(self, tensor: TensorId, shape: Sequence[int], dtype: str) -> TensorId:
        """One dimension may be -1."""
        wanted = self.integers(shape)
        return self.add("Reshape", tensor, wanted, T=DataType(dtype), Tshape=DataType("int32"))

    def transpose(self, tensor: TensorId, order: Sequence[int], dtype: str) -> TensorId:
        """Dimension n of the result is dimension `order[n]` of the tensor."""
        wanted = self.integers(order)
        return self.add("Transpose", tensor, wanted, T=DataType(dtype), Tperm=DataType("int32"))

    def concat(self, tensors: Sequence[TensorId], axis: int, dtype: str) -> TensorId:
        """The tensors one behind the other; one stays as it is."""
        if len(tensors) == 1:
            return tensors[0]
        place = self.integers(axis)
        return self.add("ConcatV2", *tensors, place, N=len(tensors), T=DataType(dtype), Tidx=DataType("int32"))

    def slice(self, tensor: TensorId, begin: Sequence[int], size: Sequence[int], dtype: str) -> TensorId:
        """A part of the tensor; a size of -1 goes to the end."""
        first, count = self.integers(begin), self.integers(size)
        return self.add("Slice", tensor, first, count, T=DataType(dtype), Index=DataType("int32"))

    def expand(self, tensor: TensorId, axis: int, dtype: str) -> TensorId:
        """One more dimension, of size 1."""
        place = self.integers(axis)
        return self.add("ExpandDims", tensor, place, T=DataType(dtype), Tdim=DataType("int32"))

    def split(self, tensor: TensorId, sizes: Sequence[int], axis: int, dtype: str) -> tuple[TensorId, ...]:
        """Parts of the given sizes."""
        wanted, place = self.integers(sizes), self.integers(axis)
        int32 = DataType("int32")
        first = self.add("SplitV", tensor, wanted, place, num_split=len(sizes), T=DataType(dtype), Tlen=int32)
        return tuple(TensorId(first.node, index) for index in range(len(sizes)))

    def matmul(self, left: TensorId, right: TensorId, dtype: str) -> TensorId:
        """`left @ right`."""
        return self.add("MatMul", left, right, T=DataType(dtype), transpose_a=False, transpose_b=False)

"""Writes new nodes, one after the other: plain TensorFlow ops, each equal request one node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graph_passes.graph.ir import AttrValue, DataType, Literal, Node, TensorId
from graph_passes.graph.ops import READS, copied
from graph_passes.graph.rewrite import Names, NewNode

SHAPE_DTYPE = "int32"

Dim = int | TensorId  # a number that is known now, or a scalar tensor of SHAPE_DTYPE


class Writer:
    """Collects new nodes under one prefix.

    Attributes:
        nodes: what was written so far, in topological order.
    """

    def __init__(self, names: Names, prefix: str, device: str = "", control: Sequence[str] = ()) -> None:
        """
        Args:
            names: gives names to the nodes.
            prefix: of all names.
            device: of all nodes.
            control: what those wait for that read variables.
        """
        self.nodes: list[NewNode] = []
        self._names, self._prefix, self._device, self._control = names, prefix, device, tuple(control)
        self._made: dict[object, TensorId] = {}

    def name(self, wanted: str) -> str:
        """A name under the prefix that nothing has."""
        return self._names.fresh(f"{self._prefix}/{wanted}")

    def emit(
        self,
        op: str,
        inputs: Sequence[TensorId],
        attrs: Mapping[str, AttrValue | object],
        label: str = "",
        outputs: int = 1,
    ) -> TensorId:
        """Output 0 of a new node."""
        control = self._control if op in READS else ()
        self.nodes.append(NewNode(self.name(label or op), op, tuple(inputs), attrs, self._device, control, outputs))
        return TensorId(self.nodes[-1].name)

    def once(
        self, op: str, inputs: Sequence[TensorId], attrs: Mapping[str, AttrValue], label: str = "", outputs: int = 1
    ) -> TensorId:
        """Output 0 of a new node, or of the one that an equal request made."""
        key = (op, tuple(inputs), tuple(sorted(attrs.items(), key=lambda item: item[0])))
        if key not in self._made:
            self._made[key] = self.emit(op, inputs, attrs, label, outputs)
        return self._made[key]

    def again(self, node: Node, *inputs: TensorId) -> TensorId:
        """What `node` would make of other inputs."""
        return self.emit(node.op, inputs, copied(node))

    def constant(self, dtype: str, shape: Sequence[int], values: Sequence[bool | int | float]) -> TensorId:
        """A Const."""
        literal = Literal(dtype, tuple(shape), tuple(values))
        return self.once("Const", (), {"dtype": DataType(dtype), "value": literal})

    def scalar(self, value: Dim) -> TensorId:
        """A scalar of SHAPE_DTYPE."""
        return self.constant(SHAPE_DTYPE, (), [value]) if isinstance(value, int) else value

    def shape(self, dims: Sequence[Dim]) -> TensorId:
        """A shape vector."""
        if all(isinstance(dim, int) for dim in dims):
            return self.constant(SHAPE_DTYPE, (len(dims),), [int(dim) for dim in dims])  # type: ignore[arg-type]
        parts = list(map(self.scalar, dims))
        return self.once("Pack", parts, {"N": len(parts), "T": DataType(SHAPE_DTYPE), "axis": 0}, "shape")

    def reshape(self, tensor: TensorId, dtype: str, dims: Sequence[Dim]) -> TensorId:
        """`tensor` in another shape; -1 as in TensorFlow."""
        attrs: dict[str, AttrValue] = {"T": DataType(dtype), "Tshape": DataType(SHAPE_DTYPE)}
        known = [dim for dim in dims if isinstance(dim, int) and dim > 0]
        if len(known) == len(dims) - 1:  # the last one is inferred: no op has to read it
            dims = tuple(dim if isinstance(dim, int) else -1 for dim in dims)
        return self.once("Reshape", [tensor, self.shape(dims)], attrs)

    def cast(self, tensor: TensorId, source: str, target: str) -> TensorId:
        """`tensor` as `target`."""
        if source == target:
            return tensor
        attrs: dict[str, AttrValue] = {"SrcT": DataType(source), "DstT": DataType(target), "Truncate": False}
        return self.once("Cast", [tensor], attrs)

    def scalar_of_shape(self, tensor: TensorId, dtype: str, axis: int) -> TensorId:
        """Dimension `axis` of `tensor`, as int32."""
        shape = self.once("Shape", [tensor], {"T": DataType(dtype), "out_type": DataType(SHAPE_DTYPE)})
        ends = [self.constant(SHAPE_DTYPE, (1,), [number]) for number in (axis, axis + 1, 1)]
        attrs: dict[str, AttrValue] = {
            "T": DataType(SHAPE_DTYPE), "Index": DataType(SHAPE_DTYPE), "shrink_axis_mask": 1, "begin_mask": 0,
            "end_mask": 0, "ellipsis_mask": 0, "new_axis_mask": 0,
        }  # fmt: skip
        return self.once("StridedSlice", [shape, *ends], attrs, "dimension")

    def slice(self, tensor: TensorId, dtype: str, begin: Sequence[Dim], size: Sequence[Dim]) -> TensorId:
        """A part of `tensor`; a size of -1 goes to the end."""
        ends = [self.shape(begin), self.shape(size)]
        return self.once("Slice", [tensor, *ends], {"T": DataType(dtype), "Index": DataType(SHAPE_DTYPE)})

    def transposed(self, tensor: TensorId, dtype: str, order: Sequence[int]) -> TensorId:
        """Dimension n of the result is dimension `order[n]` of `tensor`."""
        attrs: dict[str, AttrValue] = {"T": DataType(dtype), "Tperm": DataType(SHAPE_DTYPE)}
        return self.once("Transpose", [tensor, self.shape(order)], attrs)

    def reversed(self, tensor: TensorId, dtype: str) -> TensorId:
        """`tensor` with its first dimension from the end."""
        attrs: dict[str, AttrValue] = {"T": DataType(dtype), "Tidx": DataType(SHAPE_DTYPE)}
        return self.once("ReverseV2", [tensor, self.shape([0])], attrs)

    def joined(self, tensors: Sequence[TensorId], dtype: str, axis: int) -> TensorId:
        """The tensors one behind the other; one stays as it is."""
        if len(tensors) == 1:
            return tensors[0]
        attrs: dict[str, AttrValue] = {"N": len(tensors), "T": DataType(dtype), "Tidx": DataType(SHAPE_DTYPE)}
        return self.once("ConcatV2", [*tensors, self.scalar(axis)], attrs)

    def split(self, tensor: TensorId, dtype: str, sizes: Sequence[int], axis: int) -> tuple[TensorId, ...]:
        """Parts of the given sizes."""
        attrs: dict[str, AttrValue] = {"num_split": len(sizes), "T": DataType(dtype), "Tlen": DataType(SHAPE_DTYPE)}
        inputs = [tensor, self.shape(sizes), self.scalar(axis)]
        first = self.once("SplitV", inputs, attrs, outputs=len(sizes))
        return tuple(TensorId(first.node, index) for index in range(len(sizes)))

    def unpacked(self, tensor: TensorId, dtype: str, count: int) -> tuple[TensorId, ...]:
        """The items along the first dimension."""
        first = self.once("Unpack", [tensor], {"T": DataType(dtype), "num": count, "axis": 0}, outputs=count)
        return tuple(TensorId(first.node, index) for index in range(count))

    def packed(self, tensors: Sequence[TensorId], dtype: str) -> TensorId:
        """The tensors as items of one."""
        return self.once("Pack", tensors, {"T": DataType(dtype), "N": len(tensors), "axis": 0})

    def expanded(self, tensor: TensorId, dtype: str, axis: int) -> TensorId:
        """One more dimension, of size 1."""
        attrs: dict[str, AttrValue] = {"T": DataType(dtype), "Tdim": DataType(SHAPE_DTYPE)}
        return self.once("ExpandDims", [tensor, self.scalar(axis)], attrs)

    def broadcast(self, tensor: TensorId, dtype: str, dims: Sequence[Dim]) -> TensorId:
        """`tensor` repeated to the given shape."""
        attrs: dict[str, AttrValue] = {"T": DataType(dtype), "Tidx": DataType(SHAPE_DTYPE)}
        return self.once("BroadcastTo", [tensor, self.shape(dims)], attrs)

    def zeros(self, dtype: str, dims: Sequence[Dim], label: str = "") -> TensorId:
        """Zeros of the given shape."""
        attrs: dict[str, AttrValue] = {"T": DataType(dtype), "index_type": DataType(SHAPE_DTYPE)}
        return self.once("Fill", [self.shape(dims), self.constant(dtype, (), [0.0])], attrs, label)

    def counted(self, count: Dim, label: str = "") -> TensorId:
        """0, 1, 2 ... up to `count`, without that."""
        inputs = [self.scalar(0), self.scalar(count), self.scalar(1)]
        return self.once("Range", inputs, {"Tidx": DataType(SHAPE_DTYPE)}, label)

    def difference(self, first: TensorId, second: Dim) -> TensorId:
        """The first scalar less the second."""
        return self.once("Sub", [first, self.scalar(second)], {"T": DataType(SHAPE_DTYPE)})

    def matmul(
        self, left: TensorId, right: TensorId, dtype: str, transposed: bool = False, label: str = ""
    ) -> TensorId:
        """`left @ right`, or `left` times the transpose of `right`."""
        attrs: dict[str, AttrValue] = {"T": DataType(dtype), "transpose_a": False, "transpose_b": transposed}
        return self.emit("MatMul", [left, right], attrs, label)

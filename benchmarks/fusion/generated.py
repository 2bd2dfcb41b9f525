"""A graph as large as the largest of FusionStitching's (arXiv:1911.11576, Table 2): dialogue generation, 27,428 ops.

The paper's model is private, so this is one of its kind, a training step: an LSTM of two layers reads a sequence, one
with Bahdanau's attention writes another, both unrolled; gradients; Adam as Keras 3 writes it, in small ops. It is built
without TensorFlow, since only its plan is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from graph_passes.graph.ir import DataType, Graph, Node, TensorId, TensorSpec

OPS = 27_428  # of `aiwriter` in the paper
BATCH = 32
UNITS = 256
VOCABULARY = 2000
LAYERS = 2


def dialogue(ops: int = OPS) -> Graph:
    """The graph, with exactly so many ops (1,000 at least): sequences of equal lengths, as long as they fit, and a
    counter of what was trained on."""
    three, four = (len(_step(steps).nodes) for steps in (3, 4))
    made = _step(3 + (ops - three) // (four - three))  # each step has as many ops as the one before
    count = made.given("examples", (), "float32")
    while len(made.nodes) < ops:
        count = made.op("AddV2", [count, made.scalar(BATCH)] if len(made.nodes) + 1 < ops else [count, count], ())
    return made.graph()


class _Tape:
    """Writes ops, and remembers how they are differentiated."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._specs: dict[TensorId, TensorSpec] = {}
        self._constants: dict[str, np.ndarray] = {}
        self._scalars: dict[object, TensorId] = {}
        self._gradients: list[tuple[TensorId, Callable[[TensorId], list[tuple[TensorId, TensorId]]]]] = []

    def graph(self) -> Graph:
        return Graph(self.nodes, self._specs, self._constants)

    def shape(self, tensor: TensorId) -> tuple[int, ...]:
        return self._specs[tensor].sizes or ()

    def op(
        self,
        op: str,
        inputs: Sequence[TensorId],
        shape: tuple[int, ...],
        dtype: str = "float32",
        outputs: int = 1,
        control: Sequence[TensorId] = (),
        **attrs: bool | int | DataType,
    ) -> TensorId:
        name = f"{op}_{len(self.nodes)}"
        waits = [tensor.node for tensor in control]
        stateful = "Variable" in op
        self.nodes.append(Node(name, op, list(inputs), waits, "", dict(attrs), outputs, stateful))
        for index in range(outputs):
            self._specs[TensorId(name, index)] = TensorSpec(dtype, 8 if dtype == "int64" else 4, shape)
        return TensorId(name)

    def given(self, name: str, shape: tuple[int, ...], dtype: str) -> TensorId:
        self.nodes.append(Node(name, "Placeholder", outputs=1))
        self._specs[TensorId(name)] = TensorSpec(dtype, 4, shape)
        return TensorId(name)

    def constant(self, value: np.ndarray) -> TensorId:
        key = (value.tobytes(), value.shape, str(value.dtype))
        if key not in self._scalars:
            made = self._scalars[key] = self.op("Const", [], value.shape, str(value.dtype))
            self._constants[made.node] = value
        return self._scalars[key]

    def scalar(self, value: float) -> TensorId:
        return self.constant(np.float32(value).reshape(()))

    def integers(self, *values: int) -> TensorId:
        return self.constant(np.asarray(values, np.int32))

    def variable(self, name: str, *shape: int) -> TensorId:
        """Its handle."""
        self.nodes.append(Node(name, "Placeholder", outputs=1))
        self._specs[TensorId(name)] = TensorSpec("resource", 0, (), TensorSpec("float32", 4, shape))
        return TensorId(name)

    def read(self, handle: TensorId, control: Sequence[TensorId] = ()) -> TensorId:
        behind = self._specs[handle].behind
        assert behind is not None
        return self.op("ReadVariableOp", [handle], behind.sizes or (), control=control)

    def differentiable(
        self, result: TensorId, gradient: Callable[[TensorId], list[tuple[TensorId, TensorId]]]
    ) -> TensorId:
        self._gradients.append((result, gradient))
        return result

    def gradients(self, loss: TensorId, of: Sequence[TensorId]) -> list[TensorId]:
        found: dict[TensorId, list[TensorId]] = {loss: [self.scalar(1.0)]}
        for result, gradient in reversed(self._gradients):
            if result in found:
                for tensor, part in gradient(self._total(found[result])):
                    found.setdefault(tensor, []).append(part)
        return [self._total(found[tensor]) for tensor in of]

    def _total(self, parts: list[TensorId]) -> TensorId:
        return parts[0] if len(parts) == 1 else self.op("AddN", parts, self.shape(parts[0]))

    def matmul(self, x: TensorId, w: TensorId) -> TensorId:
        y = self._product(x, w)
        return self.differentiable(
            y, lambda dy: [(x, self._product(dy, w, tb=True)), (w, self._product(x, dy, ta=True))]
        )

    def _product(self, x: TensorId, w: TensorId, ta: bool = False, tb: bool = False) -> TensorId:
        rows, columns = self.shape(x)[1 if ta else 0], self.shape(w)[0 if tb else 1]
        return self.op("MatMul", [x, w], (rows, columns), transpose_a=ta, transpose_b=tb)

    def bias(self, x: TensorId, b: TensorId) -> TensorId:
        y = self.op("BiasAdd", [x, b], self.shape(x))
        return self.differentiable(y, lambda dy: [(x, dy), (b, self.op("BiasAddGrad", [dy], self.shape(b)))])

    def add(self, x: TensorId, y: TensorId) -> TensorId:
        z = self.op("AddV2", [x, y], self._common(x, y))
        return self.differentiable(z, lambda dz: [(x, self._summed(dz, x)), (y, self._summed(dz, y))])

    def multiply(self, x: TensorId, y: TensorId) -> TensorId:
        z = self.op("Mul", [x, y], self._common(x, y))

        def gradient(dz: TensorId) -> list[tuple[TensorId, TensorId]]:
            return [
                (one, self._summed(self.op("Mul", [dz, other], self.shape(z)), one)) for one, other in ((x, y), (y, x))
            ]

        return self.differentiable(z, gradient)

    def _common(self, x: TensorId, y: TensorId) -> tuple[int, ...]:
        return tuple(np.broadcast_shapes(self.shape(x), self.shape(y)))

    def _summed(self, tensor: TensorId, like: TensorId) -> TensorId:
        """Summed over the axes along which `like` was broadcast."""
        shape, wanted = self.shape(tensor), self.shape(like)
        padded = (1,) * (len(shape) - len(wanted)) + wanted
        axes = [axis for axis, size in enumerate(shape) if size != padded[axis]]
        if not axes:
            return tensor
        kept = self.op("Sum", [tensor, self.integers(*axes)], padded, keep_dims=True)
        return kept if padded == wanted else self.op("Reshape", [kept, self.integers(*wanted)], wanted)

    def activation(self, op: str, x: TensorId) -> TensorId:
        y = self.op(op, [x], self.shape(x))
        return self.differentiable(y, lambda dy: [(x, self.op(f"{op}Grad", [y, dy], self.shape(x)))])

    def reshape(self, x: TensorId, *shape: int) -> TensorId:
        old = self.shape(x)
        y = self.op("Reshape", [x, self.integers(*shape)], shape)
        return self.differentiable(y, lambda dy: [(x, self.op("Reshape", [dy, self.integers(*old)], old))])

    def sum(self, x: TensorId, axis: int) -> TensorId:
        shape = self.shape(x)
        kept = tuple(1 if place == axis else size for place, size in enumerate(shape))
        y = self.op("Sum", [x, self.integers(axis)], shape[:axis] + shape[axis + 1 :], keep_dims=False)

        def gradient(dy: TensorId) -> list[tuple[TensorId, TensorId]]:
            wide = self.op("Reshape", [dy, self.integers(*kept)], kept)
            return [(x, self.op("BroadcastTo", [wide, self.integers(*shape)], shape))]

        return self.differentiable(y, gradient)

    def softmax(self, x: TensorId) -> TensorId:
        shape = self.shape(x)
        y = self.op("Softmax", [x], shape)

        def gradient(dy: TensorId) -> list[tuple[TensorId, TensorId]]:
            weighted = self.op("Mul", [dy, y], shape)
            total = self.op("Sum", [weighted, self.integers(1)], (*shape[:1], 1), keep_dims=True)
            return [(x, self.op("Mul", [self.op("Sub", [dy, total], shape), y], shape))]

        return self.differentiable(y, gradient)

    def split(self, x: TensorId, parts: int) -> list[TensorId]:
        rows, columns = self.shape(x)
        y = self.op("Split", [self.integers(1), x], (rows, columns // parts), outputs=parts)
        results = [TensorId(y.node, index) for index in range(parts)]
        given: dict[TensorId, TensorId] = {}

        def part(result: TensorId) -> Callable[[TensorId], list[tuple[TensorId, TensorId]]]:
            def gradient(dy: TensorId) -> list[tuple[TensorId, TensorId]]:
                given[result] = dy
                if len(given) < parts:
                    return []
                inputs = [*(given[each] for each in results), self.integers(1)]
                return [(x, self.op("ConcatV2", inputs, (rows, columns)))]

            return gradient

        for result in results:
            self.differentiable(result, part(result))
        return results

    def concat(self, parts: Sequence[TensorId], axis: int) -> TensorId:
        sizes = [self.shape(part)[axis] for part in parts]
        shape = tuple(sum(sizes) if place == axis else size for place, size in enumerate(self.shape(parts[0])))
        y = self.op("ConcatV2", [*parts, self.integers(axis)], shape)

        def gradient(dy: TensorId) -> list[tuple[TensorId, TensorId]]:
            found, start = [], 0
            for part, size in zip(parts, sizes, strict=True):
                begin = [start if place == axis else 0 for place in range(len(shape))]
                bounds = [self.integers(*begin), self.integers(*self.shape(part))]
                found.append((part, self.op("Slice", [dy, *bounds], self.shape(part))))
                start += size
            return found

        return self.differentiable(y, gradient)

    def cross_entropy(self, logits: TensorId, labels: TensorId) -> TensorId:
        rows, classes = self.shape(logits)
        made = self.op("SparseSoftmaxCrossEntropyWithLogits", [logits, labels], (rows,), outputs=2)
        backprop = TensorId(made.node, 1)
        self._specs[backprop] = TensorSpec("float32", 4, (rows, classes))

        def gradient(dy: TensorId) -> list[tuple[TensorId, TensorId]]:
            wide = self.op("ExpandDims", [dy, self.integers(-1)], (rows, 1))
            return [(logits, self.op("Mul", [wide, backprop], (rows, classes)))]

        return self.differentiable(made, gradient)

    def adam(self, handle: TensorId, value: TensorId, gradient: TensorId, rate: TensorId) -> None:
        """An update by Adam, as `keras.optimizers.Adam.update_step` writes it."""
        shape = self.shape(value)
        moments = [self.variable(f"{handle.node}/{name}", *shape) for name in ("momentum", "velocity")]
        square = self.op("Square", [gradient], shape)
        new = []
        for moment, target, factor in zip(moments, (gradient, square), (0.1, 0.001), strict=True):
            old = self.read(moment)
            change = self.op("Mul", [self.op("Sub", [target, old], shape), self.scalar(factor)], shape)
            added = self.op("AssignAddVariableOp", [moment, change], (), outputs=0, control=[old])
            new.append(self.read(moment, [added]))
        above = self.op("Mul", [new[0], rate], shape)
        below = self.op("AddV2", [self.op("Sqrt", [new[1]], shape), self.scalar(1e-7)], shape)
        change = self.op("RealDiv", [above, below], shape)
        self.op("AssignSubVariableOp", [handle, change], (), outputs=0, control=[value])


def _step(steps: int) -> _Tape:
    tape = _Tape()
    handles: list[TensorId] = []
    values: list[TensorId] = []

    def weights(name: str, *shape: int) -> TensorId:
        handles.append(tape.variable(name, *shape))
        values.append(tape.read(handles[-1]))
        return values[-1]

    def cells(name: str, inputs: int) -> list[tuple[TensorId, TensorId]]:
        sizes = [inputs, *[UNITS] * (LAYERS - 1)]
        return [
            (weights(f"{name}{layer}/kernel", size + UNITS, 4 * UNITS), weights(f"{name}{layer}/bias", 4 * UNITS))
            for layer, size in enumerate(sizes)
        ]

    def stacked(x: TensorId, states: list[tuple[TensorId, TensorId]], layers: list[tuple[TensorId, TensorId]]):  # type: ignore[no-untyped-def]
        found = []
        for (old, h), (kernel, bias) in zip(states, layers, strict=True):
            gates = tape.bias(tape.matmul(tape.concat([x, h], 1), kernel), bias)
            i, j, f, o = tape.split(gates, 4)
            kept = tape.multiply(old, tape.activation("Sigmoid", tape.add(f, tape.scalar(1.0))))
            c = tape.add(kept, tape.multiply(tape.activation("Sigmoid", i), tape.activation("Tanh", j)))
            x = tape.multiply(tape.activation("Tanh", c), tape.activation("Sigmoid", o))
            found.append((c, x))
        return found

    reader, writer = cells("encoder", UNITS), cells("decoder", 2 * UNITS)
    of_memory, of_query = weights("memory", UNITS, UNITS), weights("query", UNITS, UNITS)
    direction, attended = weights("direction", UNITS), weights("attention", 2 * UNITS, UNITS)
    head = weights("head/kernel", UNITS, VOCABULARY), weights("head/bias", VOCABULARY)

    zeros = tape.constant(np.zeros((BATCH, UNITS), np.float32))
    states = [(zeros, zeros)] * LAYERS
    outputs = []
    for time in range(steps):
        states = stacked(tape.given(f"read{time}", (BATCH, UNITS), "float32"), states, reader)
        outputs.append(tape.reshape(states[-1][1], BATCH, 1, UNITS))
    memory = tape.concat(outputs, 1)
    keys = tape.reshape(tape.matmul(tape.reshape(memory, BATCH * steps, UNITS), of_memory), BATCH, steps, UNITS)
    attention = zeros
    losses = []
    for time in range(steps):
        token = tape.given(f"written{time}", (BATCH, UNITS), "float32")
        states = stacked(tape.concat([token, attention], 1), states, writer)
        output = states[-1][1]
        query = tape.reshape(tape.matmul(output, of_query), BATCH, 1, UNITS)
        scores = tape.sum(tape.multiply(tape.activation("Tanh", tape.add(keys, query)), direction), 2)
        share = tape.reshape(tape.softmax(scores), BATCH, steps, 1)
        context = tape.sum(tape.multiply(memory, share), 1)
        attention = tape.activation("Tanh", tape.matmul(tape.concat([output, context], 1), attended))
        logits = tape.bias(tape.matmul(attention, head[0]), head[1])
        loss = tape.cross_entropy(logits, tape.given(f"label{time}", (BATCH,), "int32"))
        losses.append(tape.reshape(loss, 1, BATCH))
    total = tape.sum(tape.sum(tape.concat(losses, 0), 1), 0)
    rate = tape.op("Mul", [tape.scalar(1e-3), tape.given("decay", (), "float32")], ())
    for handle, value, gradient in zip(handles, values, tape.gradients(total, values), strict=True):
        tape.adam(handle, value, gradient, rate)
    assert prod(tape.shape(total)) == 1
    return tape

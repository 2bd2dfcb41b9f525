"""A batch of graphs node by node in NumPy: what the op has to compute, without levels, blocks or scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from custom_ops.dynamic.differentiate import differentiate
from custom_ops.dynamic.node_code import Instruction, Kind, Parameter
from custom_ops.errors import DynamicError
from custom_ops.expr.table import FLOAT_OPS

Array = NDArray[Any]
Example = tuple[Sequence[int], Sequence[int], Sequence[int]]  # kinds, children, arguments
_BITS = (1 << 64) - 1


@dataclass
class Node:
    """A node of a batch.

    Attributes:
        kind: its number.
        children: positions in the batch.
        arguments: its integers.
        state: its vectors.
        adjoint: the gradient of the loss with respect to them.
        loss: of the node alone.
        outputs: what else it gives.
        values: of its code.
    """

    kind: int
    children: list[int]
    arguments: Sequence[int]
    state: list[Array]
    adjoint: list[Array]
    loss: float
    outputs: list[Array]
    values: list[Array]


class Run:
    """One batch.

    Attributes:
        nodes: all nodes, example by example.
        losses: of each example.
        gradients: of each parameter, once `backward` ran.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        kinds: Sequence[Kind],
        values: Sequence[Array],
        examples: Sequence[Example],
        seed: int = 0,
    ) -> None:
        """Runs forward, in the dtype of `values`.

        Raises:
            DynamicError: nodes of an example depend on each other.
        """
        self.kinds, self.parameters, self.seed = kinds, values, seed
        self.code = [differentiate(tuple(parameters), kind) for kind in kinds]
        self.gradients = [np.zeros_like(value) for value in values]
        self.nodes: list[Node] = []
        self.example_of: list[int] = []
        self.order: list[int] = []
        self.losses = np.zeros(len(examples), values[0].dtype if values else np.float32)
        for number, example in enumerate(examples):
            self._read(number, example)
        for place in self.order:
            self._forward(place)
            self.losses[self.example_of[place]] += self.nodes[place].loss

    def _read(self, number: int, example: Example) -> None:
        first = len(self.nodes)
        children, arguments = list(example[1]), list(example[2])
        for kind in example[0]:
            count, integers = len(self.kinds[kind].children), len(self.kinds[kind].arguments)
            own = [first + child for child in children[:count]]
            self.nodes.append(Node(kind, own, arguments[:integers], [], [], 0.0, [], []))
            self.example_of.append(number)
            del children[:count], arguments[:integers]
        waiting = list(range(first, len(self.nodes)))
        done: set[int] = set()
        while waiting:
            ready = [place for place in waiting if done.issuperset(self.nodes[place].children)]
            if not ready:
                raise DynamicError(
                    f"example {number}: node {waiting[0] - first} depends on itself, or on a node that does"
                )
            self.order += ready
            done.update(ready)
            waiting = [place for place in waiting if place not in done]

    def _forward(self, place: int) -> None:
        node = self.nodes[place]
        kind = self.kinds[node.kind]
        node.state = [np.zeros(width, self.losses.dtype) for width in kind.state]
        node.adjoint = [np.zeros(width, self.losses.dtype) for width in kind.state]
        node.outputs = [np.zeros(width, self.losses.dtype) for width in kind.outputs]
        for instruction in kind.code:
            self._do(place, instruction, 1.0)

    def backward(self, loss_gradients: Array | None = None) -> list[Array]:
        """The gradients of the sum of the losses, each times its weight."""
        for place in reversed(self.order):
            node = self.nodes[place]
            weight = 1.0 if loss_gradients is None else loss_gradients[self.example_of[place]]
            for instruction in self.code[node.kind][len(self.kinds[node.kind].code) :]:
                self._do(place, instruction, weight)
        return self.gradients

    def _do(self, place: int, instruction: Instruction, loss_gradient: float) -> None:
        node, numbers = self.nodes[place], instruction.numbers
        given = [node.values[value] for value in instruction.values]
        value = self._value(place, instruction, given, loss_gradient)
        if value is not None:
            value = np.broadcast_to(value, (instruction.width,)).astype(self.losses.dtype)
        node.values.append(np.zeros(0) if value is None else value)
        match instruction.op:
            case "put_state":
                node.state[numbers[0]] = given[0]
            case "put_loss":
                node.loss = given[0][0]
            case "put_output":
                node.outputs[numbers[0]] = given[0]
            case "put_child":
                adjoint = self.nodes[node.children[numbers[0]]].adjoint
                adjoint[numbers[1]] = adjoint[numbers[1]] + given[0]
            case "outer":
                a, b = given
                self.gradients[numbers[0]][numbers[1] : numbers[1] + len(a), numbers[2] : numbers[2] + len(b)] += (
                    np.outer(a, b)
                )
            case "column_sum":
                self.gradients[numbers[0]][numbers[1] : numbers[1] + len(given[0])] += given[0]
            case "put_lookup":
                row = self.gradients[numbers[0]][node.arguments[numbers[1]]]
                row[numbers[2] : numbers[2] + len(given[0])] += given[0]

    def _value(self, place: int, instruction: Instruction, given: list[Array], loss_gradient: float) -> Any:
        """The value of an instruction before it is broadcast to its width; None if the instruction has no value."""
        node, numbers, width = self.nodes[place], instruction.numbers, instruction.width
        match instruction.op:
            case "child":
                return self.nodes[node.children[numbers[0]]].state[numbers[1]]
            case "lookup":
                return self.parameters[numbers[0]][node.arguments[numbers[1]]][numbers[2] : numbers[2] + width]
            case "row":
                return self.parameters[numbers[0]][numbers[1] : numbers[1] + width]
            case "constant":
                return instruction.number
            case "one_hot":
                return np.arange(width) == node.arguments[numbers[0]]
            case "random":
                return self._random(place, numbers[0], width)
            case "product":
                parameter, row, column, transposed = numbers
                depth = len(given[0])
                rows, columns = (width, depth) if transposed else (depth, width)
                block = self.parameters[parameter][row : row + rows, column : column + columns]
                product = block @ given[0] if transposed else given[0] @ block
                return product + given[1] if len(given) > 1 else product
            case "broadcast":
                return given[0]
            case "concat":
                return np.concatenate(given)
            case "slice":
                return given[0][numbers[0] : numbers[0] + width]
            case "reduce_sum":
                return given[0].sum()
            case "reduce_max":
                return given[0].max()
            case "adjoint":
                return node.adjoint[numbers[0]]
            case "loss_adjoint":
                return loss_gradient
            case _:
                return FLOAT_OPS[instruction.op].numpy(*given) if width else None

    def _random(self, place: int, stream: int, width: int) -> list[float]:
        node = _mixed((self.seed ^ _mixed(stream)) + _mixed(place))
        return [(_mixed(node + i) >> 40) * 2.0**-24 for i in range(width)]


def update(
    rule: str, rates: Sequence[float], step: int, value: Array, slots: Sequence[Array], gradient: Array
) -> tuple[Array, tuple[Array, ...]]:
    """A parameter and its slots after a step, of which the first is 1: Keras's formulas.

    Args:
        rule: "sgd", "momentum" or "adam".
        rates: the learning rate; then momentum; or beta_1, beta_2 and epsilon.
        step: its number.
        value: the parameter.
        slots: nothing; its momentum; or its two moments.
        gradient: of the parameter.
    """
    if rule == "sgd":
        return value - rates[0] * gradient, ()
    if rule == "momentum":
        momentum = rates[1] * slots[0] - rates[0] * gradient
        return value + momentum, (momentum,)
    rate, beta_1, beta_2, epsilon = rates
    m = slots[0] + (gradient - slots[0]) * (1 - beta_1)
    v = slots[1] + (gradient * gradient - slots[1]) * (1 - beta_2)
    alpha = rate * np.sqrt(1 - beta_2**step) / (1 - beta_1**step)
    return value - alpha * m / (np.sqrt(v) + epsilon), (m, v)


def _mixed(bits: int) -> int:
    """A step of splitmix64."""
    bits = (bits + 0x9E3779B97F4A7C15) & _BITS
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _BITS
    return bits ^ (bits >> 31)

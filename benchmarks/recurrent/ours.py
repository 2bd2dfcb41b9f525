"""Our persistent kernels on PyTorch's tensors and stream, for the recurrent benchmark: choose, launch, differentiate.

What TensorFlow's graph does around the op is done by products here (`products.py`): one for the inputs of the whole
sequence before the sweep, and after the backward sweep one for each gradient of a matrix. Weights lie as Keras stores
them, `[inputs, gates * units]`; for products, that is another layout than PyTorch's, and not as fast or as slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.matmul.products import Product
from benchmarks.recurrent.cases import Case
from benchmarks.recurrent.kernels import cell_of, choose, gradient_of
from benchmarks.recurrent.peers import Layer, Problem, Run
from custom_ops.recurrent.cell import Cell
from custom_ops.recurrent.differentiate import Gradient
from custom_ops.recurrent.gpu_program import RecurrentProgram
from custom_ops.recurrent.launch import Launcher
from custom_ops.recurrent.reference import output_shapes

TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# of PyTorch's gates (reset, update, candidate) those of Keras (update, reset, candidate)
KERAS_ORDER = {"gru": (1, 0, 2)}

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Ours:
    """One case of ours.

    Attributes:
        run: enqueues a pass.
        as_torch: brings what `run` returns into the order and the layout of PyTorch's gradients.
        report: configurations, predicted and measured times, floors.
    """

    run: Run
    as_torch: Callable[[Tensors], Tensors]
    report: dict[str, Any]


class Sweep:
    """A program with its output tensors, on PyTorch's current stream."""

    def __init__(
        self, program: RecurrentProgram, cell: Cell, units: int, steps: int, batch: int, dtype: torch.dtype
    ) -> None:
        def empty(shape: Sequence[int]) -> torch.Tensor:
            return torch.empty(shape, device="cuda", dtype=dtype)

        self.launcher = Launcher(program)
        self.steps, self.batch = steps, batch
        self.outputs = [empty(shape) for shape in output_shapes(cell, units, steps, batch)]
        self.finals = [empty((batch, units)) for _ in cell.states]
        self.memory = torch.zeros(self.launcher.memory_bytes(batch), device="cuda", dtype=torch.uint8)
        self.prepared: dict[tuple[object, ...], Callable[[int], None]] = {}

    def __call__(self, inputs: Sequence[torch.Tensor], reverse: bool = False) -> None:
        """`inputs`: sequences, invariants, vectors, matrices, initial states.

        What the op does for a call in C++ Python does once for tensors at the same places.
        """
        places = tuple(tensor.data_ptr() for tensor in inputs)
        enqueue = self.prepared.get((places, reverse))
        if enqueue is None:
            pointers = [*places, *(tensor.data_ptr() for tensor in (*self.outputs, *self.finals))]
            enqueue = self.launcher.prepare(self.steps, self.batch, [pointers], self.memory.data_ptr(), (reverse,))
            self.prepared[places, reverse] = enqueue
        enqueue(torch.cuda.current_stream().cuda_stream)


def build(problem: Problem, precision: str, top: int) -> Ours:
    """Choose kernels for a case, or read the choice made before.

    Raises:
        KernelError: none runs.
    """
    case, cell = problem.case, cell_of(problem.case)
    dtype = TYPES.get(precision, torch.float32)
    gradient = gradient_of(case)
    programs, report = choose(case, precision, top)
    exact = precision == "highest"
    layers = [_Layer(case, weights, cell, programs, gradient, dtype, exact) for weights in problem.layers]
    inputs = problem.inputs.detach().to(dtype)

    def forward() -> Tensors:
        sequence = inputs
        for layer in layers:
            sequence = layer.forward(sequence)
        return (sequence,)

    def both() -> Tensors:
        outputs = forward()
        flowing, gradients = problem.gradient.to(dtype), []
        for layer in reversed(layers):
            flowing, *weights = layer.backward(flowing)
            gradients = [*weights, *gradients]
        return (*outputs, flowing, *gradients)

    return Ours(both if case.training else forward, lambda found: _as_torch(case, found), report)


class _Layer:
    """One layer: input product, sweep, and backwards."""

    def __init__(
        self,
        case: Case,
        weights: Layer,
        cell: Cell,
        programs: list[RecurrentProgram],
        gradient: Gradient | None,
        dtype: torch.dtype,
        exact: bool,
    ) -> None:
        units, rows = case.units, case.steps * case.batch
        order = [gate * units + unit for gate in KERAS_ORDER.get(case.layer, ()) for unit in range(units)]

        def arranged(tensor: torch.Tensor) -> torch.Tensor:
            return (tensor[order] if order else tensor).detach().to(dtype)

        self.shape = (case.steps, case.batch, units)
        self.input = arranged(weights.input).t().contiguous()
        self.recurrent = arranged(weights.recurrent).t().contiguous()
        separate = bool(cell.vectors)  # a recurrent bias that the cell adds itself
        self.bias = arranged(weights.input_bias) + (0 if separate else arranged(weights.recurrent_bias))
        self.vectors = [arranged(weights.recurrent_bias)] if separate else []
        columns = self.bias.shape[0]
        self.of_inputs = Product(rows, units, columns, dtype, exact)
        zeros = torch.zeros(case.batch, units, device="cuda", dtype=dtype)
        self.states = [zeros for _ in cell.states]
        self.gradient = gradient
        forward = gradient.forward if gradient else cell
        self.sweep = Sweep(programs[0], forward, units, case.steps, case.batch, dtype)
        if gradient:
            self.back = Sweep(programs[1], gradient.backward, units, case.steps, case.batch, dtype)
            self.back_states = [zeros for _ in gradient.backward.states]
            self.to_inputs = Product(rows, columns, units, dtype, exact)
            self.to_input = Product(units, rows, columns, dtype, exact)
            self.to_recurrent = [
                (each, Product(units, rows, each.blocks * units, dtype, exact))
                for each in sorted(gradient.weight_gradients, key=lambda each: each.column)
            ]

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        self.sequence = sequence.flatten(0, 1)
        self.gates = self.of_inputs(self.sequence, self.input, self.bias)
        self.sweep([self.gates, *self.vectors, self.recurrent, *self.states])
        return self.sweep.outputs[0]

    def backward(self, flowing: torch.Tensor) -> list[torch.Tensor]:
        """Gradients of the input, of both matrices, of both biases."""
        gradient = self.gradient
        assert gradient is not None
        sources = {"sequence": [self.gates], "output": self.sweep.outputs, "gradient": [flowing]}
        read = [sources[source.kind][source.tensor] for source in gradient.sequences]
        self.back([*read, *self.vectors, self.recurrent, *self.back_states], reverse=True)
        units = self.shape[2]
        outputs = [tensor.flatten(0, 1) for tensor in self.back.outputs]
        first, last = gradient.sequence_gradients[0][0], gradient.sequence_gradients[0][-1]
        assert first is not None
        assert last is not None
        gates = outputs[first.tensor][:, first.column * units : (last.column + 1) * units]
        parts: list[torch.Tensor] = []
        for each, product in self.to_recurrent:
            place = each.operand.column * units
            operand = self.sweep.outputs[each.operand.tensor].flatten(0, 1)[:, place : place + units]
            adjoint = outputs[each.adjoint.tensor][:, each.adjoint.column * units :][:, : each.blocks * units]
            parts.append(product(operand.t(), adjoint))
        recurrent = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        input_bias = gates.sum(0)
        if self.vectors:
            states = [self.back.finals[state] for state in gradient.vector_gradients[0] if state is not None]
            recurrent_bias = torch.cat([state.sum(0) for state in states])
        else:
            recurrent_bias = input_bias
        inputs = self.to_inputs(gates, self.input.t()).view(self.shape)
        return [inputs, self.to_input(self.sequence.t(), gates), recurrent, input_bias, recurrent_bias]


def _as_torch(case: Case, found: Tensors) -> Tensors:
    if not case.training:
        return found
    order = KERAS_ORDER.get(case.layer)

    def arranged(tensor: torch.Tensor) -> torch.Tensor:  # each pair of gates changes places, so back is as forth
        return torch.cat([tensor.chunk(len(order))[gate] for gate in order]) if order else tensor

    outputs, inputs, *rest = found
    back: list[torch.Tensor] = []
    for first in range(0, len(rest), 4):
        weight, recurrent, bias, recurrent_bias = rest[first : first + 4]
        back += [arranged(weight.t()), arranged(recurrent.t()), arranged(bias), arranged(recurrent_bias)]
    return (outputs, inputs, *back)

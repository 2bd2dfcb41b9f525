"""What the recurrent benchmark compares with, all in PyTorch: cuDNN in every setting, and loops over cells that cuDNN
does not have. Also the same layers in float64, which every timed result is held against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.recurrent.cases import BLOCKS, Case

Run = Callable[[], tuple[torch.Tensor, ...]]  # enqueues one pass; returns its outputs, the sequence first

WARM_UP = 3
LEAST, MOST = 10, 100  # timed repeats
SECONDS = 0.1  # for one measurement, between LEAST and MOST repeats


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, in PyTorch's layout; `canonical_gru` in the order update, reset, candidate."""

    input: torch.Tensor  # [blocks * units, input]
    recurrent: torch.Tensor  # [blocks * units, units]
    input_bias: torch.Tensor  # [blocks * units]
    recurrent_bias: torch.Tensor  # [blocks * units]; zero where the cell has one bias


@dataclass(frozen=True)
class Problem:
    """Weights and input of a case, fp32, on the GPU, drawn again from the seed.

    `gradient` is what flows into the outputs when the case trains.
    """

    case: Case
    layers: tuple[Layer, ...]
    inputs: torch.Tensor  # [steps, batch, units]
    gradient: torch.Tensor  # [steps, batch, units]

    @classmethod
    def draw(cls, case: Case, seed: int = 0) -> Problem:
        """Uniform weights as PyTorch initialises its layers; normal inputs."""
        generator = torch.Generator("cuda").manual_seed(seed)
        bound = case.units**-0.5
        rows = BLOCKS[case.layer] * case.units

        def uniform(*shape: int) -> torch.Tensor:
            return torch.empty(shape, device="cuda").uniform_(-bound, bound, generator=generator)

        layers = []
        for _ in range(case.layers):
            bias = uniform(rows) if case.layer != "canonical_gru" else torch.zeros(rows, device="cuda")
            layers.append(Layer(uniform(rows, case.units), uniform(rows, case.units), uniform(rows), bias))
        shape = (case.steps, case.batch, case.units)
        inputs = torch.randn(shape, device="cuda", generator=generator)
        return cls(case, tuple(layers), inputs, torch.randn(shape, device="cuda", generator=generator))


def median_milliseconds(run: Callable[[], object]) -> dict[str, float]:
    """Device time of one pass from an idle GPU, start to end, in milliseconds: the median and its neighbours."""
    for _ in range(WARM_UP):
        run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    found: list[float] = []
    deadline = time.monotonic() + SECONDS
    while len(found) < MOST and (len(found) < LEAST or time.monotonic() < deadline):
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    tenths = statistics.quantiles(found, n=10)
    return {"ms": statistics.median(found), "p10": tenths[0], "p90": tenths[-1], "repeats": len(found)}


def captured(run: Run) -> Callable[[], None]:
    """`run` as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()

    def replay(_kept: object = kept) -> None:  # the graph writes to these tensors
        graph.replay()

    return replay


@contextmanager
def settings(tf32: bool, cudnn: bool = True) -> Iterator[None]:
    """PyTorch's switches, put back afterwards."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.enabled
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.enabled = cudnn
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.enabled = before


def peers(case: Case) -> Mapping[str, tuple[Mapping[str, Any], Callable[[Problem], Run]]]:
    """The peers by name: their settings, and what makes the run. Each is timed plain and as a CUDA graph."""
    if case.layer == "canonical_gru":
        return {
            "loop": ({"tf32": False}, loop),
            "loop tf32": ({"tf32": True}, loop),
            "compiled loop tf32": ({"tf32": True}, compiled_loop),
        }
    found = {
        "cudnn": ({"tf32": False}, module),
        "cudnn tf32": ({"tf32": True}, module),
    }
    if case.plain_lstm:
        found["cudnn float16"] = ({"tf32": True}, lambda problem: module(problem, torch.float16))
        found["cudnn bfloat16"] = ({"tf32": True}, lambda problem: module(problem, torch.bfloat16))
    return found


def module(problem: Problem, dtype: torch.dtype = torch.float32) -> Run:
    """torch.nn.LSTM or GRU with the problem's weights."""
    case = problem.case
    kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[case.layer]
    layer = kind(case.units, case.units, case.layers).to(device="cuda", dtype=dtype)
    with torch.no_grad():
        for index, weights in enumerate(problem.layers):
            getattr(layer, f"weight_ih_l{index}").copy_(weights.input)
            getattr(layer, f"weight_hh_l{index}").copy_(weights.recurrent)
            getattr(layer, f"bias_ih_l{index}").copy_(weights.input_bias)
            getattr(layer, f"bias_hh_l{index}").copy_(weights.recurrent_bias)
    layer.train(case.training)  # cuDNN keeps what a gradient needs only when training
    layer.flatten_parameters()
    inputs = problem.inputs.to(dtype)
    if not case.training:

        def forward() -> tuple[torch.Tensor, ...]:
            with torch.inference_mode():
                return (layer(inputs)[0],)

        return forward
    return with_gradient(lambda given: layer(given)[0], list(layer.parameters()), problem, dtype)


def loop(problem: Problem, step: Callable[..., torch.Tensor] | None = None) -> Run:
    """The canonical GRU, one step at a time, its input product before the loop."""
    step = step or canonical_gru_step
    zeros = torch.zeros_like(problem.inputs[0])
    transposed = [weights.recurrent.t().contiguous() for weights in problem.layers]

    def forward() -> tuple[torch.Tensor, ...]:
        with torch.inference_mode():
            sequence = problem.inputs
            for weights, recurrent in zip(problem.layers, transposed, strict=True):
                gates = torch.nn.functional.linear(sequence, weights.input, weights.input_bias)
                state, outputs = zeros, []
                for gate in gates:
                    state = step(gate, state, recurrent)
                    outputs.append(state)
                sequence = torch.stack(outputs)
            return (sequence,)

    return forward


def compiled_loop(problem: Problem) -> Run:
    """`loop` with its step compiled by Inductor, for any size."""
    return loop(problem, torch.compile(canonical_gru_step, dynamic=True))


def canonical_gru_step(gates: torch.Tensor, state: torch.Tensor, recurrent: torch.Tensor) -> torch.Tensor:
    """Reset before the product (`reset_after=False`): gates [batch, 3 * units], recurrent [units, 3 * units]."""
    units = state.shape[1]
    both = torch.sigmoid(gates[:, : 2 * units] + state @ recurrent[:, : 2 * units])
    update, reset = both[:, :units], both[:, units:]
    candidate = torch.tanh(gates[:, 2 * units :] + (reset * state) @ recurrent[:, 2 * units :])
    return candidate + update * (state - candidate)


def reference(problem: Problem) -> tuple[torch.Tensor, ...]:
    """The outputs in float64; when training, then the gradients of the input and of each layer's weights."""
    wide = Problem(
        problem.case,
        tuple(
            Layer(*(getattr(layer, name).double() for name in Layer.__dataclass_fields__)) for layer in problem.layers
        ),
        problem.inputs.double(),
        problem.gradient.double(),
    )
    with settings(tf32=False, cudnn=False):
        run = loop(wide) if problem.case.layer == "canonical_gru" else module(wide, torch.float64)
        return tuple(tensor.clone() for tensor in run())


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over the norm; infinite where `found` is not a number."""
    error = float(torch.linalg.vector_norm(found.double() - expected) / torch.linalg.vector_norm(expected))
    return error if error == error else float("inf")


def with_gradient(
    forward: Callable[[torch.Tensor], torch.Tensor],
    parameters: list[torch.Tensor],
    problem: Problem,
    dtype: torch.dtype,
) -> Run:
    """A training step: the outputs, then the gradients of the input and of the parameters."""
    inputs = problem.inputs.to(dtype).requires_grad_()
    gradient = problem.gradient.to(dtype)

    def both() -> tuple[torch.Tensor, ...]:
        outputs = forward(inputs)
        return (outputs.detach(), *torch.autograd.grad(outputs, [inputs, *parameters], gradient))

    return both

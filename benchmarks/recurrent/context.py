"""FlashRNN's and Haste's LSTM, for context, beside ours and cuDNN's, for the recurrent benchmark's results.

    git clone https://github.com/NX-AI/flashrnn
    git clone https://github.com/lmnt-com/haste
    python -m benchmarks.recurrent.context --flashrnn flashrnn --haste haste --output results.json

Their sources are copied aside and patched (benchmarks.recurrent.sources), and built by PyTorch with the nvcc that is
there. The shapes are those of FlashRNN's own figure, head_dim--lstm.svg (batch 16, 1024 steps, 768 units in heads of
768 or of 64), and those of the grid. Heads are a recurrent matrix that is zero but for its diagonal blocks, which is
what ours and cuDNN are given. The product with the inputs is in all times, though not in that figure's. FlashRNN's
fused kernel computes float32 by TF32, so there it is called that; it is searched for, and compiled, anew for each
shape and type. Each system of theirs has a process of its own; all are built at once, then timed one by one."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import load, save
from benchmarks.recurrent.__main__ import KINDS, PEER_BOUND, View, of_ours, of_peers, raised, timed
from benchmarks.recurrent.cases import TOP
from benchmarks.recurrent.kernels import prepare
from benchmarks.recurrent.peers import Layer, Problem, Run, reference, settings, with_gradient
from benchmarks.recurrent.sources import SYSTEMS, Shape, all_shapes, build_variables, haste_sources, prepared
from benchmarks.runs import asked, command_line

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}  # the others store float32
BACKENDS = {"fused": "cuda_fused", "alternating": "cuda"}
BUILD_SECONDS, RUN_SECONDS = 300, 60  # for one system

Outcomes = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Build, run, add to the results. Returns 1 if something of theirs or of ours did not run or was wrong."""
    parser = command_line("recurrent.context", __doc__, "recurrent.json")
    parser.add_argument("--flashrnn", type=Path, help="a clone of FlashRNN")
    parser.add_argument("--haste", type=Path, help="a clone of Haste")
    parser.add_argument("--systems", nargs="+", default=[], metavar="PREFIX", help="of theirs, by start of name")
    options, shapes = asked(parser, arguments, all_shapes())
    if not shapes:
        return 0
    sources = {name: vars(options)[name] for name in ("flashrnn", "haste") if vars(options)[name]}
    prefixes = tuple(options.systems or sources)
    wanted = [name for name in SYSTEMS if name.split()[0] in sources and name.startswith(prefixes)]
    results = load(options.output) or load(options.resume)
    if results is None:
        parser.error(f"{options.output} does not exist; run benchmarks.recurrent first")
    if not wanted:
        parser.error("nothing to run; --flashrnn or --haste says where their sources are")
    known = results.setdefault("context", {})
    waiting = [shape for shape in shapes if options.again or shape.name not in known]
    deadline = time.monotonic() + options.total_seconds
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        places = {library: prepared(library, source, folder) for library, source in sources.items()}
        mapped = Path("/proc/self/maps").read_text().splitlines()  # PyTorch's libraries are among them
        os.environ |= build_variables(folder, [line.split()[-1] for line in mapped])
        tasks = [(shape.case, precision) for shape in waiting for precision in shape.precisions]
        print(f"ours compiled in {prepare(tasks, TOP):.0f} s", flush=True)
        for shape in waiting:
            if time.monotonic() > deadline:
                print(f"{shape.name}: not begun, --total-seconds are over", flush=True)
                continue
            found = theirs(shape, wanted, places) | beside(shape)
            before = known.get(shape.name, {}).get("systems", {})
            known[shape.name] = {**asdict(shape.case), "heads": shape.heads, "systems": before | found}
            save(results, options.output)
            print(*(f"{shape.name}: {system}: {line(outcome)}" for system, outcome in found.items()), sep="\n")
            failed += any(outcome["status"] != "ok" for outcome in found.values())
    return 1 if failed else 0


def line(outcome: Mapping[str, Any]) -> str:
    """One outcome in words."""
    return f"{outcome['ms']:.4f} ms, off by {outcome['error']:.1g}" if outcome["status"] == "ok" else outcome["message"]


def drawn(shape: Shape) -> Problem:
    """The case's problem, its recurrent weights zero between heads."""
    problem = Problem.draw(shape.case)
    size = shape.case.units // shape.heads
    blocks = torch.block_diag(*[torch.ones(size, size, device="cuda")] * shape.heads).repeat(4, 1)
    layers = tuple(replace(layer, recurrent=layer.recurrent * blocks) for layer in problem.layers)
    return replace(problem, layers=layers)


def theirs(shape: Shape, systems: list[str], places: Mapping[str, Path]) -> Outcomes:
    """Build all, then time one after the other, so that no compiler runs meanwhile."""
    context = multiprocessing.get_context("spawn")
    found: Outcomes = {}
    waiting = {}
    for system in systems:
        here, there = context.Pipe()
        process = context.Process(target=work, args=(there, shape, system, places[system.split()[0]]), daemon=True)
        process.start()
        there.close()  # so that the process's end is seen at this one
        waiting[system] = process, here
    deadline = time.monotonic() + BUILD_SECONDS
    for system, (process, connection) in waiting.items():
        if failure := answer(system, connection, deadline - time.monotonic()):
            found |= failure
            process.kill()
    for system, (process, connection) in waiting.items():
        if f"{system}, plain" not in found:
            connection.send("time")
            found |= answer(system, connection, RUN_SECONDS)
            process.kill()
        process.join()
    return found


def answer(system: str, connection: Connection, seconds: float) -> Outcomes:
    """What a process says within some time; a failure if it says nothing."""
    try:
        if connection.poll(max(seconds, 0)):
            return dict(connection.recv())
        message = "no answer in time"
    except EOFError:
        message = "its process ended"
    return {f"{system}, plain": {"status": "error", "message": message}}


def work(connection: Connection, shape: Shape, system: str, place: Path) -> None:
    """One system in its process: build it and say so, then time it when told."""
    library, *backend, kind = system.split()
    with settings(tf32=kind == "tf32"):
        try:
            problem = drawn(shape)
            expected = reference(problem)
            dtype = TYPES.get(kind, torch.float32)
            made = haste(problem, place) if library == "haste" else flashrnn(shape, problem, *backend, dtype, place)
            made[0]()
            torch.cuda.synchronize()
        except Exception as error:
            connection.send({f"{system}, plain": raised(error)})
            return
        connection.send({})
        connection.recv()
        # the others synchronise with the host, or use streams that a capture does not see
        kinds = KINDS if "fused" in backend else KINDS[:1]
        connection.send(timed(system, lambda _: made, problem, expected, PEER_BOUND, kinds))


def flashrnn(shape: Shape, problem: Problem, backend: str, dtype: torch.dtype, place: Path) -> tuple[Run, View]:
    """FlashRNN's function; its gates are in PyTorch's order."""
    sys.path.insert(0, str(place))
    function = importlib.import_module("flashrnn").flashrnn
    case, heads = shape.case, shape.heads
    size = case.units // heads
    weights = [
        getattr(problem.layers[0], name).to(dtype).requires_grad_(case.training) for name in Layer.__dataclass_fields__
    ]
    name, kind = BACKENDS[backend], str(dtype).removeprefix("torch.")

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        matrix, recurrent, input_bias, bias = weights
        gates = torch.nn.functional.linear(inputs, matrix, input_bias)
        gates = gates.view(case.steps, case.batch, 4, heads, size).transpose(0, 1)
        blocks = recurrent.view(4, heads, size, heads, size).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
        bias = bias.view(4, heads, size)
        states, _ = function(gates, blocks, bias, function="lstm", backend=name, dtype=kind)
        return states[0].flatten(2).transpose(0, 1)  # of [batch, steps, heads, size]

    return runner(forward, weights, problem, dtype), tuple


def haste(problem: Problem, place: Path) -> tuple[Run, View]:
    """Haste's layer, which is float32's; its gates are input, candidate, forget, output, its matrices transposed."""
    from torch.utils import cpp_extension

    sys.path.insert(0, str(place))
    name = "haste_pytorch_lib"  # what its package imports
    sys.modules[name] = cpp_extension.load(
        name,
        haste_sources(place),
        extra_cflags=["-O3"],
        # it uses operators of half, which PyTorch turns off
        extra_cuda_cflags=["-O3", "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__"],
        extra_include_paths=[str(place / "lib")],
        extra_ldflags=["-lcublas"],
    )
    units = problem.case.units
    layer = importlib.import_module("haste_pytorch").LSTM(units, units).cuda().train(problem.case.training)
    weights = problem.layers[0]
    layer.from_native_weights(weights.input, weights.recurrent, weights.input_bias, weights.recurrent_bias)
    parameters = [layer.kernel, layer.recurrent_kernel, layer.bias]

    def as_torch(found: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if not problem.case.training:
            return found
        outputs, inputs, *rest = found
        kernel, recurrent, bias = (
            torch.cat([tensor.chunk(4, -1)[gate] for gate in (0, 2, 1, 3)], -1) for tensor in rest
        )
        return outputs, inputs, kernel.t(), recurrent.t(), bias, bias

    return runner(lambda inputs: layer(inputs)[0], parameters, problem, torch.float32), as_torch


def runner(forward: Any, parameters: list[torch.Tensor], problem: Problem, dtype: torch.dtype) -> Run:
    """A pass, with gradients if the case trains."""
    if problem.case.training:
        return with_gradient(forward, parameters, problem, dtype)
    inputs = problem.inputs.to(dtype)

    def alone() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return (forward(inputs),)

    return alone


def beside(shape: Shape) -> Outcomes:
    """cuDNN and ours at the same shape, in the types that the results are compared in."""
    problem = drawn(shape)
    expected = reference(problem)
    return of_peers(problem, expected) | of_ours(problem, expected, shape.precisions, TOP)[0]


if __name__ == "__main__":
    sys.exit(main())

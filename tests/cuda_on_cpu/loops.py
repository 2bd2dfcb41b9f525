"""The simplest port of `emit_cuda`: one CTA computes a program with a loop for each reduction and each output.

It is no fast kernel. It shows that what is emitted is right for every access, dtype and reduction.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from custom_ops.expr.cuda import C_TYPES, HALF_TYPES, emit_cuda, literal
from custom_ops.expr.nodes import Constant, Index, Input, Position, Reduce, arguments_of, live_nodes
from custom_ops.expr.program import Program
from custom_ops.expr.reference import numpy_dtype
from custom_ops.jit.device import DeviceContext
from custom_ops.jit.launch import checked

THREADS = 64
STEPS = {
    "sum": "{0} + {1}",
    "dot": "{0} + {1}",
    "mean": "{0} + {1}",
    "product": "{0} * {1}",
    "max": "maximum({0}, {1})",
}
STEPS |= {"min": "minimum({0}, {1})", "any": "{0} || {1}", "all": "{0} && {1}"}


class _Kernel:
    """The parameter's words: tensors, outputs, a buffer for each reduction, the sizes of axes and of dimensions."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.dtypes = [type_.dtype for type_ in program.types]
        nodes = enumerate(program.nodes)
        self.reductions = [place for place, node in nodes if program.live[place] and isinstance(node, Reduce)]
        self.buffers = len(program.tensors) + len(program.outputs)
        self.sizes = self.buffers + len(self.reductions)
        self.dimensions = self.sizes + len(program.axes)
        self.words = self.dimensions + sum(tensor.rank for tensor in program.tensors)

    def source(self) -> str:
        lines = ['#include "math.cuh"', "using namespace tfmem;"]
        lines.append(f'extern "C" __global__ void program(const __grid_constant__ Parameters<{self.words}> p) {{')
        lines += [f"const long long n{axis} = p.word[{self.sizes + axis}];" for axis in range(len(self.program.axes))]
        for number, place in enumerate(self.reductions):
            node = self.program.nodes[place]
            assert isinstance(node, Reduce)
            axes = self.program.types[place].axes
            lines += self._over(axes, [*self._reduced(place, node), self._store(self.buffers + number, place)])
        for number, output in enumerate(self.program.outputs):
            lines += self._over(output.axes, self._computed(output.node, len(self.program.tensors) + number))
        return "\n".join([*lines, "}"]) + "\n"

    def _over(self, axes: Sequence[int], body: Iterable[str]) -> list[str]:
        """The threads share all positions along these axes."""
        count = " * ".join(f"n{axis}" for axis in axes) or "1"
        lines = [f"for (long long i = threadIdx.x; i < {count}; i += {THREADS}) {{", "long long left = i;"]
        lines += [f"const long long a{axis} = left % n{axis}; left /= n{axis};" for axis in reversed(axes)]
        return [*lines, *body, "}", "__syncthreads();"]

    def _reduced(self, place: int, node: Reduce) -> list[str]:
        """The value of a reduction, which is accumulated in float for half types and rounded at the end."""
        dtype = self.dtypes[place]
        wide = "float32" if dtype in HALF_TYPES else dtype
        lines = [f"{C_TYPES[wide]} total = {_start(node.kind, wide)};"]
        lines += [f"for (long long a{axis} = 0; a{axis} < n{axis}; ++a{axis}) {{" for axis in node.axes]
        lines += [*self._values(node.operand), f"total = {STEPS[node.kind].format('total', self._name(node.operand))};"]
        lines += ["}" for _ in node.axes]
        if node.kind == "mean":
            lines.append(f"total = total / ({' * '.join(f'n{axis}' for axis in node.axes)});")
        result = f"rounded<{HALF_TYPES[dtype]}>(total)" if dtype in HALF_TYPES else "total"
        return [*lines, f"const {C_TYPES[dtype]} value_{place} = {result};"]

    def _computed(self, place: int, word: int) -> list[str]:
        pointer, dtype = f"p.word[{word}]", self.dtypes[place]
        if dtype in HALF_TYPES:
            store = f"from_float({self._name(place)}, reinterpret_cast<{HALF_TYPES[dtype]}*>({pointer}) + i);"
        else:
            store = f"reinterpret_cast<{C_TYPES[dtype]}*>({pointer})[i] = {self._name(place)};"
        return [*self._values(place), store]

    def _store(self, word: int, place: int) -> str:
        return f"reinterpret_cast<{C_TYPES[self.dtypes[place]]}*>(p.word[{word}])[i] = value_{place};"

    def _values(self, place: int) -> list[str]:
        """Declares the value of a node at a position, and all values that it needs."""
        nodes = self.program.nodes

        def arguments(here: int) -> Iterable[int]:
            return () if isinstance(nodes[here], Reduce) else arguments_of(nodes[here])

        live = live_nodes(len(nodes), [place], arguments)
        places = [i for i, node in enumerate(nodes) if live[i] and not isinstance(node, Reduce | Constant)]
        return emit_cuda(nodes, self.dtypes, dict.fromkeys(places), self._read)

    def _read(self, place: int) -> str:
        match node := self.program.nodes[place]:
            case Constant(dtype=dtype, value=value):
                return literal(value, dtype)
            case Position(dtype=dtype, axis=axis):
                return f"static_cast<{C_TYPES[dtype]}>(a{axis})"
            case Reduce():
                type_ = self.program.types[place]
                at = _linear([(f"a{axis}", f"n{axis}") for axis in type_.axes])
                word = self.buffers + self.reductions.index(place)
                return f"reinterpret_cast<const {C_TYPES[type_.dtype]}*>(p.word[{word}])[{at}]"
            case Input():
                return self._element(node)
        raise AssertionError(node)

    def _name(self, place: int) -> str:
        """A value that was declared, or needs no declaration."""
        return self._read(place) if isinstance(self.program.nodes[place], Reduce | Constant) else f"value_{place}"

    def _element(self, node: Input) -> str:
        dtype = self.program.tensors[node.tensor].dtype
        before = sum(tensor.rank for tensor in self.program.tensors[: node.tensor])
        sizes = [f"static_cast<long long>(p.word[{self.dimensions + before + i}])" for i in range(len(node.index))]
        at = _linear([(_index(index), size) for index, size in zip(node.index, sizes, strict=True)])
        element = f"reinterpret_cast<const {HALF_TYPES.get(dtype, C_TYPES[dtype])}*>(p.word[{node.tensor}])[{at}]"
        return f"to_float({element})" if dtype in HALF_TYPES else element


def _index(index: Index) -> str:
    terms = [f"{index.offset}ll", *(f"value_{place}" for place in index.nodes)]
    for term in index.terms:
        moved = f"(a{term.axis} / {term.divisor})"
        terms.append(f"{term.factor} * ({moved} % {term.modulus})" if term.modulus else f"{term.factor} * {moved}")
    return " + ".join(terms)


def _linear(indices: Sequence[tuple[str, str]]) -> str:
    """Row by row."""
    at = "0"
    for index, size in indices:
        at = f"(({at}) * {size} + {index})"
    return at


def _start(kind: str, dtype: str) -> str:
    if kind in ("max", "min"):
        if dtype.startswith("int"):
            limits = np.iinfo(dtype)
            return literal(int(limits.min if kind == "max" else limits.max), dtype)
        return literal(-np.inf if kind == "max" else np.inf, dtype)
    if kind in ("any", "all"):
        return literal(kind == "all", "bool")
    return literal(1 if kind == "product" else 0, dtype)


def source(program: Program) -> str:
    """The kernel."""
    return _Kernel(program).source()


def run(device: DeviceContext, program: Program, tensors: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """The outputs, as `custom_ops.expr.reference.run` gives them."""
    kernel = _Kernel(program)
    sizes = program.sizes([tensor.shape for tensor in tensors])
    outputs = [
        np.empty([sizes[axis] for axis in output.axes], numpy_dtype(program.types[output.node].dtype))
        for output in program.outputs
    ]
    largest = 8 * int(np.prod(np.maximum(sizes, 1)))
    places = [device.upload(tensor.view(np.uint8) if tensor.dtype == bool else tensor) for tensor in tensors]
    results = [device.allocate(output.nbytes) for output in outputs]
    buffers = [device.allocate(largest) for _ in kernel.reductions]
    words = [*places, *results, *buffers, *sizes, *(size for tensor in tensors for size in tensor.shape)]
    parameter = (ctypes.c_uint64 * max(len(words), 1))(*words)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(parameter))
    driver = device.driver
    image = device.compile_source(kernel.source(), device.arch)
    module = checked(driver, driver.cuModuleLoadData(image), "load a program")
    function = checked(driver, driver.cuModuleGetFunction(module, b"program"), "find it")
    config = driver.CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.blockDimX, config.sharedMemBytes, config.hStream = THREADS, 0, device.stream
    config.attrs, config.numAttrs = [], 0
    checked(driver, driver.cuLaunchKernelEx(config, function, ctypes.addressof(parameters), 0), "launch it")
    return [device.download(place, output) for place, output in zip(results, outputs, strict=True)]

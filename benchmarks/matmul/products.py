"""Float32 products as tfmem's graphs have them, on PyTorch's tensors and stream: on tensor cores where that takes less
time, by cuBLAS elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.matmul.multiplier import Multiplier, Shape
from benchmarks.recurrent.kernels import FOLDER
from custom_ops.jit.cache import Cache
from custom_ops.matmul import kernels
from graph_passes.analysis.cost.device_costs import product_sizes
from graph_passes.passes.products.plan import worth_it

SIZES = product_sizes("h200")  # those of the thresholds in docs/benchmarks_matmul.md


class Product:
    """One product of a layer, `[rows, depth]` by `[depth, columns]`, and where its result lies."""

    def __init__(self, rows: int, depth: int, columns: int, dtype: torch.dtype, exact: bool) -> None:
        """`exact`: whether nothing is to be rounded to TF32."""
        self.result = torch.empty(rows, columns, device="cuda", dtype=dtype)
        self._on_tensor_cores = exact and dtype == torch.float32 and worth_it(rows, depth, columns, SIZES)
        self._prepared: dict[tuple[object, ...], Callable[[int], None]] = {}
        if self._on_tensor_cores:
            self._shape = Shape(rows, depth, columns)
            self._tiling = multiplier().tiling(self._shape)
            size = self._tiling.memory_bytes(self._shape)
            self._memory = torch.empty(size, device="cuda", dtype=torch.uint8)

    def __call__(self, left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Enqueues it; operands may be transposed views. Python prepares a launch once for tensors at the same places,
        as the op does it for each call in C++."""
        if not self._on_tensor_cores:
            if bias is None:
                return torch.mm(left, right, out=self.result)
            return torch.addmm(bias, left, right, out=self.result)
        operands = [_lying(tensor) for tensor in (left, right)]
        places = (*(tensor.data_ptr() for tensor, _ in operands), 0 if bias is None else bias.data_ptr())
        flags = tuple(transposed for _, transposed in operands)
        enqueue = self._prepared.get((places, flags))
        if enqueue is None:
            shape = replace(self._shape, transpose_left=flags[0], transpose_right=flags[1])
            results = self.result.data_ptr(), self._memory.data_ptr()
            enqueue = multiplier().prepare(shape, self._tiling, *places, *results)
            self._prepared[places, flags] = enqueue
        enqueue(torch.cuda.current_stream().cuda_stream)
        return self.result


def _lying(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The tensor, or a copy of it without gaps, and whether it lies transposed."""
    if tensor.stride(1) == 1:
        return tensor.contiguous(), False
    return tensor.t().contiguous().t(), True


@functools.cache
def multiplier() -> Multiplier:
    """The multiplier for PyTorch's device."""
    about = torch.cuda.get_device_properties()
    return Multiplier(kernels.build(10 * about.major + about.minor, Cache(FOLDER)), about.multi_processor_count)

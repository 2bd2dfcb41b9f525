"""Random tensors for a kernel, on the device and on the host, and whether what the kernel made of them is right."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from custom_ops.errors import KernelError
from custom_ops.jit.device import DeviceContext
from custom_ops.recurrent import reference
from custom_ops.recurrent.spec import RecurrentSpec

Array = NDArray[Any]

# Largest distance from float64, over the norm of the truth, after a few steps.
DTYPE_BOUNDS = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 3e-2}
PRECISION_BOUNDS = {"highest": 0.0, "tf32": 5e-3, "float16": 5e-3, "bfloat16": 3e-2}


class Samples:
    """The tensors of one launch.

    Attributes:
        pointers: for each direction its tensors' addresses, ordered as in the kernel's parameter.
    """

    def __init__(self, spec: RecurrentSpec, device: DeviceContext, batch: int, time: int) -> None:
        self._spec, self._device = spec, device
        # in the order of the kernel's parameter
        self._shapes = reference.input_shapes(spec.cell, spec.units, time, batch)
        results = reference.output_shapes(spec.cell, spec.units, time, batch) + self._shapes[-1]
        self._truth: list[Array] | None = None
        self.pointers: list[list[int]] = []
        self._results: list[tuple[int, tuple[int, ...]]] = []
        try:
            for direction in range(spec.directions):
                self._place(direction, results)
        except KernelError:
            self.free()
            raise

    def _place(self, direction: int, results: list[tuple[int, ...]]) -> None:
        """Allocate the tensors of a direction; what there is of them by then is in `pointers`, whatever fails."""
        itemsize = 4 if self._spec.dtype == "float32" else 2
        places: list[int] = []
        self.pointers.append(places)
        places.extend(self._device.upload(array) for arrays in self._inputs(direction) for array in arrays)
        for shape in results:
            places.append(self._device.allocate(itemsize * int(np.prod(shape))))
            self._results.append((places[-1], shape))

    def free(self) -> None:
        """Give the device's memory back."""
        for places in self.pointers:
            while places:
                self._device.free(places.pop())

    def poison(self) -> None:
        """Fill the results with NaN, so that what a kernel does not write is seen."""
        for place, shape in self._results:
            self._device.fill(place, self._empty(shape).nbytes, 0xFF)

    def require_right(self) -> None:
        """Compare the results with the definition, in float64.

        Raises:
            KernelError: one of them is further from it than the dtype and the precision explain.
        """
        if self._truth is None:
            self._truth = [array for direction in range(self._spec.directions) for array in self._wanted(direction)]
        bound = max(DTYPE_BOUNDS[self._spec.dtype], PRECISION_BOUNDS[self._spec.precision])
        for (place, shape), wanted in zip(self._results, self._truth, strict=True):
            found = _loaded(self._device.download(place, self._empty(shape)), self._spec.dtype)
            error = np.linalg.norm(found - wanted) / max(float(np.linalg.norm(wanted)), 1e-30)
            if wanted.size and not error < bound:
                raise KernelError(f"its results are wrong: a relative error of {error:.2g}, expected under {bound:.0e}")

    def _empty(self, shape: tuple[int, ...]) -> Array:
        return np.empty(shape, np.float32 if self._spec.dtype == "float32" else np.uint16)

    def _inputs(self, direction: int) -> list[list[Array]]:
        """Inputs as they are stored, as large as in trained layers, so that states neither vanish nor overflow."""
        generator = np.random.default_rng(direction)
        scale = np.float32(self._spec.units**-0.5)

        def random(shape: tuple[int, ...]) -> Array:
            return _stored((2 * generator.random(shape, np.float32) - 1) * scale, self._spec.dtype)

        return [[random(shape) for shape in shapes] for shapes in self._shapes]

    def _wanted(self, direction: int) -> list[Array]:
        spec = self._spec
        sequences, invariants, vectors, matrices, states = (
            [_loaded(array, spec.dtype) for array in arrays] for arrays in self._inputs(direction)
        )
        outputs, finals = reference.run(spec.cell, spec.units, sequences, invariants, vectors, matrices, states)
        return [*outputs, *finals]


def _stored(values: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    return values


def _loaded(array: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    elif dtype == "float16":
        array = array.view(np.float16)
    return array.astype(np.float64)

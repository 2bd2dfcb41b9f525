"""Products of matrices by cuBLASLt, without a framework: what a generated product is timed against. The op's own calls
are in custom_ops/ops/cuda/gpu_product.cc."""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

from custom_ops.errors import KernelError
from custom_ops.jit.device import DeviceContext
from custom_ops.jit.launch import Enqueue

TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
SIZES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
WORKSPACE = 32 << 20  # as TensorFlow lets it have, on Hopper
ALIGNMENT = 16  # bytes, what a region asks for

_NAMES = ("libcublasLt.so.13", "libcublasLt.so.12")
_FOLDERS = ("nvidia/cublas/lib", "nvidia/cu13/lib")
_FLOAT32, _FLOAT64, _TF32 = 68, 70, 77  # what is computed with
_TRANSPOSE_A, _TRANSPOSE_B = 3, 4
_BATCH_COUNT, _BATCH_OFFSET = 5, 6
_MOST_WORKSPACE = 1
_ALIGNMENTS = (5, 6, 7, 8)  # of the three matrices and the result


@dataclass(frozen=True)
class MatrixProduct:
    """`[batch, rows, depth]` times `[batch, depth, columns]`, in row-major order.

    Attributes:
        dtype: of both factors and the result.
        left_transposed, right_transposed: whether the two dimensions of the factor lie the other way round.
        left_batch, right_batch: whether there is a factor for each of the batch; else one for all of it.
        tf32: whether float32 may be multiplied as TensorFloat-32.
    """

    rows: int
    columns: int
    depth: int
    batch: int = 1
    dtype: str = "float32"
    left_transposed: bool = False
    right_transposed: bool = False
    left_batch: bool = True
    right_batch: bool = True
    tf32: bool = True


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class CublasLt:
    """The library with a handle for the context that is current."""

    def __init__(self, device: DeviceContext, library: ctypes.CDLL | None = None) -> None:
        """
        Args:
            device: whose context is current.
            library: cuBLASLt; None: the one that TensorFlow's GPU packages bring, or the system's.

        Raises:
            KernelError: there is no library, or it does not start.
        """
        self._library, self._device = library or _open(), device
        self._handle = ctypes.c_void_p()
        self._call("cublasLtCreate", ctypes.byref(self._handle))
        self._workspace = device.allocate(WORKSPACE)

    def close(self) -> None:
        """Give back what the handle holds."""
        self._device.free(self._workspace)
        self._call("cublasLtDestroy", self._handle)

    def __enter__(self) -> CublasLt:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @contextmanager
    def prepared(
        self, form: MatrixProduct, left: int, right: int, result: int, most: int = 1
    ) -> Iterator[list[Enqueue]]:
        """The product of matrices at these addresses, by each of the `most` algorithms that the library ranks best.

        Raises:
            KernelError: it has none.
        """
        descriptor, layouts, preference = ctypes.c_void_p(), [ctypes.c_void_p() for _ in range(3)], ctypes.c_void_p()
        wide = form.dtype == "float64"
        compute = _FLOAT64 if wide else _TF32 if form.dtype == "float32" and form.tf32 else _FLOAT32
        scale = TYPES["float64" if wide else "float32"]
        self._call("cublasLtMatmulDescCreate", ctypes.byref(descriptor), compute, scale)
        # Its matrices are in column-major order, so it computes the transpose of the result: the right factor first.
        self._set("cublasLtMatmulDescSetAttribute", descriptor, _TRANSPOSE_A, ctypes.c_int32(form.right_transposed))
        self._set("cublasLtMatmulDescSetAttribute", descriptor, _TRANSPOSE_B, ctypes.c_int32(form.left_transposed))
        right_shape, left_shape = (form.columns, form.depth), (form.depth, form.rows)
        shapes = (
            (right_shape[::-1] if form.right_transposed else right_shape, form.right_batch),
            (left_shape[::-1] if form.left_transposed else left_shape, form.left_batch),
            ((form.columns, form.rows), True),
        )
        for layout, (shape, batched) in zip(layouts, shapes, strict=True):
            self._call(
                "cublasLtMatrixLayoutCreate",
                ctypes.byref(layout),
                TYPES[form.dtype],
                *map(ctypes.c_uint64, shape),
                ctypes.c_int64(shape[0]),
            )
            if form.batch > 1:
                self._set("cublasLtMatrixLayoutSetAttribute", layout, _BATCH_COUNT, ctypes.c_int32(form.batch))
                offset = ctypes.c_int64(prod(shape) if batched else 0)
                self._set("cublasLtMatrixLayoutSetAttribute", layout, _BATCH_OFFSET, offset)
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        self._set("cublasLtMatmulPreferenceSetAttribute", preference, _MOST_WORKSPACE, ctypes.c_uint64(WORKSPACE))
        for name in _ALIGNMENTS:
            self._set("cublasLtMatmulPreferenceSetAttribute", preference, name, ctypes.c_uint32(ALIGNMENT))
        found, count = (_Heuristic * most)(), ctypes.c_int()
        b, a, c = layouts
        try:
            self._call(
                "cublasLtMatmulAlgoGetHeuristic",
                *(self._handle, descriptor, b, a, c, c, preference, most, found, ctypes.byref(count)),
            )
            algorithms = [each for each in found[: count.value] if each.state == 0]
            if not algorithms:
                raise KernelError(f"cuBLASLt has no algorithm for {form}")
            yield [self._launch(wide, descriptor, (right, b), (left, a), (result, c), each) for each in algorithms]
        finally:
            self._device.driver.cuStreamSynchronize(self._device.stream)
            self._library.cublasLtMatmulPreferenceDestroy(preference)
            for layout in layouts:
                self._library.cublasLtMatrixLayoutDestroy(layout)
            self._library.cublasLtMatmulDescDestroy(descriptor)

    def _launch(
        self,
        wide: bool,
        descriptor: ctypes.c_void_p,
        first: tuple[int, ctypes.c_void_p],
        second: tuple[int, ctypes.c_void_p],
        result: tuple[int, ctypes.c_void_p],
        found: _Heuristic,
    ) -> Enqueue:
        number = ctypes.c_double if wide else ctypes.c_float
        one, zero = number(1), number(0)
        to = ctypes.c_void_p(result[0])

        def launch(stream: int) -> None:
            self._call(
                "cublasLtMatmul",
                *(self._handle, descriptor, ctypes.byref(one)),
                *(ctypes.c_void_p(first[0]), first[1], ctypes.c_void_p(second[0]), second[1], ctypes.byref(zero)),
                *(to, result[1], to, result[1], ctypes.byref(found), ctypes.c_void_p(self._workspace)),
                *(ctypes.c_size_t(found.workspace), ctypes.c_void_p(stream)),
            )

        return launch

    def _set(self, function: str, owner: ctypes.c_void_p, name: int, value: Any) -> None:
        self._call(function, owner, name, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise KernelError(f"{name} failed: cuBLAS status {status}")


def _open() -> ctypes.CDLL:
    """The library that TensorFlow's GPU packages bring, or that of the system."""
    packages = Path(sysconfig.get_paths()["purelib"])
    places = [str(packages / folder / name) for folder in _FOLDERS for name in _NAMES]
    for place in (*places, *_NAMES):
        try:
            return ctypes.CDLL(place)
        except OSError as error:
            words = str(error)
    raise KernelError(f"cannot open cuBLASLt ({words}); install it with `pip install tensorflow[and-cuda]`")

"""Runs programs over tensors on the CPU, by their tile programs: what the tests of them share."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from custom_ops.errors import OpLibraryError
from custom_ops.load import load
from tests.tf.native_programs import object_file, shared_library

Array = NDArray[Any]
_ERROR_BYTES = 4096


@functools.cache
def _functions() -> ctypes.CDLL:
    """The functions of tile_programs.cc, which call those of the op library that is loaded."""
    source = object_file(Path(__file__).with_suffix(".cc"))
    functions = ctypes.CDLL(str(shared_library("tile_programs", [source], load().path)))
    functions.tfmem_prepare_program.restype = ctypes.c_void_p
    functions.tfmem_show_program.restype = ctypes.c_int64
    functions.tfmem_program_may_share.restype = ctypes.c_bool
    return functions


def prepare(text: str, axes: Sequence[int], shapes: Sequence[Sequence[int]]) -> PreparedProgram:
    """Makes a program over tensors (`expr.program`) ready to run on the CPU.

    Args:
        text: the program.
        axes: the sizes of its axes.
        shapes: those of its tensors.

    Raises:
        OpLibraryError: the program is wrong, sizes do not fit it, or an index is out of bounds.
    """
    functions = _functions()
    code, error = text.encode(), ctypes.create_string_buffer(_ERROR_BYTES)
    handle = functions.tfmem_prepare_program(
        *(code, ctypes.c_int64(len(code)), _int64s(axes), ctypes.c_int64(len(axes))),
        *(_int64s([len(shape) for shape in shapes]), _int64s([size for shape in shapes for size in shape])),
        *(ctypes.c_int64(len(shapes)), error, ctypes.c_int64(_ERROR_BYTES)),
    )
    if handle is None:
        raise OpLibraryError(error.value.decode(errors="replace"))
    return PreparedProgram(functions, handle)


class PreparedProgram:
    """A program over tensors that is ready to run, any number of times."""

    def __init__(self, functions: ctypes.CDLL, handle: int) -> None:
        self._functions = functions
        self._handle = ctypes.c_void_p(handle)

    def __del__(self) -> None:
        self._functions.tfmem_free_program(self._handle)

    @property
    def text(self) -> str:
        """The tile program: what the interpreter does for each tile, an instruction a line."""
        capacity = 0
        while True:
            shown = ctypes.create_string_buffer(capacity)
            count = self._functions.tfmem_show_program(self._handle, shown, ctypes.c_int64(capacity))
            if count <= capacity:
                return shown.raw[:count].decode()
            capacity = count

    def may_share(self, read: int, output: int) -> bool:
        """Whether an output may have the memory of an input."""
        return bool(self._functions.tfmem_program_may_share(self._handle, ctypes.c_int(read), ctypes.c_int(output)))

    def run(
        self,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        threads: int = 1,
        times: int = 1,
    ) -> None:
        """Runs it over arrays, all contiguous and of the sizes for which it was prepared.

        Args:
            inputs: the program's tensors.
            outputs: filled with its outputs.
            threads: how many may run it, the one that calls among them.
            times: how often, one run after the other, for measuring.

        Raises:
            OpLibraryError: an array is not contiguous or not of the right size, an index that is a value is out of
                bounds, or there is no memory.
        """
        arrays = [*inputs, *outputs]
        if not all(array.flags.c_contiguous for array in arrays):
            raise OpLibraryError("an array is not contiguous; expected contiguous ones (numpy.ascontiguousarray)")
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        failed = self._functions.tfmem_run_program(
            *(
                self._handle,
                _addresses(inputs),
                _int64s([array.nbytes for array in inputs]),
                ctypes.c_int64(len(inputs)),
            ),
            *(_addresses(outputs), _int64s([array.nbytes for array in outputs]), ctypes.c_int64(len(outputs))),
            *(ctypes.c_int(threads), ctypes.c_int64(times), error, ctypes.c_int64(_ERROR_BYTES)),
        )
        if failed:
            raise OpLibraryError(error.value.decode(errors="replace"))


def _int64s(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def _addresses(arrays: Sequence[Array]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))


def run(text: str, axes: Sequence[int], inputs: Sequence[Array], *outputs: tuple[str, Sequence[int]]) -> list[Array]:
    """The program's outputs; of each its dtype and shape are given. One thread finds the same as three."""
    read = [np.asarray(i, order="C") for i in inputs]
    prepared = prepare(text, axes, [array.shape for array in read])
    results = []
    for threads in (1, 3):
        arrays = [np.empty(shape, tf.as_dtype(dtype).as_numpy_dtype) for dtype, shape in outputs]
        for array in arrays:
            array.view(np.uint8).fill(0xA5) if array.ndim and array.size else None  # shows what is not written
        prepared.run(read, arrays, threads)
        results.append(arrays)
    for one, three in zip(*results, strict=True):
        assert one.tobytes() == three.tobytes()
    return results[0]

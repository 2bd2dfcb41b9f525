"""The GPU kernel of a net, if this process has a GPU to run it on."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

import tensorflow as tf

from custom_ops.background import has_ended
from custom_ops.dynamic.choice import ROWS, Choice
from custom_ops.dynamic.codegen.gpu_program import DynamicProgram, build
from custom_ops.dynamic.codegen.on_chip import Chip
from custom_ops.dynamic.spec import Spec
from custom_ops.errors import KernelError, TfmemWarning, warn
from custom_ops.jit import nvrtc
from custom_ops.jit.cache import Cache, UnusableError, digest
from custom_ops.jit.device import DeviceContext
from graph_passes.analysis.cost.device_costs import l2_bytes
from tfmem.api import load_ops
from tfmem.devices import find_target
from tfmem.kernels.recurrent import kernel_folder
from tfmem.options import Options

OLDEST = 80  # compute capability 8.0


class Programs:
    """Kernels by what they compute; each is compiled once, or taken from the cache."""

    def __init__(self, options: Options, dtype: tf.DType = tf.float32) -> None:
        """Programs for the device, and with the cache, that `options` name, and for numbers of type `dtype`."""
        self._options = options
        self._target = find_target(options.device, load_ops())
        self._has_kernels = self._target.is_gpu and dtype != tf.float64
        if self._target.is_gpu and not self._has_kernels:
            warn(
                "GPU kernels of dynamic nets compute in float32, so this net of float64 runs on the CPU; "
                "make its parameters float32 to use the GPU"
            )
        self._made: dict[str, DynamicProgram | None] = {}
        self._chosen: set[str] = set()
        self._others: dict[str, Future[list[DynamicProgram]]] = {}
        self._choices: dict[str, Choice] = {}

    @property
    def on_gpu(self) -> bool:
        """Whether nets run on a GPU."""
        return self._has_kernels

    @tf.autograph.experimental.do_not_convert
    def of(self, spec: Spec) -> DynamicProgram | None:
        """The program for the GPU; None without a GPU, and, with a `TfmemWarning`, if no kernel can be made."""
        if not self._has_kernels or not spec.kinds:
            return None
        if spec.text not in self._made:
            try:
                self._made[spec.text] = self._first(spec)
            except KernelError as error:
                warnings.warn(
                    f"no GPU kernel can be made, so the net runs on the CPU: {error}. Kernels need the extra 'gpu' "
                    "(cuda-bindings, NVRTC)",
                    TfmemWarning,
                    stacklevel=4,
                )
                self._made[spec.text] = None
        return self._made[spec.text]

    def choice(self, spec: Spec) -> Choice | None:
        """Kernels that take turns while a net trains.

        None while the others are compiled in the background, and after the fastest is known.
        """
        key, first = spec.text, self.of(spec)
        if first is None or key in self._chosen:
            return None
        if key not in self._others:
            executor = ThreadPoolExecutor(1)
            self._others[key] = executor.submit(self._alternatives, spec, first)
            executor.shutdown(wait=False)
        if key not in self._choices:
            if not self._others[key].done():
                return None
            try:
                self._choices[key] = Choice([first, *self._others[key].result()])
            except KernelError:  # the first one runs
                self._chosen.add(key)
                return None
        choice = self._choices[key]
        if not choice.done:
            return choice
        self._made[key] = choice.program
        self._chosen.add(key)
        self._keep(spec, choice.program)
        return None

    def is_choosing(self, spec: Spec) -> bool:
        """Whether the fastest kernel is not yet known."""
        return self.of(spec) is not None and spec.text not in self._chosen

    def place(self, program: DynamicProgram | None) -> AbstractContextManager[object]:
        """The device scope of an op with this program: the CPU without a GPU kernel, otherwise the options' device."""
        if program is None and (self._target.is_gpu or self._options.device):
            return tf.device("/CPU:0")
        return tf.device(self._target.name) if self._options.device else contextlib.nullcontext()

    # ---- making ----

    def _first(self, spec: Spec) -> DynamicProgram:
        """The program with the number of rows that was the fastest before, or with 1."""
        with self._device() as device, kernel_folder(self._options.cache_directory) as folder:
            rows = Cache(folder).find(_key(spec, device), _rows)
            if rows is not None:
                self._chosen.add(spec.text)
            chip = Chip(processors=device.processors, l2_bytes=l2_bytes(self._target.profile.name))
            return build(spec, device.arch, chip, rows or ROWS[0], Cache(folder))

    def _alternatives(self, spec: Spec, first: DynamicProgram) -> list[DynamicProgram]:
        """Programs with other numbers of rows that keep as much on the chip."""
        with kernel_folder(self._options.cache_directory) as folder:
            made = [
                build(spec, first.image.arch, first.plan.chip, rows, Cache(folder))
                for rows in ROWS[1:]
                if not has_ended()  # or its end waits for them
            ]
        return [program for program in made if program.plan.resident_bytes >= first.plan.resident_bytes]

    def _keep(self, spec: Spec, program: DynamicProgram) -> None:
        with self._device() as device, kernel_folder(self._options.cache_directory) as folder:
            Cache(folder).keep(_key(spec, device), str(program.rows).encode())

    @contextlib.contextmanager
    def _device(self) -> Iterator[DeviceContext]:
        with DeviceContext(self._target.ordinal) as device:
            if device.arch < OLDEST:
                raise KernelError(
                    f"{device.name} has compute capability {device.arch / 10}; kernels of dynamic nets need "
                    f"{OLDEST / 10}"
                )
            yield device


def _key(spec: Spec, device: DeviceContext) -> str:
    """The cache key of the number of rows that is the fastest."""
    return digest("rows of a warp 1", spec.text, device.name, nvrtc.compiler_version(), *nvrtc.header_texts())


def _rows(data: bytes) -> int:
    if data.decode(errors="replace") not in map(str, ROWS):
        raise UnusableError(data)
    return int(data)

"""The GPU kernel of a net, if this process has a GPU to run it on."""

from __future__ import annotations

import contextlib
import warnings
from contextlib import AbstractContextManager

import tensorflow as tf

from custom_ops.dynamic.codegen.plan import Chip
from custom_ops.dynamic.codegen.program import DynamicProgram, build
from custom_ops.dynamic.spec import Spec
from custom_ops.errors import KernelError, TfmemWarning
from custom_ops.jit.cache import Cache
from custom_ops.jit.device import Device
from tfmem.api import load_ops
from tfmem.devices import find_target
from tfmem.options import Options
from tfmem.recurrent.kernels import kernel_folder

OLDEST = 80  # compute capability 8.0


class Programs:
    """Kernels by what they compute; each is compiled once, or taken from the cache."""

    def __init__(self) -> None:
        self._target = find_target("", load_ops())
        self._made: dict[str, DynamicProgram | None] = {}

    def of(self, spec: Spec) -> DynamicProgram | None:
        """For the GPU; None without one, and with a `TfmemWarning` where no kernel can be made."""
        if not self._target.is_gpu or not spec.kinds:
            return None
        if spec.text not in self._made:
            try:
                self._made[spec.text] = self._build(spec)
            except KernelError as error:
                warnings.warn(f"the net runs on the CPU, without a GPU kernel: {error}", TfmemWarning, stacklevel=4)
                self._made[spec.text] = None
        return self._made[spec.text]

    def _build(self, spec: Spec) -> DynamicProgram:
        with Device(self._target.ordinal) as device, kernel_folder(Options().cache_directory) as folder:
            if device.arch < OLDEST:
                raise KernelError(
                    f"{device.name} has compute capability {device.arch / 10}; kernels of dynamic nets need "
                    f"{OLDEST / 10}"
                )
            return build(spec, device.arch, Chip(processors=device.processors), cache=Cache(folder))

    def place(self, program: DynamicProgram | None) -> AbstractContextManager[object]:
        """Where an op with this program is placed: on the CPU, if there is a GPU and no kernel for it."""
        if program is None and self._target.is_gpu:
            return tf.device("/CPU:0")
        return contextlib.nullcontext()

"""Launches recurrent kernels by the rules that the op follows too (ops/recurrent/recurrent_kernel.h)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from custom_ops.errors import KernelError
from custom_ops.jit.launch import Enqueue, LoadedKernel, Module
from custom_ops.recurrent.gpu_program import RecurrentProgram

MOST_GROUPS = 65535  # CTAs of a launch along its second dimension
TURN = 6  # the word of the kernel's parameter that says which stage of which step
STATUS_BYTES = 256  # in front of the scratch: the status word, and up to where the scratch is aligned


class Launcher:
    """One program, loaded into the current CUDA context.

    Attributes:
        module: the code of `program`.
        resident: CTAs that the device runs at once.
        registers, local: see `LoadedKernel`.
    """

    def __init__(self, program: RecurrentProgram, driver: Any = None) -> None:
        """Load `program`, with the CUDA driver unless another is given.

        Raises:
            KernelError: there is no driver, the device cannot load the program, or not one group of it fits.
        """
        self.program = program
        self.module = Module(program.image.code, driver)
        try:
            self._kernel = LoadedKernel(program.image, self.module)
            self._fallback = None
            if program.fallback:
                plain = replace(program.image, entry=program.fallback, shared=0, cluster=1, cooperative=False)
                self._fallback = LoadedKernel(plain, self.module)
        except KernelError:
            self.close()
            raise
        self.resident = self._kernel.resident
        self.registers, self.local = self._kernel.registers, self._kernel.local
        if program.image.cooperative and self.resident < program.ctas:
            self.close()
            raise KernelError(f"a group of {program.ctas} CTAs does not fit this device: it runs {self.resident}")

    def close(self) -> None:
        """See `Module.close`."""
        self.module.close()

    def groups(self, batch: int, directions: int = 1) -> int:
        return -(-batch // self.program.rows) * directions

    def memory_bytes(self, batch: int, directions: int = 1) -> int:
        """Bytes of the status word and the scratch behind it."""
        return STATUS_BYTES + self.groups(batch, directions) * self.program.scratch

    def __call__(
        self,
        time: int,
        batch: int,
        pointers: Sequence[Sequence[int]],
        memory: int,
        stream: int = 0,
        reverse: Sequence[bool] = (),
        batch_major: bool = False,
    ) -> None:
        """Enqueue one sweep on `stream`: `prepare(...)(stream)`."""
        self.prepare(time, batch, pointers, memory, reverse, batch_major)(stream)

    def prepare(
        self,
        time: int,
        batch: int,
        pointers: Sequence[Sequence[int]],
        memory: int,
        reverse: Sequence[bool] = (),
        batch_major: bool = False,
    ) -> Enqueue:
        """One sweep, to be enqueued on a CUDA stream as often as its tensors are there, with little for Python to do.

        Args:
            time, batch: of the tensors; a batch of 0 launches nothing.
            pointers: for each direction device pointers, in the order of the kernel's parameter (program.py). That of
                an initial state may be 0, for zeros.
            memory: device memory of `memory_bytes`, which each call zeroes where a kernel needs it. An int32 stands at
                its beginning, 0 before the first call, that is not 0 afterwards if the fallback had to run.
            reverse: for each direction whether it walks time backwards.
            batch_major: whether sequences, in and out, are `[batch, time, ...]` and not `[time, batch, ...]`.

        Returns:
            What takes the stream and enqueues. It raises KernelError if a launch fails.
        """
        program, module = self.program, self.module
        groups = self.groups(batch, len(pointers))
        zeroed = STATUS_BYTES + groups * program.scratch if groups and (program.fallback or program.scratch) else 0
        once = self.resident // program.ctas if program.image.cooperative else MOST_GROUPS
        words = self._words(time, batch, pointers, memory, reverse, batch_major)
        launches = []
        for turn in self._turns(time):
            words[TURN] = turn
            for first in range(0, groups, once):
                words[1] = first | groups << 32
                launches.append(self._kernel.prepare((program.ctas, min(once, groups - first)), words))
        if self._fallback is not None and groups:
            words[1] = groups << 32
            launches.append(self._fallback.prepare((1, groups), words))

        def enqueue(stream: int) -> None:
            if zeroed:
                module.call(module.driver.cuMemsetD8Async(memory, 0, zeroed, stream), "zero the scratch")
            for launch in launches:
                launch(stream)

        return enqueue

    def _words(
        self,
        time: int,
        batch: int,
        pointers: Sequence[Sequence[int]],
        memory: int,
        reverse: Sequence[bool],
        batch_major: bool,
    ) -> list[int]:
        groups = self.groups(batch, len(pointers))
        flags = sum(flag << place for place, flag in enumerate(reverse))
        lines = 1 | time << 32 if batch_major else batch | 1 << 32
        head = [time | batch << 32, groups << 32, memory + STATUS_BYTES, memory, flags, lines, 0]
        return [*head, *(pointer for direction in pointers for pointer in direction)]

    def _turns(self, time: int) -> list[int]:
        """Word `TURN` of each launch of all groups: one for all steps, or a stage each; without steps the last stage,
        which puts out the final states."""
        stages = self.program.stages
        if not stages or not time:
            return [max(stages - 1, 0) << 32]
        return [step | stage << 32 for step in range(time) for stage in range(stages)]

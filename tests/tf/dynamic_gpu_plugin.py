"""For pytest: handles of `tfmem.dynamic` run on the fake GPU of this process (see `fake_gpu`)."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import pytest

from custom_ops.dynamic.choice import Choice
from custom_ops.dynamic.codegen.gpu_program import DynamicProgram, build
from custom_ops.dynamic.codegen.on_chip import Chip
from custom_ops.dynamic.spec import Spec
from tests.tf.fake_gpu import ARCH, FakeGpu, fixture_gpu, fixture_no_kernel_fails  # noqa: F401
from tfmem.dynamic import handle

CHIP = Chip(processors=3)


class FakePrograms:
    """In the place of `tfmem.dynamic.gpu.Programs`."""

    on_gpu = True

    def __init__(self, gpu: FakeGpu, made: dict[str, DynamicProgram], choice: Choice | None = None) -> None:
        self._gpu, self._made, self._choice = gpu, made, choice

    def of(self, spec: Spec) -> DynamicProgram:
        if spec.text not in self._made:
            self._made[spec.text] = build(spec, ARCH, CHIP, compile_source=self._gpu.compile_source)
        return self._made[spec.text]

    def choice(self, spec: Spec) -> Choice | None:
        return self._choice

    def place(self, program: DynamicProgram | None) -> AbstractContextManager[object]:
        return contextlib.nullcontext()


@pytest.fixture(autouse=True)
def fixture_on_fake_gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, DynamicProgram] = {}
    monkeypatch.setattr(handle, "Programs", lambda options, dtype: FakePrograms(gpu, made))

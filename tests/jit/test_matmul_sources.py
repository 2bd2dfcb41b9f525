"""The kernels of TfmemMatMul compile for all that they are for, and need no more than there is; without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from custom_ops.errors import KernelError
from custom_ops.jit import nvrtc
from custom_ops.jit.cache import Cache
from custom_ops.matmul import kernels
from tests.compiled import cubin

SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}  # of a block


def requires_compiler() -> None:
    try:
        nvrtc.compiler_version()
    except KernelError as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("arch", sorted(SHARED))
def test_they_compile_and_fit(arch: int) -> None:
    requires_compiler()
    for program in kernels.build(arch, compile_source=cubin):
        assert program.arch == arch
        assert program.shared <= SHARED[arch]


def test_a_cache_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requires_compiler()
    made = kernels.build(90, Cache(tmp_path))
    monkeypatch.setattr(nvrtc, "compile_source", lambda *_: pytest.fail("compiled again"))
    assert kernels.build(90, Cache(tmp_path)) == made

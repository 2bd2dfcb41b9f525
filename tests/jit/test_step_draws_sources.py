"""The kernels of TfmemStepDraws compile for all that they are for; without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from custom_ops.jit import nvrtc
from custom_ops.jit.cache import Cache
from custom_ops.random import draw_kernels
from tests.compiled import cubin
from tests.jit.test_matmul_sources import requires_compiler

FLOATS, INTEGERS = ("float32", "float64", "float16", "bfloat16"), ("int32", "int64")
DRAWS = [
    *((f"StatelessRandom{kind}", dtype) for kind in ("Uniform", "NormalV2") for dtype in FLOATS),
    *((f"StatelessRandomUniform{kind}", dtype) for kind in ("IntV2", "FullInt") for dtype in INTEGERS),
]


@pytest.mark.parametrize("arch", [75, 90, 120])
def test_they_compile(arch: int) -> None:
    requires_compiler()
    for op, dtype in DRAWS:
        assert draw_kernels.build(op, dtype, arch, compile_source=cubin).arch == arch


def test_a_cache_keeps_them_but_for_ptx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requires_compiler()
    made = draw_kernels.build(*DRAWS[0], 90, cache=Cache(tmp_path))
    monkeypatch.setattr(nvrtc, "compile_source", lambda *_: pytest.fail("compiled again"))
    assert draw_kernels.build(*DRAWS[0], 90, cache=Cache(tmp_path)) == made
    assert b".entry step_draws" in draw_kernels.build(*DRAWS[0], 90, "ptx", Cache(tmp_path)).code


@pytest.mark.parametrize(
    ("op", "dtype"), [("StatelessTruncatedNormalV2", "float32"), ("StatelessRandomUniformFullIntV2", "uint64")]
)
def test_what_no_kernel_draws(op: str, dtype: str) -> None:
    assert not draw_kernels.distribution(op, dtype)

"""How a product is divided among CTAs: the op and custom_ops/jit/matmul.py decide alike."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from custom_ops import build_flags
from custom_ops.jit.matmul import Shape, best_tiling

HERE = Path(__file__).parent


@pytest.fixture(name="library", scope="module")
def fixture_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which(build_flags.compiler()) is None:
        pytest.skip("needs a C++ compiler")
    target = tmp_path_factory.mktemp("library") / "tilings.so"
    sources = [HERE / "matmul_tilings.cc", build_flags.PACKAGE / "ops" / "matmul_tiling.cc"]
    flags = ["-shared", "-fPIC", "-O1", "-std=c++17", f"-I{build_flags.PACKAGE.parent}"]
    subprocess.run([build_flags.compiler(), *flags, *map(str, sources), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


@given(
    rows=st.integers(1, 30_000),
    depth=st.integers(0, 30_000),
    columns=st.integers(1, 30_000),
    processors=st.integers(1, 200),
)
@example(rows=100, depth=4096, columns=1024, processors=132)
@example(rows=256, depth=6400, columns=1024, processors=132)
@example(rows=6400, depth=1024, columns=4096, processors=132)
def test_the_op_decides_as_python_does(
    library: ctypes.CDLL, rows: int, depth: int, columns: int, processors: int
) -> None:
    found = (ctypes.c_int64 * 4)()
    library.best_tiling(*map(ctypes.c_int64, (rows, depth, columns, processors)), found)
    shape = Shape(rows, depth, columns)
    tiling = best_tiling(shape, processors)
    assert list(found) == [tiling.small, tiling.parts, tiling.sums_bytes(shape), shape.lines]

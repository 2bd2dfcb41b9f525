"""The matmul benchmark: its cases as data, its floors, its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

if not (Path(__file__).resolve().parents[2] / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not installed; run from a checkout", allow_module_level=True)

from benchmarks.matmul.cases import floor, table


def outcome(milliseconds: float, error: float) -> dict[str, float]:
    return {"ms": milliseconds, "error": error, "rms": 0.0}


def test_a_row_of_the_table() -> None:
    case: dict[str, Any] = {
        "rows": 1000,
        "depth": 500,
        "columns": 2000,
        "transposed": True,
        "tiles": "large",
        "parts": 2,
    }
    kinds = {"tfmem": outcome(0.02, 4e-7), "float32": outcome(0.05, 1e-6), "tf32": outcome(0.01, 3e-4)}
    *_, row = table({"case": case | kinds})
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:4] == ["1000 (transposed)", "500", "2000", "large, 2 parts"]
    # 2 * 1000 * 500 * 2000 flops are 2e9: in 20 us 100 TFLOPS; three times that at 989 TFLOPS is 6.1 us
    assert cells[4:10] == ["20.0", "100", "50.0", "40", "2.50", "10.0"]
    assert cells[10].startswith("6.1 / ")
    assert cells[11:] == ["4.0e-07", "1.0e-06", "3.0e-04"]


def test_a_floor_is_of_all_bytes_once() -> None:
    rows, depth, columns = 10, 20, 30
    _, milliseconds = floor({"rows": rows, "depth": depth, "columns": columns})
    assert milliseconds == pytest.approx(1e3 * 4 * (10 * 20 + 20 * 30 + 10 * 30) / 4.3e12)

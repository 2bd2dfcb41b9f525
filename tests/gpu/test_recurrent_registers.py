"""Persistent recurrent kernels whose sums stay in registers, against the float64 definition of a cell. Needs a GPU and
NVRTC, no framework."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from custom_ops.jit.device import DeviceContext
from custom_ops.recurrent import cells
from custom_ops.recurrent.cell import Cell
from custom_ops.recurrent.codegen.layout import layout
from custom_ops.recurrent.differentiate import differentiate
from custom_ops.recurrent.spec import Configuration, RecurrentSpec
from tests import addons_cells
from tests.gpu_kernels import CLUSTER, GRID, check, check_that_nan_and_infinity_stay, compare, expected, inputs, run
from tests.recurrent_cells import chained, side_by_side

pytest_plugins = ("tests.gpu_device",)

# Sums stay in registers: units, and a configuration with a subgroup for each unit.
IN_REGISTERS = {
    "one block": (64, {"threads": 128, "lanes": 2}),
    "more lanes": (64, {"threads": 256, "lanes": 4}),
    "idle lanes": (33, {"threads": 96, "lanes": 2}),
    "few units": (7, {"threads": 32, "lanes": 2}),
    "cluster": (250, {"threads": 128, "lanes": 4, **CLUSTER}),
    "many lanes": (60, {"threads": 128, "lanes": 16, **CLUSTER}),
    "many threads": (250, {"threads": 256, "lanes": 8, **CLUSTER}),
    "cluster of 5": (98, {"threads": 96, "lanes": 4, "ctas": 5, "exchange": "cluster"}),
    "grid": (250, {"threads": 96, "lanes": 8, **GRID}),
    "grid, few lanes": (250, {"threads": 64, "lanes": 4, **GRID}),
    "grid, many lanes": (180, {"threads": 128, "lanes": 16, **GRID}),
}
CELLS = {
    "lstm": cells.lstm(),
    "masked": cells.lstm(mask="repeat"),
    "gru": cells.gru(),
    "gru2": cells.gru(reset_after=False),
    "peephole": addons_cells.peephole_lstm(),
    "nas": addons_cells.nas(),
    "chained": chained(),
    "side by side": side_by_side(),
    "training": differentiate(cells.gru(reset_after=False)).forward,
    "backward": differentiate(cells.gru(reset_after=False)).backward,
}


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("kind", IN_REGISTERS)
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_sums_in_registers(device: DeviceContext, cell: Cell, kind: str, rows: int) -> None:
    units, options = IN_REGISTERS[kind]
    rows = min(rows, options["lanes"], 1 if options["threads"] > 128 else 4)
    options = {"rows": rows, "register_weights": 64, "shared_weights": 96, **options}
    assert (
        layout(RecurrentSpec(cell, units), Configuration(**options), device.arch).sum_lanes == options["lanes"] // rows
    )
    compare(device, cell, units, 2 * rows + 1, bound=3e-5, **options)


@pytest.mark.parametrize("time", [0, 1, 2, 3, 100])
@pytest.mark.parametrize("kind", IN_REGISTERS)
def test_sums_in_registers_over_any_number_of_steps(device: DeviceContext, kind: str, time: int) -> None:
    units, options = IN_REGISTERS[kind]
    compare(device, cells.gru(reset_after=False), units, 3, time=time, **{"shared_weights": 96, **options})


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", IN_REGISTERS)
def test_sums_in_registers_in_two_directions(device: DeviceContext, kind: str, dtype: str) -> None:
    cell, (units, options) = cells.gru(), IN_REGISTERS[kind]
    given = [inputs(cell, units, 15, 3, seed) for seed in (1, 2)]
    configuration = Configuration(**{"shared_weights": 96, **options})
    found, again = [run(device, cell, units, configuration, given, dtype, reverse=(False, True))[0] for _ in range(2)]
    for arrays, results, same, reverse in zip(given, found, again, (False, True), strict=True):
        check(results, expected(cell, units, arrays, dtype, reverse), 1e-5 if dtype == "float32" else 3e-3)
        for a, b in zip(results, same, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("where", [{}, {"ctas": 3, "exchange": "cluster"}, {"ctas": 3, "exchange": "grid"}])
def test_nan_and_infinity_stay_in_their_row_in_registers(
    device: DeviceContext, where: dict[str, Any], rows: int
) -> None:
    lanes = 16 if where else 4
    check_that_nan_and_infinity_stay(
        device, Configuration(rows=rows, lanes=lanes, threads=lanes * (8 if where else 24), **where)
    )

"""Persistent recurrent kernels on sequences that begin with the batch, and from states that are not given. Needs a GPU
and NVRTC, no framework."""

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
from tests.gpu_kernels import CLUSTER, GRID, LAUNCHED, SLICED, check, expected, inputs, run

pytest_plugins = ("tests.gpu_device",)

UNITS, TIME, BATCH = 50, 9, 7
KERNELS: dict[str, dict[str, Any]] = {
    "single": {"rows": 2},
    "cluster": {"rows": 4, **CLUSTER},
    "sums in registers": {"rows": 1, "threads": 64, "lanes": 8, **CLUSTER},
    "grid": {"rows": 2, **GRID},
    "sliced": {"rows": 2, **SLICED},
    "replicated": {"rows": 2, "replicated": True, **CLUSTER},
    "replicated in a grid": {"rows": 2, "replicated": True, **GRID},
    "launches": {"rows": 2, **LAUNCHED},
    "tensor cores": {"rows": 8, "lanes": 32, "product": "half", **GRID},
}
CELLS = {
    "canonical GRU": cells.gru(reset_after=False),
    "with a mask": cells.gru(reset_after=False, mask="zero"),
    "backward": differentiate(cells.gru(reset_after=False)).backward,
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_sequences_that_begin_with_the_batch_and_states_not_given(
    device: DeviceContext, cell: Cell, kernel: str
) -> None:
    options = dict(KERNELS[kernel])
    if options.get("replicated") and cell is CELLS["backward"]:
        pytest.skip("its products wait for each other: nothing can be replicated")
    if options.get("product") == "half" and cell is CELLS["backward"]:
        options["product"] = "mma"  # what it multiplies is not bounded
    configuration = Configuration(**options)
    if kernel == "sums in registers":
        assert layout(RecurrentSpec(cell, UNITS), configuration, device.arch).sum_lanes
    given = [inputs(cell, UNITS, TIME, BATCH, seed=seed) for seed in range(2)]
    turned = [
        {
            **arrays,
            "sequences": [np.swapaxes(array, 0, 1) for array in arrays["sequences"]],
            "states": [array[:0] for array in arrays["states"]],
        }
        for arrays in given
    ]
    found, status = run(device, cell, UNITS, configuration, turned, reverse=(False, True), batch_major=True)
    assert status == 0
    for arrays, results, reverse in zip(given, found, (False, True), strict=True):
        arrays["states"] = [np.zeros_like(array) for array in arrays["states"]]
        wanted = expected(cell, UNITS, arrays, reverse=reverse)
        count = len(cell.outputs)
        check([*(np.swapaxes(a, 0, 1) for a in results[:count]), *results[count:]], wanted, 2e-5)

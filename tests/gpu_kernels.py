"""Runs persistent recurrent kernels and compares them with the float64 definition of a cell, for tests on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from custom_ops.jit.device import DeviceContext
from custom_ops.recurrent import cells, reference
from custom_ops.recurrent.cell import Cell
from custom_ops.recurrent.gpu_program import build
from custom_ops.recurrent.launch import Launcher
from custom_ops.recurrent.spec import Configuration, RecurrentSpec

Arrays = dict[str, list[Any]]
KINDS = ("sequences", "invariants", "vectors", "matrices", "states")
CLUSTER = {"ctas": 8, "exchange": "cluster"}
GRID = {"ctas": 24, "exchange": "grid"}
SLICED = {"ctas": 24, "exchange": "grid", "slices": 4}
LAUNCHED = {"ctas": 24, "exchange": "launches"}
PERSISTENT: dict[str, dict[str, Any]] = {"single": {}, "cluster": CLUSTER, "grid": GRID, "sliced": SLICED}
EVERYWHERE = {**PERSISTENT, "launches": LAUNCHED}


def inputs(cell: Cell, units: int, time: int, batch: int, seed: int = 0) -> Arrays:
    """Random tensors of a direction; weights so large that gates leave their linear range, and no larger."""
    random = np.random.default_rng(seed)
    scale = 1 / np.sqrt(units)

    def normal(*shape: int) -> Any:
        return random.standard_normal(shape).astype(np.float32)

    return {
        "sequences": [normal(time, batch, n * units) if n else normal(time, batch) for n in cell.sequences],
        "invariants": [normal(batch, n * units) for n in cell.invariants],
        "vectors": [normal(n * units) for n in cell.vectors],
        "matrices": [scale * normal(rows * units, columns * units) for rows, columns in cell.matrices],
        "states": [normal(batch, units) for _ in cell.states],
    }


def to_storage(array: Any, dtype: str) -> Any:
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return array.astype(dtype)


def from_storage(array: Any) -> Any:
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


class Sweep:
    """A launch on separate tensors. What it is to write starts as NaN; a state without rows is not given."""

    def __init__(
        self,
        device: DeviceContext,
        launcher: Launcher,
        spec: RecurrentSpec,
        given: list[Arrays],
        reverse: tuple[bool, ...] = (False,),
        batch_major: bool = False,
    ) -> None:
        self._device = device
        cell, units, dtype = spec.cell, spec.units, spec.dtype
        leading = given[0]["sequences"][0].shape[:2]
        time, batch = reversed(leading) if batch_major else leading
        pointers: list[list[int]] = []
        self._results: list[list[tuple[int, Any]]] = []
        for arrays in given:
            places = [
                device.upload(to_storage(array, dtype)) if array.size or kind != "states" else 0
                for kind in KINDS
                for array in arrays[kind]
            ]
            empty = [
                np.full(leading if cell.scalar[columns[0]] else (*leading, len(columns) * units), np.nan)
                for columns in cell.outputs
            ]
            empty += [np.full((batch, units), np.nan) for _ in cell.states]
            stored = [to_storage(array, dtype) for array in empty]
            outputs = [device.upload(array) for array in stored]
            pointers.append(places + outputs)
            self._results.append(list(zip(outputs, stored, strict=True)))
        self._memory = device.upload(np.zeros(launcher.memory_bytes(batch, len(given)), np.uint8))
        self._enqueue = launcher.prepare(time, batch, pointers, self._memory, reverse, batch_major)

    def enqueue(self, stream: int) -> None:
        self._enqueue(stream)

    def results(self) -> tuple[list[list[Any]], int]:
        """Outputs and finals of each direction, and the status; of what ran on the device's own stream."""
        done = [[from_storage(self._device.download(*pair)) for pair in pairs] for pairs in self._results]
        return done, int(self._device.download(self._memory, np.zeros(1, np.int32))[0])


def launcher_of(device: DeviceContext, spec: RecurrentSpec, configuration: Configuration) -> Launcher:
    program = build(spec, configuration, device.arch, compile_source=device.compile_source)
    return Launcher(program, device.driver)


def run(
    device: DeviceContext,
    cell: Cell,
    units: int,
    configuration: Configuration,
    given: list[Arrays],
    dtype: str = "float32",
    precision: str = "highest",
    reverse: tuple[bool, ...] = (False,),
    batch_major: bool = False,
) -> tuple[list[list[Any]], int]:
    """Outputs and finals of each direction, and the status."""
    spec = RecurrentSpec(cell, units, dtype, precision, len(given))  # type: ignore[arg-type]
    launcher = launcher_of(device, spec, configuration)
    sweep = Sweep(device, launcher, spec, given, reverse, batch_major)
    sweep.enqueue(device.stream)
    return sweep.results()


def expected(cell: Cell, units: int, arrays: Arrays, dtype: str = "float32", reverse: bool = False) -> list[Any]:
    rounded = {kind: [from_storage(to_storage(a, dtype)).astype(np.float64) for a in arrays[kind]] for kind in KINDS}
    outputs, finals = reference.run(cell, units, *(rounded[kind] for kind in KINDS), reverse=reverse)
    return [*outputs, *finals]


def check(found: list[Any], wanted: list[Any], bound: float) -> None:
    for place, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert np.isfinite(a).all(), f"result {place} has NaN, or was not written"
        error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)
        assert error < bound, f"result {place}: relative error {error:.2e}, bound {bound:.0e}"


def compare(device: DeviceContext, cell: Cell, units: int, batch: int, time: int = 20, **options: Any) -> None:
    bound = options.pop("bound", 1e-5)
    configuration = Configuration(**options)
    arrays = inputs(cell, units, time, batch)
    (found,), status = run(device, cell, units, configuration, [arrays])
    assert status == 0
    check(found, expected(cell, units, arrays), bound)


def check_that_nan_and_infinity_stay(device: DeviceContext, options: Configuration, precision: str = "highest") -> None:
    cell, units = cells.simple_rnn("relu"), 24
    arrays = inputs(cell, units, 6, 9)
    arrays["matrices"][0] = np.abs(arrays["matrices"][0])  # so that infinity stays infinity
    arrays["sequences"][0][2, 1, 3] = np.nan
    arrays["sequences"][0][2, 2, 3] = np.inf
    (found,), status = run(device, cell, units, options, [arrays], precision=precision)
    assert status == 0
    bound = {"rtol": 1e-3, "atol": 1e-5} if precision == "highest" else {"rtol": 3e-2, "atol": 3e-2}
    for a, b in zip(found, expected(cell, units, arrays), strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        np.testing.assert_array_equal(np.isinf(a), np.isinf(b))
        np.testing.assert_allclose(a[np.isfinite(b)], b[np.isfinite(b)], **bound)

"""The persistent recurrent kernels against the float64 definition of a cell. Needs a GPU and NVRTC, no framework."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from custom_ops.jit.device import DeviceContext
from custom_ops.recurrent import cells
from custom_ops.recurrent.cell import Cell
from custom_ops.recurrent.differentiate import differentiate
from custom_ops.recurrent.gpu_program import build
from custom_ops.recurrent.launch import Launcher
from custom_ops.recurrent.spec import Configuration, RecurrentSpec
from tests import addons_cells
from tests.gpu_kernels import (
    CLUSTER,
    EVERYWHERE,
    GRID,
    KINDS,
    LAUNCHED,
    SLICED,
    check,
    check_that_nan_and_infinity_stay,
    compare,
    expected,
    inputs,
    run,
    to_storage,
)
from tests.recurrent_cells import chained, side_by_side

pytest_plugins = ("tests.gpu_device",)


def skip_what_is_not_there(where: dict[str, Any], product: str) -> None:
    if product == "half" and where is LAUNCHED:
        pytest.skip("a launch for each stage does not look at all weights, as 'half' has to")


SHAPES = [(1, 1), (7, 3), (33, 20), (64, 10), (256, 5)]


@pytest.mark.parametrize(("units", "batch"), SHAPES)
@pytest.mark.parametrize("exchange", EVERYWHERE)
@pytest.mark.parametrize("cell", [cells.lstm(), cells.gru(), cells.gru(reset_after=False)], ids=["lstm", "gru", "gru2"])
def test_cells_and_odd_sizes(device: DeviceContext, cell: Cell, units: int, batch: int, exchange: str) -> None:
    lanes = 8 if exchange in ("single", "cluster") else 32
    shared = 1 << 20 if units < 65 else 64
    compare(device, cell, units, batch, rows=2, lanes=lanes, shared_weights=shared, **EVERYWHERE[exchange])


@pytest.mark.parametrize("where", EVERYWHERE.values(), ids=EVERYWHERE)
@pytest.mark.parametrize("product", ["fma", "mma"])
def test_buffers_alike_in_two_stages(device: DeviceContext, product: str, where: dict[str, Any]) -> None:
    compare(device, side_by_side(), 50, 19, rows=8, lanes=32, product=product, **where)


@pytest.mark.parametrize("rows", [1, 8, 12])
@pytest.mark.parametrize("where", EVERYWHERE.values(), ids=EVERYWHERE)
@pytest.mark.parametrize("cell", [cells.simple_rnn(), cells.lstm()], ids=["rnn", "lstm"])
def test_many_rows(device: DeviceContext, cell: Cell, where: dict[str, Any], rows: int) -> None:
    """Few columns and many rows: every lane of a warp waits for another CTA (lanes once left that spin apart)."""
    compare(device, cell, 24, 2 * rows - 1, time=30, rows=rows, lanes=32, **where)


@pytest.mark.parametrize("exchange", EVERYWHERE)
def test_a_hundred_steps_stay_accurate(device: DeviceContext, exchange: str) -> None:
    where = {**EVERYWHERE, "cluster": {"ctas": 16, "exchange": "cluster"}}[exchange]
    compare(device, cells.lstm(), 200, 3, time=100, shared_weights=16, **where)


@pytest.mark.parametrize("units", [33, 256])
@pytest.mark.parametrize("where", EVERYWHERE.values(), ids=EVERYWHERE)
def test_row_sums(device: DeviceContext, units: int, where: dict[str, Any]) -> None:
    compare(device, addons_cells.layer_norm_lstm(units), units, 5, rows=2, shared_weights=32, bound=2e-5, **where)


@pytest.mark.parametrize("where", EVERYWHERE.values(), ids=EVERYWHERE)
@pytest.mark.parametrize("name", ["lstm", "gru", "gru2", "nas", "peephole"])
def test_backward_cells(device: DeviceContext, name: str, where: dict[str, Any]) -> None:
    forward = {
        "lstm": cells.lstm(),
        "gru": cells.gru(),
        "gru2": cells.gru(reset_after=False),
        "nas": addons_cells.nas(),
        "peephole": addons_cells.peephole_lstm(),
    }[name]
    compare(device, differentiate(forward).backward, 48, 6, rows=3, shared_weights=32, bound=3e-5, **where)


@pytest.mark.parametrize("lanes", [1, 4, 32, 64, 256])
@pytest.mark.parametrize("weights", [(128, 0), (16, 16), (0, 0)], ids=["registers", "mixed", "streamed"])
def test_subgroups_and_where_weights_live(device: DeviceContext, lanes: int, weights: tuple[int, int]) -> None:
    where = {"register_weights": weights[0], "shared_weights": weights[1]}
    compare(device, cells.lstm(), 60, 6, rows=6, lanes=lanes, **CLUSTER, **where)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("lanes", [2, 8, 32, 64, 96])
@pytest.mark.parametrize("weights", [(128, 0), (64, 32), (0, 0)], ids=["registers", "mixed", "streamed"])
def test_sums_that_fill_large_subgroups(device: DeviceContext, lanes: int, weights: tuple[int, int], rows: int) -> None:
    """So deep that every lane has a chunk: 400 of the 416 numbers are there."""
    where = {"register_weights": weights[0], "shared_weights": weights[1]}
    compare(device, cells.simple_rnn(), 400, 4, rows=rows, lanes=lanes, **CLUSTER, **where)


@pytest.mark.parametrize("threads", [64, 96, 160])
@pytest.mark.parametrize("where", EVERYWHERE.values(), ids=EVERYWHERE)
@pytest.mark.parametrize("lanes", [2, 16])
def test_subgroups_of_any_number_of_warps(
    device: DeviceContext, lanes: int, where: dict[str, Any], threads: int
) -> None:
    options = {"rows": 2, "lanes": lanes, "threads": threads, "register_weights": 64, "shared_weights": 64}
    compare(device, cells.gru(reset_after=False), 130, 5, **options, **where)


@pytest.mark.parametrize("lanes", [96, 160])
@pytest.mark.parametrize("product", ["mma", "half"])
def test_any_number_of_warps_shares_a_sum(device: DeviceContext, product: Any, lanes: int) -> None:
    cell, units = cells.lstm(), 250
    arrays = inputs(cell, units, 20, 11)
    arrays["states"] = [np.tanh(state) for state in arrays["states"]]  # float16 takes states that an LSTM can have
    configuration = Configuration(rows=16, lanes=lanes, product=product, shared_weights=32, **CLUSTER)
    (found,), status = run(device, cell, units, configuration, [arrays])
    assert status == 0
    check(found, expected(cell, units, arrays), 1e-5)


REPLICATED = {
    "gru2": cells.gru(reset_after=False),
    "masked": cells.gru(reset_after=False, mask="repeat"),
    "training": differentiate(cells.gru(reset_after=False)).forward,
    "chained": chained(),
}


@pytest.mark.parametrize(("units", "batch"), [*SHAPES[:-1], (130, 5)])
@pytest.mark.parametrize("where", [CLUSTER, GRID], ids=["cluster", "grid"])
@pytest.mark.parametrize("cell", REPLICATED.values(), ids=REPLICATED)
def test_replicas_and_odd_sizes(
    device: DeviceContext, cell: Cell, units: int, batch: int, where: dict[str, Any]
) -> None:
    options = {"rows": 2, "lanes": 8, "shared_weights": 160}
    compare(device, cell, units, batch, replicated=True, **options, **where)


@pytest.mark.parametrize("threads", [64, 160, 512])
@pytest.mark.parametrize("rows", [1, 3, 12])
@pytest.mark.parametrize("where", [CLUSTER, GRID], ids=["cluster", "grid"])
def test_parts_of_sums_of_many_rows(device: DeviceContext, where: dict[str, Any], rows: int, threads: int) -> None:
    options = {"rows": rows, "threads": threads, "lanes": 4, "register_weights": 32, "shared_weights": 16}
    compare(device, REPLICATED["gru2"], 90, 14, replicated=True, **options, **where)


@pytest.mark.parametrize("where", [{"ctas": 16, "exchange": "cluster"}, GRID], ids=["cluster", "grid"])
def test_parts_of_sums_over_a_hundred_steps(device: DeviceContext, where: dict[str, Any]) -> None:
    options = {"rows": 1, "lanes": 8, "shared_weights": 64, "replicated": True}
    compare(device, REPLICATED["gru2"], 256, 3, time=100, **options, **where)


@pytest.mark.parametrize("where", [CLUSTER, GRID], ids=["cluster", "grid"])
@pytest.mark.parametrize("name", ["gru2", "chained"])
def test_replicas_of_many_rows(device: DeviceContext, name: str, where: dict[str, Any]) -> None:
    options = {"rows": 16, "lanes": 32, "shared_weights": 32}
    compare(device, REPLICATED[name], 60, 37, replicated=True, **options, **where)


@pytest.mark.parametrize("where", [CLUSTER, GRID], ids=["cluster", "grid"])
def test_replicas_in_two_directions(device: DeviceContext, where: dict[str, Any]) -> None:
    cell, units = REPLICATED["chained"], 40
    given = [inputs(cell, units, 15, 5, seed) for seed in (1, 2)]
    configuration = Configuration(rows=2, replicated=True, **where)
    found, _ = run(device, cell, units, configuration, given, reverse=(False, True))
    for arrays, results, reverse in zip(given, found, (False, True), strict=True):
        check(results, expected(cell, units, arrays, reverse=reverse), 1e-5)


@pytest.mark.parametrize("weights", [0, 16])
def test_streamed_weights_of_replicas(device: DeviceContext, weights: int) -> None:
    options = {"register_weights": weights, "replicated": True}
    compare(device, REPLICATED["gru2"], 70, 3, **options, **CLUSTER)


@pytest.mark.parametrize("batch", [8, 13, 40])
@pytest.mark.parametrize("where", EVERYWHERE.values(), ids=EVERYWHERE)
@pytest.mark.parametrize(
    ("product", "precision", "bound"),
    [
        ("mma", "highest", 1e-5),
        ("mma", "tf32", 5e-3),
        ("half", "highest", 1e-5),
        ("half", "tf32", 5e-3),
        ("half", "float16", 5e-3),
        ("half", "bfloat16", 3e-2),
    ],
)
def test_tensor_cores(
    device: DeviceContext, batch: int, where: dict[str, Any], product: str, precision: str, bound: float
) -> None:
    skip_what_is_not_there(where, product)
    cell, units = cells.lstm(), 72
    arrays = inputs(cell, units, 30, batch)
    if product == "half":  # it takes states that an LSTM can have
        arrays["states"] = [np.tanh(state) for state in arrays["states"]]
    options = {"rows": 16, "lanes": 64, "product": product, "shared_weights": 64}
    (found,), status = run(device, cell, units, Configuration(**options, **where), [arrays], precision=precision)  # type: ignore[arg-type]
    assert status == 0
    check(found, expected(cell, units, arrays), bound)


@pytest.mark.parametrize("where", [GRID | {"ctas": 15}, SLICED | {"ctas": 20}], ids=["grid", "sliced"])
@pytest.mark.parametrize(("precision", "bound"), [("tf32", 5e-3), ("bfloat16", 3e-2)])
def test_rows_of_16_bit_numbers_that_16_bytes_do_not_divide(
    device: DeviceContext, precision: str, bound: float, where: dict[str, Any]
) -> None:
    cell, units = cells.lstm(), 4 * where["ctas"]
    arrays = inputs(cell, units, 30, 9)
    arrays["states"] = [np.tanh(state) for state in arrays["states"]]
    options = Configuration(rows=9, lanes=32, product="half", shared_weights=64, **where)
    (found,), status = run(device, cell, units, options, [arrays], precision=precision)
    assert status == 0
    check(found, expected(cell, units, arrays), bound)


@pytest.mark.parametrize("weights", ["registers", "streamed"])
@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1.0, 8.0])
def test_pairs_of_float16_hold_weights_of_any_size(device: DeviceContext, scale: float, weights: str) -> None:
    """Larger ones than the last make float32 itself wrong: gates close on a rounding error."""
    cell, units = cells.gru(), 40
    arrays = inputs(cell, units, 4, 8)
    arrays["matrices"] = [np.float32(scale) * matrix for matrix in arrays["matrices"]]
    arrays["states"] = [np.tanh(state) for state in arrays["states"]]
    options = {"rows": 8, "lanes": 32, "product": "half", "register_weights": 128 if weights == "registers" else 0}
    (found,), status = run(device, cell, units, Configuration(**options), [arrays])  # type: ignore[arg-type]
    assert status == 0
    check(found, expected(cell, units, arrays), 3e-5)


def test_a_state_that_float16_does_not_hold_is_left_to_the_fallback(device: DeviceContext) -> None:
    cell, units = cells.gru(), 40
    arrays = inputs(cell, units, 4, 8)
    arrays["states"][0][3, 5] = 70.0
    options = Configuration(rows=8, lanes=32, product="half")
    (found,), status = run(device, cell, units, options, [arrays])
    assert status != 0
    check(found, expected(cell, units, arrays), 1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 3e-3), ("bfloat16", 2e-2)])
def test_storage_types(device: DeviceContext, dtype: str, bound: float) -> None:
    cell, units = cells.lstm(), 40
    arrays = inputs(cell, units, 20, 3)
    (found,), _ = run(device, cell, units, Configuration(**CLUSTER), [arrays], dtype=dtype)  # type: ignore[arg-type]
    check(found, expected(cell, units, arrays, dtype), bound)


@pytest.mark.parametrize("where", EVERYWHERE.values(), ids=EVERYWHERE)
def test_two_directions_in_one_launch(device: DeviceContext, where: dict[str, Any]) -> None:
    cell, units = cells.gru(), 40
    given = [inputs(cell, units, 15, 5, seed) for seed in (1, 2)]
    found, _ = run(device, cell, units, Configuration(rows=2, **where), given, reverse=(False, True))
    for arrays, results, reverse in zip(given, found, (False, True), strict=True):
        check(results, expected(cell, units, arrays, reverse=reverse), 1e-5)


@pytest.mark.parametrize("time", [0, 1, 2])
@pytest.mark.parametrize("where", EVERYWHERE.values(), ids=EVERYWHERE)
def test_short_sequences(device: DeviceContext, time: int, where: dict[str, Any]) -> None:
    compare(device, cells.lstm(), 16, 3, time=time, **where)


@pytest.mark.parametrize(("product", "precision"), [("fma", "highest"), ("mma", "highest"), ("half", "bfloat16")])
@pytest.mark.parametrize("where", EVERYWHERE.values(), ids=EVERYWHERE)
def test_nan_and_infinity_stay_in_their_row(
    device: DeviceContext, where: dict[str, Any], product: str, precision: str
) -> None:
    skip_what_is_not_there(where, product)
    options = Configuration(rows=8, lanes=32, product=product, **where)  # type: ignore[arg-type]
    check_that_nan_and_infinity_stay(device, options, precision)


def test_runs_are_bitwise_equal(device: DeviceContext) -> None:
    cell, units = addons_cells.layer_norm_lstm(64), 64
    arrays = inputs(cell, units, 30, 4)
    options = Configuration(rows=2, **CLUSTER)  # type: ignore[arg-type]
    first, second = [run(device, cell, units, options, [arrays])[0][0] for _ in range(2)]
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("replicated", [False, True])
def test_the_fallback_computes_the_same(device: DeviceContext, replicated: bool) -> None:
    """A status that is set stands for a spin that ran out."""
    cell, units, batch, time = cells.gru(reset_after=False), 50, 5, 7
    arrays = inputs(cell, units, time, batch)
    configuration = Configuration(rows=2, replicated=replicated, **GRID)  # type: ignore[arg-type]
    program = build(RecurrentSpec(cell, units), configuration, device.arch)
    launcher = Launcher(program)
    places = [device.upload(to_storage(array, "float32")) for kind in KINDS for array in arrays[kind]]
    wanted = expected(cell, units, arrays)
    results = [np.full(array.shape, np.nan, np.float32) for array in wanted]
    outputs = [device.upload(array) for array in results]
    memory = device.upload(np.full(launcher.memory_bytes(batch), 0xFF, np.uint8))
    words = launcher._words(time, batch, [places + outputs], memory, (), False)
    launcher._fallback.prepare((1, words[1] >> 32), words)(device.stream)  # type: ignore[union-attr]
    check([device.download(*pair) for pair in zip(outputs, results, strict=True)], wanted, 1e-5)


@pytest.mark.parametrize("product", ["fma", "mma"])
def test_launches_of_more_blocks_than_run_at_once(device: DeviceContext, product: Any) -> None:
    """Three groups of 250 blocks, on no more than 132 multiprocessors."""
    options = {"rows": 8, "lanes": 32, "product": product, "ctas": 250, "exchange": "launches"}
    compare(device, cells.gru(reset_after=False), 1000, 17, time=5, **options)


@pytest.mark.parametrize("weights", [(16, 16), (0, 0)], ids=["mixed", "streamed"])
def test_launches_stream_what_blocks_cannot_hold(device: DeviceContext, weights: tuple[int, int]) -> None:
    where = {"register_weights": weights[0], "shared_weights": weights[1]}
    compare(device, cells.gru(reset_after=False), 90, 6, rows=6, lanes=32, **LAUNCHED, **where)

"""Which configurations there are, and which of them the model puts first, on the machines that it knows."""

import math
from dataclasses import replace

import pytest

from custom_ops.recurrent import cells
from custom_ops.recurrent.codegen.layout import layout
from custom_ops.recurrent.differentiate import differentiate
from custom_ops.recurrent.search import ranking, space
from custom_ops.recurrent.spec import Configuration, RecurrentSpec
from graph_passes.analysis.cost import device_costs


def listed(machine, spec, batch):
    return [configuration for configuration, _ in space.enumerate_configurations(machine, spec, batch)]


@pytest.mark.parametrize(("units", "batch"), [(1, 1), (33, 7), (1000, 20)])
def test_every_configuration_fits_and_holds_its_weights(units, batch):
    machine = device_costs.machine("h200")
    spec = RecurrentSpec(cells.lstm(), units)
    ranked = ranking.rank(machine, spec, batch)
    assert ranked
    times = [prediction.nanoseconds(100) for prediction in ranked]
    assert times == sorted(times)
    assert len({prediction.configuration for prediction in ranked}) == len(ranked)
    for prediction in ranked:
        configuration = prediction.configuration
        sizes = layout(spec, configuration, 90)  # raises if it does not fit
        assert all(gemm.chunks == gemm.registers + gemm.shared for gemm in sizes.gemms)
        assert configuration.rows <= batch


def test_small_layers_stay_in_a_cluster_and_large_ones_take_the_grid():
    machine = device_costs.machine("h200")

    def best(units, batch=1):
        return ranking.rank(machine, RecurrentSpec(cells.lstm(), units), batch)[0].configuration

    assert best(64).exchange == "single"
    assert (best(256).exchange, best(256).ctas) == ("cluster", 16)
    assert best(1024).exchange == "grid"


def test_weights_are_streamed_where_nothing_holds_them():
    machine = device_costs.machine("h200")
    spec = RecurrentSpec(cells.lstm(), 4096)
    ranked = ranking.rank(machine, spec, 1)
    assert ranked
    sizes = layout(spec, ranked[0].configuration, 90)
    assert any(gemm.chunks > gemm.registers + gemm.shared for gemm in sizes.gemms)
    # 268 MB at a step, over all multiprocessors
    assert ranked[0].step.load > 1e4


@pytest.mark.parametrize("reset_after", [True, False])
def test_weights_are_streamed_while_groups_take_turns_where_that_is_faster(reset_after):
    """GRUs of 2,048 units fit the chip, but with few rows at a time: 4 of 64 took 15.7 ms on an H200 (canonical)."""
    spec = RecurrentSpec(cells.gru(reset_after=reset_after), 2048)
    ranked = ranking.rank(device_costs.machine("h200"), spec, 64)

    def streams(prediction):
        gemms = layout(spec, prediction.configuration, 90).gemms
        return any(gemm.chunks > gemm.registers + gemm.shared for gemm in gemms)

    best = ranked[0]
    assert best.configuration.exchange == "grid"
    assert streams(best)
    assert best.waves > 1
    held = [each for each in ranked if not streams(each)]
    assert best.nanoseconds(100) < 0.5 * held[0].nanoseconds(100)


def test_a_launch_for_each_stage_is_not_searched_but_where_nothing_else_fits():
    machine, cell = device_costs.machine("v100"), cells.gru(reset_after=False)
    assert not any(each.exchange == "launches" for each in listed(machine, RecurrentSpec(cell, 2048), 64))
    spec = RecurrentSpec(cell, 6000, directions=64)  # no two blocks for each, and one does not hold the sums
    assert listed(machine, spec, 64) == [space.launched(machine, spec, 64)]


@pytest.mark.parametrize(("units", "batch", "rows"), [(9, 1, 1), (512, 64, 8), (2048, 16, 8), (8192, 16, 4)])
def test_a_launch_reads_all_weights_and_needs_no_room_for_all_blocks(units, batch, rows):
    """What a step loads are its weights at least; nothing lasts."""
    machine = device_costs.machine("h200")
    spec = RecurrentSpec(cells.lstm(), units)
    configuration = space.launched(machine, spec, batch)
    assert configuration.rows == rows
    assert configuration.ctas == math.ceil(units / 8)  # more than the 132 that run at once
    sizes = layout(spec, configuration, 90)
    assert all(gemm.registers == gemm.shared == 0 for gemm in sizes.gemms)
    found = ranking.predict(machine, spec, configuration, batch)
    assert found.waves == 1
    assert found.step.synchronisation > ranking.fitted().launch
    bandwidth = max(rate for _, rate in machine.load_bandwidth) * machine.multiprocessors
    assert found.step.load > 16 * units * units / bandwidth


def test_a_cell_of_one_block_has_no_launches():
    """One block never waits."""
    assert space.launched(device_costs.machine("h200"), RecurrentSpec(cells.lstm(), 8), 1) is None


def test_all_rows_come_together_where_weights_are_streamed():
    """A turn over some of the rows reads the weights again: registers are better spent on sums than on weights."""
    spec = RecurrentSpec(cells.lstm(), 2048)
    best = ranking.rank(device_costs.machine("h200"), spec, 64)[0].configuration
    sizes = layout(spec, best, 90)
    assert best.rows > 8
    assert all(8 * gemm.block == sizes.padded_rows for gemm in sizes.gemms)


def test_weights_leave_registers_that_the_compiler_would_spill():
    """Kernels for 64 rows of a canonical GRU of 1,024 units took 1,394 us with 192 weights a thread, 1,149 with
    136 on an H200."""
    spec = RecurrentSpec(cells.gru(reset_after=False), 1024)
    found = listed(device_costs.machine("h200"), spec, 64)
    weights: dict[Configuration, set[int]] = {}
    for each in found:
        shape = replace(each, register_weights=0, shared_weights=0)
        weights.setdefault(shape, set()).add(each.register_weights)
    assert {136, 192} <= weights[Configuration(32, 64, 256, 128, 0, 0, "half", "grid", 2)]
    # the compiler spills little of what ordinary products need
    assert all(len(found) == 1 for shape, found in weights.items() if not shape.tensor_cores)


@pytest.mark.parametrize(
    ("cell", "units", "precision"), [(cells.gru(reset_after=False), 1000, "highest"), (cells.lstm(), 800, "tf32")]
)
def test_what_cannot_hold_its_weights_is_left_out_early(cell, units, precision, monkeypatch):
    """Only to save time: what a layout would refuse."""
    machine, spec = device_costs.machine("h200"), RecurrentSpec(cell, units, precision=precision)
    found = listed(machine, spec, 8)
    monkeypatch.setattr(space, "_could_hold", lambda *_: True)
    assert listed(machine, spec, 8) == found


def test_no_more_lanes_than_a_sum_has_chunks():
    """They would be the same kernel again: 64 products are 16 chunks of 4, or 4 of 16."""
    found = listed(device_costs.machine("h200"), RecurrentSpec(cells.lstm(), 64), 20)
    assert {each.lanes for each in found if not each.tensor_cores} == {2, 4, 8, 16}
    assert {each.lanes for each in found if each.tensor_cores} == {32, 64, 128}


def test_old_devices_have_neither_clusters_nor_tensor_cores():
    machine = replace(device_costs.machine("v100"), arch=75)
    kinds = {
        (each.configuration.exchange, each.configuration.product)
        for each in ranking.rank(machine, RecurrentSpec(cells.gru(), 256), 20)
    }
    assert kinds == {("grid", "fma")}


@pytest.mark.parametrize(("arch", "shared"), [(87, 163), (100, 227), (120, 99), (999, 99)])
def test_devices_that_nobody_measured_have_configurations(arch, shared):
    """KiB of a block; of what is not known no more is taken than all devices have since 8.0."""
    machine = replace(device_costs.machine("h200"), arch=arch)
    if arch < 90:
        machine = replace(machine, clusters=((1, 132),))
    spec = RecurrentSpec(cells.lstm(), 1000)
    found = space.enumerate_configurations(machine, spec, 20)
    assert found
    assert all(sizes.shared <= shared << 10 for _, sizes in found)
    assert max(sizes.shared for _, sizes in found) > 0.8 * (shared << 10)


def test_the_layout_of_each_is_its_own():
    """Predictions rely on it: what was laid out had more registers for weights than it took."""
    machine = device_costs.machine("h200")
    for cell, units, batch in (
        (cells.lstm(), 1024, 20),
        (cells.gru(reset_after=False), 100, 9),
        (cells.lstm(), 3000, 3),
    ):
        spec = RecurrentSpec(cell, units)
        found = space.enumerate_configurations(machine, spec, batch)
        for configuration, sizes in found[:: len(found) // 40 + 1]:
            assert sizes == layout(spec, configuration, machine.arch)


@pytest.mark.parametrize("units", [1, 1024, 3000])
@pytest.mark.parametrize("batch", [1, 300])
@pytest.mark.parametrize("backward", [False, True])
def test_every_size_has_a_configuration(units, batch, backward):
    """Weights that fit no chip are streamed; groups that do not fit it together take turns."""
    cell, machine = cells.lstm(), device_costs.machine("h200")
    spec = RecurrentSpec(differentiate(cell).backward if backward else cell, units)
    found = listed(machine, spec, batch)
    assert found
    for configuration in found[:: len(found) // 5 + 1]:
        layout(spec, configuration, machine.arch)
        assert ranking.predict(machine, spec, configuration, batch).nanoseconds(100) > 0


def test_groups_take_turns_where_their_rows_do_not_fit_at_once():
    machine = device_costs.machine("h200")
    spec = RecurrentSpec(differentiate(cells.lstm()).backward, 1024)
    (best, *_) = ranking.rank(machine, spec, 200)
    at_once = {1: 132, 2: 132, 4: 120, 8: 120}[best.configuration.slices] // best.configuration.ctas
    assert best.waves == math.ceil(math.ceil(200 / best.configuration.rows) / at_once) > 1

"""GRNN's performance model: by hand on the unit machine, and against the numbers that the paper prints."""

import math
from dataclasses import replace

import pytest

from custom_ops import cells
from custom_ops.codegen.layout import layout
from custom_ops.differentiate import differentiate
from custom_ops.errors import KernelError
from custom_ops.machine import from_json, read
from custom_ops.spec import Configuration, RecurrentSpec
from graph_passes.cost import device, recurrent, space
from graph_passes.cost import grnn as model
from graph_passes.cost.grnn import Cost, Tiling, Work


@pytest.fixture
def unit():
    """1 ns for an FMA, 1 byte a ns, 1 FMA for a shuffle; S1 and S2 reach 2 at four, together at most 4."""
    return device.machine("unit")


def listed(machine, spec, batch):
    return [configuration for configuration, _ in space.enumerate_configurations(machine, spec, batch)]


def test_a_block_by_hand(unit):
    work = Work(state_bytes=64, active=0.5, warps=1, columns=1, reduction=32, sequential=8, rows=2, waits=4)
    # 64 bytes; 2 rows x 8 FMAs; log2(32) shuffles for each of 2 sums; the wait
    assert model.price(unit, work) == Cost(load=64, products=16, reduction=10, synchronisation=4)
    assert model.price(unit, work).total == 94


def test_warps_and_columns_speed_up_to_the_peak(unit):
    work = Work(state_bytes=0, active=1, warps=4, columns=4, reduction=1, sequential=8, rows=1)
    assert model.price(unit, work).products == 4 * 4 * 8 / 4
    assert model.price(replace(unit, peak_speedup=3.0), work).products == 4 * 4 * 8 / 3


def test_a_sum_of_one_thread_is_not_reduced_and_a_short_one_is_handed_back(unit):
    work = Work(state_bytes=0, active=1, warps=1, columns=1, reduction=1, sequential=1, rows=1)
    assert model.price(unit, work).reduction == 0
    assert model.price(unit, replace(work, reduction=16)).reduction == 5
    assert model.price(unit, replace(work, reduction=32)).reduction == 5


def test_curves_are_read_along_a_logarithmic_axis():
    curve = ((1, 1.0), (4, 3.0))
    assert [read(curve, x) for x in (0.5, 1, 2, 4, 100)] == [1, 1, 2, 3, 3]


# Table 2: hidden 256, batch 20, LSTM, tile 32 x 2: groups, group size, cost, of which reductions are printed for two
TABLE_2 = [(128, 2, 449), (64, 4, 322), (32, 8, 252), (16, 16, 443), (8, 32, 561)]


@pytest.mark.parametrize(("groups", "size", "cost"), TABLE_2)
def test_costs_of_table_2(groups, size, cost):
    machine = device.machine("v100")
    found = model.lstm_step(machine, 256, 20, Tiling(32, 2, groups, size))
    assert found.total / machine.fma == pytest.approx(cost, abs=1.5)
    # section 8.3: "the reduction costs are too high for the bottom two (118 and 236) ... the first (409)"
    named = {16: ("reduction", 118), 32: ("reduction", 236), 2: ("products", 409)}
    if size in named:
        part, printed = named[size]
        assert getattr(found, part) / machine.fma == pytest.approx(printed, abs=1)


# Table 3, milliseconds: hidden, batch, single, double
TABLE_3 = [
    (64, 1, 0.181, 0.28), (64, 10, 0.186, 0.285), (64, 20, 0.201, 0.307),
    (256, 1, 0.275, 0.372), (256, 10, 0.323, 0.411), (256, 20, 0.431, 0.498),
    (1024, 1, 6.46, 0.683), (1024, 10, 64.76, 3.162), (1024, 20, 129.52, 6.324),
]  # fmt: skip


@pytest.mark.parametrize(("units", "batch", "single", "double"), TABLE_3)
def test_the_gru_form_of_table_3_is_chosen(units, batch, single, double):
    machine = device.machine("v100")
    space = list(model.tilings(machine, units, batch, gates=3))
    found = [
        min(step(machine, units, batch, tiling).total for tiling in space)
        for step in (model.gru_single_step, model.gru_double_step)
    ]
    assert (found[0] < found[1]) == (single < double)


def test_tilings_fit_the_multiprocessors_and_their_registers():
    machine = device.machine("v100")
    space = list(model.tilings(machine, 256, 20))
    assert {Tiling(32, 2, groups, size) for groups, size, _ in TABLE_2} <= set(space)
    for tiling in space:
        assert math.ceil(256 / tiling.width) * math.ceil(20 / tiling.height) <= 80
    # an LSTM of 1280 units needs more registers than 80 multiprocessors have, one of 768 does not
    assert not list(model.tilings(machine, 1280, 1))
    assert list(model.tilings(machine, 768, 1))


@pytest.mark.parametrize("name", device.profiles())
def test_every_profile_has_a_machine(name):
    machine = device.machine(name)
    assert from_json(machine.to_json()) == machine
    assert machine.fma > 0
    assert all(y > 0 for _, y in machine.load_bandwidth)


def test_a_stale_description_says_so():
    values = device.machine("unit").to_json()
    with pytest.raises(KernelError, match=r"fma.*measure the machine again"):
        from_json({name: value for name, value in values.items() if name != "fma"})


# --- configurations of our own kernel --------------------------------------------------------------------------------

SMALL = RecurrentSpec(cells.simple_rnn(), units=8)


def test_one_block_by_hand(unit):
    # 64 threads in 32 groups of 2: each sums one column over 4 of 8 units, and hands its sum to the other
    configuration = Configuration(rows=1, threads=64, lanes=2, register_weights=4)
    found = recurrent.predict(unit, SMALL, configuration, batch=1)
    # 4 FMAs, then an addition and a tanh; one shuffle, and sums through shared memory; the barrier of the exchange
    assert found.step == Cost(load=0, products=4 + 2 + recurrent.STEP, reduction=1 + 3, synchronisation=1)
    assert (found.waves, found.hidden) == (1, 0)
    assert found.start == 8 * 8 * 4  # the weights, at 1 byte a nanosecond
    assert found.nanoseconds(10) == 256 + 10 * (11 + recurrent.STEP)


def test_sums_in_registers_by_hand(unit):
    """Their way through shared memory is saved; every lane has all sums of its unit, and computes the cell for it."""
    small = Configuration(rows=1, threads=32, lanes=2, register_weights=4)
    found = recurrent.predict(unit, SMALL, small, batch=1)
    assert found.step == Cost(load=0, products=4 + 2 + recurrent.STEP, reduction=1, synchronisation=1)
    spec = RecurrentSpec(cells.lstm(), 64)
    of_two = replace(small, threads=128, register_weights=128)
    step = recurrent.predict(unit, spec, of_two, batch=1).step
    through_memory = recurrent.predict(unit, spec, replace(of_two, threads=256, register_weights=64), batch=1).step
    assert step.reduction == 4  # shuffles, of four sums that none of the two lanes may lack
    assert through_memory.reduction == 2 * 1 + 3  # of two sums, by two warps of a scheduler


def test_spilled_registers_cost_more_than_weights_in_shared_memory():
    """As measured: 0.696 and 0.632 ms (benchmarks/results/recurrent_search_h200.json, canonical GRU 1024/20)."""
    spec = RecurrentSpec(cells.gru(reset_after=False), 1024)
    crowded = Configuration(10, 1, 64, 256, 128, 192, 0, "half", "grid", 2)
    times = [
        recurrent.predict(device.machine("h200"), spec, configuration, 20).nanoseconds(100)
        for configuration in (crowded, replace(crowded, register_weights=168, shared_weights=160))
    ]
    assert times[0] > times[1]


def test_work_groups_of_three_by_hand(unit):
    # 20 groups of 3 in two warps: each sums at most one column, and a lane of it 4 of 12 units
    spec = replace(SMALL, units=12)
    found = recurrent.predict(unit, spec, Configuration(threads=64, lanes=3, register_weights=4), batch=1)
    # as above, with two shuffles: the last lane hands its sum to the first, then the second does
    assert found.step.products == 4 + 2 + recurrent.STEP
    assert found.step.reduction == 2 + 3


def test_a_cluster_hands_its_rows_round(unit):
    alone = Configuration(rows=2, threads=32, lanes=2, register_weights=4)
    cluster = replace(alone, ctas=2, exchange="cluster")
    found = recurrent.predict(unit, SMALL, cluster, batch=2)
    # 2 rows of 8 floats; 2 ns until they are seen
    assert found.step.load == 2 * 8 * 4
    assert found.step.synchronisation == 2 + 1
    # 3 ns over the whole grid, and 2 bytes a nanosecond
    grid = recurrent.predict(unit, SMALL, replace(cluster, exchange="grid"), batch=2)
    assert grid.step.load == pytest.approx(2 * 8 * 4 / 2)
    assert grid.step.synchronisation == 3 + 1


def test_slices_receive_less_and_meet(unit):
    """Two clusters of two: each block receives half of the state, and the sums of two for its 2 of the columns."""
    whole = Configuration(rows=2, ctas=4, threads=32, lanes=2, register_weights=16, exchange="grid")
    sliced = replace(whole, slices=2)
    loads, waits = (
        [getattr(recurrent.predict(unit, SMALL, each, batch=2).step, part) for each in (whole, sliced)]
        for part in ("load", "synchronisation")
    )
    width = 4  # units of a block, padded
    received = [2 * parts * width * 4 / 2 for parts in (4, 2)]
    assert loads == pytest.approx([received[0], received[1] + 2 * 2 * width * 4])
    assert waits == [3 + 1, 3 + 1 + 2]


def test_passes_hide_some_of_the_exchange(unit):
    one = Configuration(rows=2, threads=32, lanes=2, register_weights=4, ctas=2, exchange="cluster")
    plain = recurrent.predict(unit, SMALL, one, batch=2)
    split = recurrent.predict(unit, SMALL, replace(one, passes=2), batch=2)
    assert plain.hidden == 0
    assert split.step.load == plain.step.load  # half the rows, twice
    assert split.step.synchronisation == 2 * plain.step.synchronisation
    assert split.hidden == recurrent.HIDDEN * plain.step.synchronisation


def test_tensor_cores_wait_for_each_other_or_are_full(unit):
    # 8 rows, 16 columns, 128 deep: a warp sums all 8 chunks, or 4 warps 2 each
    spec = RecurrentSpec(cells.simple_rnn(), units=128, precision="tf32")
    alone = Configuration(8, 1, 8, 32, 32, 64, 0, "mma", "grid")
    shared = replace(alone, threads=128, lanes=128, register_weights=16)
    elementwise = recurrent.STEP + 2  # 128 units, one for each lane of a multiprocessor
    # two instructions of 1 ns for a chunk, and 12 operations to cut its numbers, four in a nanosecond
    found = [recurrent.predict(unit, spec, each, batch=8).step.products for each in (alone, shared)]
    clock = recurrent.TENSOR_CLOCK
    assert found == [clock * (8 * (2 + 12 / 4) + elementwise), clock * (2 * (2 + 12 / 4) + elementwise)]
    # one instruction of a chunk waits for that of the chunk before
    slow = replace(unit, tensor_chain=10.0)
    found = [recurrent.predict(slow, spec, each, batch=8).step.products for each in (alone, shared)]
    assert found == [clock * (8 * 10 + elementwise), clock * (2 * 10 + elementwise)]


def test_groups_that_do_not_fit_share_a_multiprocessor_or_wait(unit):
    # 8 multiprocessors: one group of 8 blocks, or 8 of one
    spec = replace(SMALL, units=32)
    wide = Configuration(ctas=8, threads=1024, lanes=2, register_weights=4, exchange="grid")  # all registers
    assert recurrent.predict(unit, spec, wide, batch=5).waves == 5
    assert recurrent.predict(unit, replace(spec, directions=2), wide, batch=5).waves == 10
    narrow = replace(wide, threads=32)
    alone, shared = (recurrent.predict(unit, spec, narrow, batch) for batch in (1, 4))
    assert shared.waves == 1
    assert alone.step.products < shared.step.products < 4 * alone.step.products  # a scheduler has more to overlap
    single = Configuration(threads=32, lanes=2, register_weights=64)
    assert recurrent.predict(unit, spec, single, 5) == recurrent.predict(unit, spec, single, 8)


@pytest.mark.parametrize(("units", "batch"), [(1, 1), (33, 7), (1000, 20)])
def test_every_configuration_fits_and_holds_its_weights(units, batch):
    machine = device.machine("h200")
    spec = RecurrentSpec(cells.lstm(), units)
    ranked = recurrent.rank(machine, spec, batch)
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
    machine = device.machine("h200")

    def best(units, batch=1):
        return recurrent.rank(machine, RecurrentSpec(cells.lstm(), units), batch)[0].configuration

    assert best(64).exchange == "single"
    assert (best(256).exchange, best(256).ctas) == ("cluster", 16)
    assert best(1024).exchange == "grid"


def test_weights_are_streamed_where_nothing_holds_them():
    machine = device.machine("h200")
    spec = RecurrentSpec(cells.lstm(), 4096)
    ranked = recurrent.rank(machine, spec, 1)
    assert ranked
    sizes = layout(spec, ranked[0].configuration, 90)
    assert any(gemm.chunks > gemm.registers + gemm.shared for gemm in sizes.gemms)
    # 268 MB at a step, over all multiprocessors
    assert ranked[0].step.load > 1e4


@pytest.mark.parametrize("reset_after", [True, False])
def test_weights_are_streamed_while_groups_take_turns_where_that_is_faster(reset_after):
    """GRUs of 2,048 units fit the chip, but with few rows at a time: 4 of 64 took 15.7 ms on an H200 (canonical)."""
    spec = RecurrentSpec(cells.gru(reset_after=reset_after), 2048)
    ranked = recurrent.rank(device.machine("h200"), spec, 64)

    def streams(prediction):
        gemms = layout(spec, prediction.configuration, 90).gemms
        return any(gemm.chunks > gemm.registers + gemm.shared for gemm in gemms)

    best = ranked[0]
    assert best.configuration.exchange == "grid"
    assert streams(best)
    assert best.waves > 1
    held = [each for each in ranked if not streams(each)]
    assert best.nanoseconds(100) < 0.5 * held[0].nanoseconds(100)


def test_launches_are_for_weights_that_nothing_holds():
    machine = device.machine("h200")

    def exchanges(units, batch):
        spec = RecurrentSpec(cells.gru(reset_after=False), units)
        return {each.configuration.exchange for each in recurrent.rank(machine, spec, batch)}

    assert exchanges(1024, 64) == {"grid"}
    assert exchanges(2048, 64) == {"grid", "launches"}


@pytest.mark.parametrize(("units", "batch"), [(7, 1), (512, 64), (2048, 16)])
def test_a_launch_reads_all_weights_and_needs_no_room_for_all_blocks(units, batch):
    """The best for each size: what a step loads are its weights at least; nothing lasts."""
    machine = device.machine("h200")
    spec = RecurrentSpec(cells.lstm(), units)
    best = recurrent.best_of_launches(machine, spec, batch)
    sizes = layout(spec, best.configuration, 90)
    assert all(gemm.registers == gemm.shared == 0 for gemm in sizes.gemms)
    assert best.waves == 1
    assert best.step.synchronisation > recurrent.LAUNCH
    bandwidth = max(rate for _, rate in machine.load_bandwidth) * machine.multiprocessors
    assert best.step.load > 16 * units * units / bandwidth
    most = max(fitted.ctas for fitted, _ in space.enumerate_launches(machine, spec, batch))
    assert most == (2 if units == 7 else units // 4)  # more than the 132 that run at once


def test_a_cell_of_one_block_has_no_launches():
    """One block waits for nobody as it is."""
    assert recurrent.best_of_launches(device.machine("h200"), RecurrentSpec(cells.lstm(), 4), 1) is None


def test_all_rows_come_together_where_weights_are_streamed():
    """A turn over some of the rows reads the weights again: registers are better spent on sums than on weights."""
    spec = RecurrentSpec(cells.lstm(), 2048)
    best = recurrent.rank(device.machine("h200"), spec, 64)[0].configuration
    sizes = layout(spec, best, 90)
    assert best.rows > 8
    assert all(8 * gemm.block == sizes.padded_rows for gemm in sizes.gemms)


def test_weights_leave_registers_that_the_compiler_would_spill():
    """Kernels for 64 rows of a canonical GRU of 1,024 units took 1,394 us with 192 weights a thread, 1,149 with
    136 on an H200."""
    spec = RecurrentSpec(cells.gru(reset_after=False), 1024)
    found = listed(device.machine("h200"), spec, 64)
    weights: dict[Configuration, set[int]] = {}
    for each in found:
        shape = replace(each, register_weights=0, shared_weights=0)
        weights.setdefault(shape, set()).add(each.register_weights)
    assert {136, 192} <= weights[Configuration(32, 1, 64, 256, 128, 0, 0, "half", "grid", 2)]
    # the compiler spills little of what ordinary products need
    assert all(len(found) == 1 for shape, found in weights.items() if not shape.tensor_cores)


@pytest.mark.parametrize(
    ("cell", "units", "precision"), [(cells.gru(reset_after=False), 1000, "highest"), (cells.lstm(), 800, "tf32")]
)
def test_what_cannot_hold_its_weights_is_left_out_early(cell, units, precision, monkeypatch):
    """Only to save time: what a layout would refuse."""
    machine, spec = device.machine("h200"), RecurrentSpec(cell, units, precision=precision)
    found = listed(machine, spec, 8)
    monkeypatch.setattr(space, "_could_hold", lambda *_: True)
    assert listed(machine, spec, 8) == found


def test_no_more_lanes_than_a_sum_has_chunks():
    """They would be the same kernel again: 64 products are 16 chunks of 4, or 4 of 16."""
    found = listed(device.machine("h200"), RecurrentSpec(cells.lstm(), 64), 20)
    assert {each.lanes for each in found if not each.tensor_cores} == {2, 4, 8, 16}
    assert {each.lanes for each in found if each.tensor_cores} == {32, 64, 128}


def test_old_devices_have_neither_clusters_nor_tensor_cores():
    machine = replace(device.machine("v100"), arch=75)
    kinds = {
        (each.configuration.exchange, each.configuration.product)
        for each in recurrent.rank(machine, RecurrentSpec(cells.gru(), 256), 20)
    }
    assert kinds == {("grid", "fma")}


@pytest.mark.parametrize(("arch", "shared"), [(87, 163), (100, 227), (120, 99), (999, 99)])
def test_devices_that_nobody_measured_have_configurations(arch, shared):
    """KiB of a block; of what is not known no more is taken than all devices have since 8.0."""
    machine = replace(device.machine("h200"), arch=arch)
    if arch < 90:
        machine = replace(machine, clusters=((1, 132),))
    spec = RecurrentSpec(cells.lstm(), 1000)
    found = space.enumerate_configurations(machine, spec, 20)
    assert found
    assert all(sizes.shared <= shared << 10 for _, sizes in found)
    assert max(sizes.shared for _, sizes in found) > 0.8 * (shared << 10)


def test_the_layout_of_each_is_its_own():
    """Predictions rely on it: what was laid out had more registers for weights than it took."""
    machine = device.machine("h200")
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
    cell, machine = cells.lstm(), device.machine("h200")
    spec = RecurrentSpec(differentiate(cell).backward if backward else cell, units)
    found = listed(machine, spec, batch)
    assert found
    for configuration in found[:: len(found) // 5 + 1]:
        layout(spec, configuration, machine.arch)
        assert recurrent.predict(machine, spec, configuration, batch).nanoseconds(100) > 0


def test_groups_take_turns_where_their_rows_do_not_fit_at_once():
    machine = device.machine("h200")
    spec = RecurrentSpec(differentiate(cells.lstm()).backward, 1024)
    (best, *_) = recurrent.rank(machine, spec, 200)
    at_once = {1: 132, 2: 132, 4: 120, 8: 120}[best.configuration.slices] // best.configuration.ctas
    assert best.waves == math.ceil(math.ceil(200 / best.configuration.rows) / at_once) > 1

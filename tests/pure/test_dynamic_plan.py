"""What a dynamic net keeps on chip, and how its nodes are cut between barriers: choices as data."""

from __future__ import annotations

import pytest

from benchmarks.dynamic.traffic import products_of, weight_traffic
from custom_ops.dynamic.codegen.gpu_program import build, kinds_of
from custom_ops.dynamic.codegen.on_chip import MOST_STAGED, Chip, ChipPlan, cycles_of_a_node, make_plan
from custom_ops.dynamic.codegen.segments import MatrixView
from custom_ops.dynamic.sections import BACK_LEVEL, LEVEL
from tests.dynamic_specs import tree_rnn

UNITS = 64
KINDS = kinds_of(tree_rnn(UNITS))
FORWARD = MatrixView(1, True, 0, 2 * UNITS, 0, UNITS)
BACKWARD = MatrixView(1, False, 0, UNITS, 0, 2 * UNITS)
LOGITS = MatrixView(3, True, 0, UNITS, 0, 3)


def homes(plan: ChipPlan) -> dict[MatrixView, str]:
    return {residence.view: residence.home for residence in plan.residences}


def test_a_level_has_a_barrier_behind_its_product_and_one_behind_the_rest() -> None:
    pair = KINDS[1]
    for section, first in ((LEVEL, "product"), (BACK_LEVEL, "rows")):
        segments = pair.sections[section].segments
        assert [segment.round for segment in segments] == [0, 1]
        assert (segments[0].call is not None) == (first == "product")


def test_what_is_multiplied_forward_and_backward_is_two_views() -> None:
    plan = make_plan(KINDS, Chip(processors=4))
    # the product with three labels' gradients is no product, but a sum of three
    assert homes(plan) == {FORWARD: "registers", BACKWARD: "registers", LOGITS: "registers"}


def test_rows_are_dealt_to_all_warps_of_all_processors() -> None:
    plan = make_plan(KINDS, Chip(processors=4, threads=256), rows=3)
    forward = plan.residences[0]
    # 64 outputs are 22 blocks of 3, for 4 processors of 8 warps
    assert (forward.rows, forward.blocks, forward.slots, forward.owned) == (3, 22, 1, 3)
    # 128 numbers of each of 3 rows, in 32 lanes
    assert forward.registers == 3 * 4
    # the next matrix begins where this one ends
    assert plan.residences[1].first == 22 % 4


def test_what_has_no_place_in_registers_goes_to_shared_memory_and_then_stays_in_l2() -> None:
    # with one processor a warp has 8 of the 64 outputs, 4 numbers each in a lane, or 16 of 128 with 2
    chip = Chip(processors=1, registers=32)
    assert homes(make_plan(KINDS, chip)) == {FORWARD: "registers", BACKWARD: "shared", LOGITS: "shared"}
    staging = 4 * 4 * 2 * UNITS
    small = Chip(processors=1, registers=32, shared=staging + 4 * 8 * 32 * 2)
    plan = make_plan(KINDS, small)
    assert homes(plan) == {FORWARD: "registers", BACKWARD: "L2", LOGITS: "shared"}
    assert plan.registers == 32
    assert plan.resident_bytes == 4 * (FORWARD.weights + LOGITS.weights)


def test_of_a_net_that_exceeds_the_chip_the_largest_that_levels_read_stay() -> None:
    units = 4096
    kinds = kinds_of(tree_rnn(units))
    plan = make_plan(kinds, Chip())
    found = homes(plan)
    forward, backward = MatrixView(1, True, 0, 2 * units, 0, units), MatrixView(1, False, 0, units, 0, 2 * units)
    logits = MatrixView(3, True, 0, units, 0, 3)
    # 128 MiB each, of which all registers and shared memories together have 56 MiB
    assert (found[forward], found[backward], found[logits]) == ("L2", "L2", "registers")
    assert plan.shared + plan.staging <= plan.chip.shared
    assert [each.home for each in plan.residences].count("L2") == 2
    # on a larger chip that fits whose rows a warp can hold: a row of 8192 numbers is more than its registers
    large = homes(make_plan(kinds, Chip(processors=1024)))
    assert (large[forward], large[backward]) == ("L2", "registers")


def test_levels_come_before_larger_matrices_that_are_read_once() -> None:
    views = list(homes(make_plan(kinds_of(tree_rnn(UNITS, classes=1000)), Chip(processors=1, registers=32))))
    assert views.index(FORWARD) < views.index(MatrixView(3, True, 0, UNITS, 0, 1000))


def test_weights_are_read_once_for_a_batch() -> None:
    plan = make_plan(KINDS, Chip(processors=4))
    products = products_of(plan, KINDS, [20, 19])
    assert products == {FORWARD: 19, BACKWARD: 19, LOGITS: 19}
    once = 4 * (FORWARD.weights + BACKWARD.weights + LOGITS.weights)
    assert weight_traffic(plan, products) == (once, 19 * once)


@pytest.mark.parametrize("home", ["registers", "shared", "L2"])
def test_a_plan_says_where_weights_are(home: str) -> None:
    chip = {
        "registers": Chip(processors=4),
        "shared": Chip(processors=4, registers=0),
        "L2": Chip(registers=0, shared=0),
    }[home]
    *wide, narrow = make_plan(KINDS, chip).residences
    assert all(each.home == home and each.rows in (1, 8) and not each.everywhere for each in wide)
    assert narrow.home == home
    assert narrow.everywhere


def test_products_of_vectors_that_lie_in_memory_may_be_in_tiles() -> None:
    facts = [dict(build(tree_rnn(UNITS), 90, Chip(processors=4), compile_source=lambda *_, **__: b"", tiles=tiles).more)
             for tiles in (True, False)]  # fmt: skip
    shapes = [[tuple(of[f"segment{n}"].split()[6:]) for n in range(int(of["segments"]))] for of in facts]
    # forward and backward; logits are every processor's
    assert sorted(set(shapes[0])) == [("0", "0"), ("128", "64"), ("64", "128")]
    assert set(shapes[1]) == {("0", "0")}


def test_the_cost_of_a_product_does_not_depend_on_the_rows_of_a_warp() -> None:
    chip = Chip(processors=4)
    costs = [[cycles_of_a_node(r, chip) for r in make_plan(KINDS, chip, rows).residences] for rows in (1, 2, 4)]
    assert costs[0] == costs[1] == costs[2]
    # 16 sums of a warp's outputs, 2 of 8 warps in each of 4 units; or 128 numbers that come by 24 bytes
    assert costs[0][0] == 50 + 2 * 4 * 8 // 4


def test_a_product_of_few_outputs_is_every_processors() -> None:
    plan = make_plan(KINDS, Chip(processors=4, threads=64))
    forward, backward, logits = plan.residences
    assert (logits.view, logits.everywhere, logits.slots) == (LOGITS, True, 2)  # 3 outputs for 2 warps
    assert not forward.everywhere
    assert not backward.everywhere
    facts = dict(build(tree_rnn(UNITS), 90, plan.chip, compile_source=lambda *_, **__: b"").more)
    runs = [facts[f"segment{number}"].split()[3:5] for number in range(int(facts["segments"]))]
    assert [first for first, count in runs if count == "0"] == ["0"] * sum(count == "0" for _, count in runs)
    assert sum(count != "0" for _, count in runs) == 2


def test_vectors_of_many_nodes_come_at_a_time_where_there_is_room() -> None:
    plan = make_plan(KINDS, Chip(processors=4))
    assert [residence.staged for residence in plan.residences] == [MOST_STAGED] * 3
    assert plan.staging == 4 * MOST_STAGED * 2 * UNITS
    small = make_plan(KINDS, Chip(processors=4, shared=4 * 8 * 2 * UNITS))
    assert [residence.staged for residence in small.residences] == [8, 16, 16]
    assert small.staging == small.chip.shared

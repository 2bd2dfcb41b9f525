"""Replicas: which exchanges they save, what they cost, and where they do not apply."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from custom_ops.errors import KernelError
from custom_ops.recurrent import cells
from custom_ops.recurrent.cell import Product
from custom_ops.recurrent.codegen.layout import layout
from custom_ops.recurrent.codegen.replicated_schedule import can_replicate, replicated_schedule
from custom_ops.recurrent.codegen.schedule import schedule
from custom_ops.recurrent.codegen.source import generate
from custom_ops.recurrent.differentiate import differentiate
from custom_ops.recurrent.search import ranking
from custom_ops.recurrent.spec import Configuration, RecurrentSpec
from graph_passes.analysis.cost import device_costs
from tests import addons_cells
from tests.recurrent_cells import chained, random_cells
from tests.tiers import examples

GRU = cells.gru(reset_after=False)
CLUSTER = Configuration(rows=2, ctas=8, lanes=8, exchange="cluster", replicated=True)


def test_a_canonical_gru_exchanges_once() -> None:
    plan = replicated_schedule(GRU)
    z, r, candidate = plan.gemms
    assert [gemm.replicated for gemm in plan.gemms] == [False, True, False]
    assert [gemm.stage for gemm in plan.gemms] == [0, 0, 1]
    assert (z.buffer, r.buffer, candidate.buffer) == (0, 2, 1)
    assert [buffer.kind for buffer in plan.buffers] == ["units", "local", "own", "parts"]
    # no CTA computes r * h for its own units beside those of all
    assert plan.replica
    assert not plan.live[r.products[0]]
    assert plan.replica.live[r.products[0]]
    assert len(plan.replica.kept) == 1  # of a step, its input


def test_the_reset_gate_in_parts() -> None:
    """As the paper has it: a CTA multiplies its own units of the state, and sends what it has of all of r."""
    plan = replicated_schedule(GRU)
    z, r, candidate = plan.gemms
    assert [gemm.parts for gemm in plan.gemms] == [None, 3, None]
    assert (z.buffer, r.buffer, candidate.buffer) == (0, 2, 1)
    _, r_times_h, own, parts = plan.buffers
    assert own.kind == "own"
    assert own.operands == plan.buffers[0].operands
    assert parts.kind == "parts"
    assert parts.operands == r.products
    assert [buffer.exchanged for buffer in plan.buffers] == [True, False, False, True]
    assert r_times_h.kind == "local"


def test_only_products_of_states_come_in_parts() -> None:
    """The second of three products in a row reads what every CTA makes for itself; it needs its weights."""
    plan = replicated_schedule(chained())
    assert [gemm.replicated for gemm in plan.gemms] == [True, True, False]
    assert [gemm.parts is not None for gemm in plan.gemms] == [True, False, False]


def test_what_is_stored_is_read_from_the_replicas() -> None:
    """Training keeps r: a CTA reads its own units of what it has of all."""
    plan = replicated_schedule(differentiate(GRU).forward)
    (r,) = (gemm for gemm in plan.gemms if gemm.replicated)
    assert plan.live[r.products[0]]


def test_a_chain_of_products_exchanges_once() -> None:
    plan = replicated_schedule(chained())
    assert plan.stages == 3
    assert [buffer.kind for buffer in plan.buffers] == ["units", "local", "local", "own", "parts"]
    assert [gemm.replicated for gemm in plan.gemms] == [True, True, False]
    # r and the state are read again two stages later
    assert plan.replica
    assert len(plan.replica.carried) == 2


@pytest.mark.parametrize(
    "cell",
    [
        cells.lstm(),
        cells.gru(),
        cells.simple_rnn(),
        addons_cells.nas(),
        addons_cells.layer_norm_lstm(8),  # sums over units that only their CTAs have
        differentiate(GRU).backward,  # its first product reads what follows from a state that no CTA sends
    ],
    ids=["lstm", "gru", "rnn", "nas", "layer norm", "gradient"],
)
def test_cells_without_an_exchange_to_save(cell: cells.Cell) -> None:
    assert not can_replicate(cell)
    with pytest.raises(KernelError, match="only its CTA can compute"):
        layout(RecurrentSpec(cell, 32), CLUSTER, 90)


@settings(max_examples=examples(60))
@given(random_cells())
def test_any_cell_is_refused_or_keeps_its_products(cell: cells.Cell) -> None:
    if not can_replicate(cell):
        return
    plain, plan = schedule(cell), replicated_schedule(cell)
    products = sorted(place for gemm in plan.gemms for place in gemm.products)
    assert products == sorted(place for gemm in plain.gemms for place in gemm.products)
    assert plan.replica
    for place, node in enumerate(cell.nodes):
        if isinstance(node, Product) and plain.live[place]:
            assert plan.live[place] or plan.replica.live[place]
    assert any(buffer.kind == "local" for buffer in plan.buffers)
    assert not any(buffer.kind == "local" for buffer in plan.buffers if buffer.stage == 0)
    generate(RecurrentSpec(cell, 8), CLUSTER, 90)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ctas": 1, "exchange": "single"}, "one CTA already has all units"),
        ({"product": "half", "lanes": 32}, "product 'half'"),
        ({"exchange": "grid", "slices": 2}, "2 slices"),
        ({"product": "mma", "lanes": 32}, "product 'mma'"),
    ],
)
def test_configurations_that_cannot_be(options: dict[str, object], words: str) -> None:
    with pytest.raises(KernelError, match=words):
        replace(CLUSTER, **options)  # type: ignore[arg-type]


def test_the_layout_by_hand() -> None:
    """64 units, 8 of each of 8 CTAs; 256 threads: z and the candidate have 8 columns of 16 lanes. r is 8 units deep for
    64 columns, 4 lanes for each, of which the sum's 2 chunks keep 2."""
    sizes = layout(RecurrentSpec(GRU, 64), CLUSTER, 90)
    z, r, candidate = sizes.gemms
    assert [gemm.columns for gemm in sizes.gemms] == [8, 64, 8]
    assert (z.lanes, candidate.lanes) == (16, 16)  # there are 16 chunks of 4 in a sum
    assert (r.columns, r.depth, r.lanes, r.thread_columns, r.chunks) == (64, 8, 2, 1, 1)
    assert (z.chunks, candidate.chunks) == (1, 1)
    # an input of r for the one (row, unit) of each thread, then weights: 4 + 4 + 4
    assert sizes.replica_items == 1
    assert sizes.weights == 1 + 12
    # two copies of the state, one of r * h
    first, second, own, parts = sizes.buffers
    assert (second.offset - first.offset, second.local) == (2 * 2 * 64 * 4, True)
    assert (own.width, own.parts, own.local) == (8, 1, True)
    assert (parts.operands, parts.width, parts.parts, parts.local) == (1, 64, 8, False)
    assert own.offset - second.offset == 2 * 64 * 4
    assert parts.offset - own.offset == 2 * 8 * 4
    assert z.results - parts.offset == 2 * 2 * 8 * 64 * 4  # two copies of two rows, from 8 CTAs


@pytest.mark.parametrize("exchange", ["cluster", "grid"])
@pytest.mark.parametrize("units", [1, 7, 33, 192])
def test_operands_reach_as_far_as_products_read(units: int, exchange: str) -> None:
    configuration = replace(CLUSTER, rows=8, lanes=32, exchange=exchange)  # type: ignore[arg-type]
    spec = RecurrentSpec(GRU, units)
    sizes = layout(spec, configuration, 90)
    for gemm, wanted in zip(sizes.gemms, replicated_schedule(GRU).gemms, strict=True):
        assert gemm.depth <= gemm.lanes * gemm.chunks * 4 <= sizes.buffers[wanted.buffer].stride
    assert sizes.gemms[0].results >= sizes.buffers[1].offset + sizes.padded_rows * sizes.buffers[1].stride * 4


def test_the_fallback_replicates_nothing() -> None:
    configuration = replace(CLUSTER, exchange="grid")
    source = generate(RecurrentSpec(GRU, 64), configuration, 90)
    kernel, fallback = source.split("namespace tfmem::fallback {")
    assert "at.template keep<1, 0>" in kernel
    assert "keep" not in fallback


def test_the_model_prices_one_exchange_and_what_it_sends_more() -> None:
    machine, spec = device_costs.machine("h200"), RecurrentSpec(GRU, 128)
    double = Configuration(ctas=8, lanes=8, exchange="cluster")
    twice, once = (
        ranking.predict(machine, spec, replace(double, replicated=flag), batch=1).step for flag in (False, True)
    )
    exchange = machine.cluster_handoff + machine.block_barrier
    assert twice.synchronisation == 2 * exchange
    # r * h through shared memory, and four barriers around the parts of r
    assert once.synchronisation == pytest.approx(exchange + 7 * machine.block_barrier)
    # 128 units of 8 CTAs' parts of r beside one exchange
    assert once.load - twice.load / 2 == pytest.approx(4 * 128 * 8 / machine.cluster_bandwidth)


WITHOUT_CLUSTERS = replace(device_costs.machine("h200"), arch=80, clusters=((1, 132),))  # as the paper's device


@pytest.mark.parametrize("units", [33, 160, 1000])
def test_replicas_are_ranked_where_they_fit_and_there_are_no_clusters(units: int) -> None:
    spec = RecurrentSpec(GRU, units)
    forms = {prediction.configuration.replicated for prediction in ranking.rank(WITHOUT_CLUSTERS, spec, 1)}
    assert forms == ({False, True} if units < 1000 else {False})  # 4 MB of weights of r are too many
    clustered = ranking.rank(device_costs.machine("h200"), spec, 1)
    assert not any(prediction.configuration.replicated for prediction in clustered)


def test_the_tuner_sees_the_best_of_all_forms_where_they_are_close() -> None:
    ranked = ranking.rank(WITHOUT_CLUSTERS, RecurrentSpec(GRU, 192), 1)
    ahead = ranked[:2]
    assert {p.configuration.replicated for p in ahead} == {False, True}
    for first in ahead:
        alike = [p for p in ranked if p.configuration.kind == first.configuration.kind]
        assert first.nanoseconds(100) == min(p.nanoseconds(100) for p in alike)

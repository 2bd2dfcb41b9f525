"""From a cell to a kernel's source: stages, places, errors, the golden source, the program's bytes, the cache."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import example, given, settings

from custom_ops.errors import KernelError
from custom_ops.jit.cache import Cache, UnusableError, digest
from custom_ops.jit.image import KernelImage
from custom_ops.machine import shared_memory
from custom_ops.recurrent import cells
from custom_ops.recurrent.codegen.layout import fallback_layout, layout
from custom_ops.recurrent.codegen.schedule import MOST_OPERANDS, StageBuffer, schedule
from custom_ops.recurrent.codegen.source import ENTRY, FALLBACK, generate, parameter_words
from custom_ops.recurrent.gpu_program import RecurrentProgram
from custom_ops.recurrent.spec import Configuration, RecurrentSpec
from tests import addons_cells
from tests.recurrent_cells import random_cells, side_by_side
from tests.tiers import examples

GOLDEN = Path(__file__).parents[1] / "golden" / "recurrent_lstm_256.cu"
CLUSTER = Configuration(ctas=16, threads=256, lanes=16, exchange="cluster")
LSTM = RecurrentSpec(cells.lstm(), 256)
PROGRAM = RecurrentProgram(
    KernelImage(90, "f", 256, b"\x7fELF\n\n\0 1", shared=2320, cluster=16), rows=2, ctas=16, max_batch=64
)


def test_the_golden_source() -> None:
    """What changes here changes every kernel. To accept: GOLDEN.write_text(generate(LSTM, CLUSTER, 90))."""
    assert generate(LSTM, CLUSTER, 90) == GOLDEN.read_text()


def test_an_lstm_has_one_product_and_one_exchange() -> None:
    plan = schedule(cells.lstm())
    assert plan.stages == 1
    (gemm,) = plan.gemms
    assert len(gemm.products) == 4
    assert [len(buffer.operands) for buffer in plan.buffers] == [1]
    assert plan.carried == ()


def test_a_buffer_has_as_many_operands_as_a_kernel_has_bits() -> None:
    plan = schedule(cells.lstm())
    fits = replace(plan, buffers=(StageBuffer(0, (plan.buffers[0].operands[0],) * MOST_OPERANDS),))
    assert fits.state_masks == ((1 << MOST_OPERANDS) - 1,)
    one_more = replace(plan, buffers=(StageBuffer(0, (0,) * (MOST_OPERANDS + 1)),))
    with pytest.raises(KernelError, match=f"{MOST_OPERANDS + 1} values .* at most {MOST_OPERANDS}"):
        assert one_more.state_masks


def test_a_canonical_gru_exchanges_twice() -> None:
    plan = schedule(cells.gru(reset_after=False))
    assert plan.stages == 2
    assert [(gemm.stage, len(gemm.products)) for gemm in plan.gemms] == [(0, 2), (1, 1)]
    assert [buffer.stage for buffer in plan.buffers] == [0, 1]
    assert len(plan.carried) == 2  # z and 1 - z, which the second stage reads


def test_row_sums_have_buffers_of_their_own() -> None:
    plan = schedule(addons_cells.layer_norm_lstm(64))
    sums = [buffer for buffer in plan.buffers if buffer.kind == "sums"]
    assert sums
    assert all(plan.place_of_sum(node) for buffer in sums for node in buffer.operands)


IN_REGISTERS = Configuration(threads=128, lanes=2, register_weights=128)


@pytest.mark.parametrize(
    ("units", "configuration", "sum_lanes"),
    [
        (64, IN_REGISTERS, 2),
        (64, replace(IN_REGISTERS, rows=2), 1),
        (64, replace(IN_REGISTERS, rows=4), 0),  # more rows than lanes
        (50, IN_REGISTERS, 2),  # 52 units, padded: 24 idle lanes
        (48, IN_REGISTERS, 0),  # an idle warp would fall behind
        (48, replace(IN_REGISTERS, threads=96), 2),
        (64, replace(IN_REGISTERS, threads=256, lanes=4), 4),
        (64, replace(IN_REGISTERS, threads=256, lanes=4, rows=2), 0),  # slower than through shared memory
        (256, replace(CLUSTER, threads=128, lanes=8), 8),
        (256, CLUSTER, 0),  # as are 16 lanes of 256 threads
        (256, replace(CLUSTER, threads=128, lanes=8, exchange="grid"), 8),
        (256, replace(CLUSTER, threads=128, lanes=8, exchange="grid", slices=2), 0),
        (8, replace(IN_REGISTERS, threads=32, lanes=4), 0),  # less to sum up than lanes
    ],
)
def test_where_sums_stay_in_registers(units: int, configuration: Configuration, sum_lanes: int) -> None:
    spec = RecurrentSpec(cells.lstm(), units)
    sizes = layout(spec, configuration, 90)
    assert sizes.sum_lanes == sum_lanes
    (gemm,), (buffer,) = sizes.gemms, sizes.buffers
    if sum_lanes:
        assert gemm.thread_columns == 4
        assert gemm.results - buffer.offset == 2 * configuration.rows * buffer.stride * 4  # two copies of the operands
        assert sizes.staging == gemm.results  # no room for results


def test_row_sums_do_not_stay_in_registers() -> None:
    assert layout(RecurrentSpec(addons_cells.layer_norm_lstm(64), 64), IN_REGISTERS, 90).sum_lanes == 0
    assert layout(RecurrentSpec(cells.gru(reset_after=False), 64), IN_REGISTERS, 90).sum_lanes == 2


def test_the_layout_of_an_lstm_by_hand() -> None:
    """16 units and 64 columns of a CTA; 16 lanes share 256 products: 4 chunks of 4, for 4 of the columns."""
    sizes = layout(LSTM, CLUSTER, 90)
    (gemm,) = sizes.gemms
    assert (sizes.tile, gemm.columns, gemm.depth) == (16, 64, 256)
    assert (gemm.lanes, gemm.thread_columns, gemm.chunks, gemm.registers) == (16, 4, 4, 4)
    assert sizes.weights == 256 * 64 // 256
    # an mbarrier for each parity, two copies of the operands, one of the results
    assert sizes.shared == 16 + 2 * 256 * 4 + 64 * 4
    assert sizes.scratch == 0


def test_slices_share_the_depth_of_the_columns_of_their_cluster() -> None:
    """4 CTAs of 16 units: the sums of 4 * 64 columns, over a quarter of the 256 units."""
    configuration = Configuration(rows=2, ctas=16, lanes=16, exchange="grid", slices=4)
    sizes = layout(LSTM, configuration, 90)
    (gemm,), (buffer,) = sizes.gemms, sizes.buffers
    assert (gemm.columns, gemm.depth, buffer.parts, buffer.stride) == (4 * 64, 256 // 4, 4, 256 // 4)
    assert sizes.weights == 256 * 64 // 256  # as without slices
    # two mbarriers; operands; results; two copies of the sums of 4 slices for 2 rows of 64 columns
    assert sizes.shared == 16 + 2 * 64 * 4 + 2 * 256 * 4 + 2 * 4 * 2 * 64 * 4
    assert sizes.scratch >= 2 * 2 * 256 * 4  # all operands of both copies


def test_weights_go_to_registers_then_to_shared_memory_then_to_scratch() -> None:
    configuration = replace(CLUSTER, register_weights=32, shared_weights=16)
    (gemm,) = layout(LSTM, configuration, 90).gemms
    assert (gemm.chunks, gemm.registers, gemm.shared) == (4, 2, 1)
    assert layout(LSTM, configuration, 90).scratch == 16 * 256 * 16 * 4  # one chunk of 16 weights a thread, 16 CTAs


@pytest.mark.parametrize(
    ("lanes", "found"),
    [
        (4, (4, 1, 16, 1, 64)),  # 8 subgroups in each of 8 warps
        (32, (32, 8, 2, 1, 64)),
        (96, (64, 16, 1, 2, 64)),  # a sum has no more chunks of 4
    ],
)
def test_subgroups(lanes: int, found: tuple[int, ...]) -> None:
    """64 columns of an LSTM's CTA, sums of 256."""
    (gemm,) = layout(LSTM, replace(CLUSTER, lanes=lanes), 90).gemms
    assert (gemm.lanes, gemm.thread_columns, gemm.chunks, gemm.partials, gemm.result_stride) == found


def test_warps_that_make_no_whole_subgroups_are_idle() -> None:
    """Sums of 512: 96 lanes are 2 subgroups of 256 threads, on either kind of core."""
    wide = replace(LSTM, units=512)
    for product, chunks, columns in (("fma", 2, 64), ("mma", 11, 4)):
        configuration = replace(CLUSTER, rows=8, lanes=96, product=product)  # type: ignore[arg-type]
        (gemm,) = layout(wide, configuration, 90).gemms
        assert (gemm.columns, gemm.lanes, gemm.partials) == (128, 96, 3)
        assert (gemm.chunks, gemm.thread_columns) == (chunks, columns)


@pytest.mark.parametrize("units", [1, 7, 33, 1000, 1024])
@pytest.mark.parametrize(
    ("exchange", "slices"), [("single", 1), ("cluster", 1), ("grid", 1), ("grid", 4), ("launches", 1)]
)
@pytest.mark.parametrize(("product", "lanes"), [("fma", 32), ("fma", 4), ("fma", 96), ("mma", 32), ("mma", 96)])
def test_places_do_not_overlap(units: int, exchange: str, slices: int, product: str, lanes: int) -> None:
    ctas = {"single": 1, "cluster": 16}.get(exchange, 128)
    configuration = Configuration(8, ctas, 256, lanes, 0, 0, product, exchange, slices)  # type: ignore[arg-type]
    spec = RecurrentSpec(addons_cells.layer_norm_lstm(units), units)
    try:
        sizes = layout(spec, configuration, 90)
    except KernelError as error:
        assert "shared memory" in str(error)  # noqa: PT017
        return
    places = [(b.offset, b.stride * sizes.padded_rows * 4 * (2 if exchange == "cluster" else 1)) for b in sizes.buffers]
    places += [(g.results, g.partials * sizes.padded_rows * g.result_stride * 4) for g in sizes.gemms]
    places += [(g.received, 2 * sizes.rows * g.columns * 4) for g in sizes.gemms if slices > 1]
    places += [(g.barrier, 16) for g in sizes.gemms if slices > 1]
    ends = [0]
    for start, size in sorted(places):
        assert start >= ends[-1]
        ends.append(start + size)
    assert ends[-1] <= sizes.shared <= shared_memory(90)
    assert sizes.tile * ctas >= units


def test_a_later_stage_takes_the_place_of_an_earlier_one() -> None:
    """In a grid, for operands that are asked for when the products before are over; alike, for what lies beyond a row
    has to stay zero."""
    spec = RecurrentSpec(cells.gru(reset_after=False), 100)
    grid = Configuration(rows=8, ctas=8, lanes=32, exchange="grid")
    first, second = layout(spec, grid, 90).buffers
    assert (first.offset, first.stride) == (second.offset, second.stride)
    assert first.exchanged != second.exchanged  # what is sent may come at any time
    for others in (replace(grid, exchange="cluster"), replace(grid, replicated=True)):
        first, second, *_ = layout(spec, others, 90).buffers
        assert first.offset != second.offset
    # sums are read by what follows the products, too
    normalised = layout(RecurrentSpec(addons_cells.layer_norm_lstm(100), 100), grid, 90).buffers
    assert len({buffer.offset for buffer in normalised}) == len(normalised)


@settings(max_examples=examples(40))
@given(random_cells())
@example(side_by_side())
def test_only_buffers_of_different_stages_share_a_place(cell: cells.Cell) -> None:
    sizes = layout(RecurrentSpec(cell, 40), Configuration(rows=2, ctas=8, exchange="grid"), 90)
    buffers = list(zip(sizes.buffers, schedule(cell).buffers, strict=True))
    for (one, wanted), (other, besides) in combinations(buffers, 2):
        apart = one.offset + 4 * 2 * one.stride <= other.offset or other.offset + 4 * 2 * other.stride <= one.offset
        shared = wanted.stage != besides.stage and "sums" not in (wanted.kind, besides.kind)
        assert apart or (shared and (one.offset, one.stride) == (other.offset, other.stride))


def test_a_fallback_fits_the_scratch_of_its_kernel() -> None:
    configuration = Configuration(rows=4, ctas=64, exchange="grid", lanes=32)
    assert fallback_layout(LSTM, configuration).scratch <= layout(LSTM, configuration, 90).scratch
    source = generate(LSTM, configuration, 80)
    assert f"{ENTRY}(" in source
    assert f"{FALLBACK}(" in source
    assert FALLBACK not in generate(LSTM, CLUSTER, 90)


@pytest.mark.parametrize("product", ["fma", "mma"])
def test_what_threads_keep_between_launches_has_a_place_of_its_own(product: str) -> None:
    """A canonical GRU: h, z and 1 - z, for each (row, unit) of each thread of each block; behind what is exchanged, and
    behind the weights, 100 by 20 for each product and block at least."""
    spec = RecurrentSpec(cells.gru(reset_after=False), 100)
    configuration = Configuration(8, 5, 256, 32, 0, 0, product, "launches")  # type: ignore[arg-type]
    sizes = layout(spec, configuration, 90)
    assert (sizes.tile, sizes.items) == (20, 1)
    sent = [buffer.exchanged + 2 * sizes.rows * 4 * buffer.operands * buffer.width * 5 for buffer in sizes.buffers]
    assert max(sent) <= min(gemm.streamed for gemm in sizes.gemms)
    first, second = (gemm.streamed for gemm in sizes.gemms)
    assert first + 4 * 2 * 100 * 100 <= second
    assert second + 4 * 100 * 100 <= sizes.kept
    assert sizes.kept + 4 * 3 * 256 * 5 <= sizes.scratch
    source = generate(spec, configuration, 90)
    assert "sweep_stage<" in source
    assert FALLBACK not in source  # its blocks do not wait
    grid = replace(configuration, exchange="grid")
    assert layout(spec, grid, 90).scratch < sizes.scratch
    assert "sweep_stage<" not in generate(spec, grid, 90)


def test_each_direction_has_its_pointers() -> None:
    """LSTM: gates, matrix, h and c before, outputs, h and c after."""
    assert parameter_words(LSTM) == 7 + 7
    assert parameter_words(replace(LSTM, directions=2)) == 7 + 14


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rows": 0}, "0 rows: expected at least 1"),
        ({"threads": 100}, "100 threads"),
        ({"lanes": 0}, "0 lanes"),
        ({"lanes": 33}, "33 lanes: expected a power of two up to 32, or a multiple of 32"),
        ({"lanes": 12}, "12 lanes"),
        ({"lanes": 48}, "48 lanes"),
        ({"lanes": 288}, "288 lanes: .* up to the 256 threads"),
        ({"product": "mma", "lanes": 48}, "48 lanes"),
        ({"ctas": 2}, "'single' is for exactly one CTA"),
        ({"ctas": 32, "exchange": "cluster"}, "at most 16"),
        ({"product": "mma", "lanes": 16}, "whole warp"),
        ({"ctas": 6, "exchange": "grid", "slices": 4}, "4 slices of 6 CTAs"),
        ({"ctas": 8, "exchange": "cluster", "slices": 4}, "for 'grid' alone"),
        ({"ctas": 32, "exchange": "grid", "slices": 32}, "at most 16 CTAs"),
        ({"ctas": 8, "exchange": "launches", "replicated": True}, "replicated=True, .*'launches' supports neither"),
        ({"ctas": 8, "exchange": "launches", "product": "half", "lanes": 32}, "nor product 'half'"),
        ({"ctas": 8, "exchange": "launches", "slices": 2}, "for 'grid' alone"),
    ],
)
def test_configurations_that_cannot_be(options: dict[str, object], words: str) -> None:
    with pytest.raises(KernelError, match=words):
        Configuration(**options)  # type: ignore[arg-type]


def test_what_does_not_fit_says_what_is_too_large() -> None:
    with pytest.raises(KernelError, match=r"needs? compute capability 9\.0"):
        layout(LSTM, CLUSTER, 80)
    with pytest.raises(KernelError, match="bytes of shared memory"):
        layout(LSTM, Configuration(shared_weights=1 << 20, register_weights=0), 90)
    with pytest.raises(KernelError, match="weights in the registers"):
        layout(LSTM, Configuration(threads=1024, register_weights=256), 90)


@pytest.mark.parametrize("options", [{"units": 0}, {"dtype": "float64"}, {"precision": "fast"}, {"directions": 0}])
def test_specifications_that_cannot_be(options: dict[str, object]) -> None:
    with pytest.raises(KernelError):
        replace(LSTM, **options)  # type: ignore[arg-type]


def test_a_program_as_the_op_library_reads_it() -> None:
    digest = "958f42be348012d234675ed0f2e58333e1f418ab861a73f1da3e80beecc67778"
    assert PROGRAM.to_text().splitlines() == [
        "kernel 1", "kind cubin", "arch 90", "entry f", "threads 256", "shared 2320", "cluster 16", "cooperative 0",
        f"digest {digest}", "rows 2", "ctas 16", "scratch 0", "stages 0", "max_batch 64",
    ]  # fmt: skip
    assert "fallback g" in replace(PROGRAM, fallback="g").to_text().splitlines()


def test_a_cache_makes_each_artifact_once(tmp_path: Path) -> None:
    made: list[str] = []
    cache = Cache(tmp_path)

    def make() -> bytes:
        made.append("x")
        return b"artifact"

    assert cache.get(digest("a"), make) == cache.get(digest("a"), make) == b"artifact"
    assert len(made) == 1
    assert digest("a", "b") != digest("ab", "")


def test_threads_may_share_a_cache(tmp_path: Path) -> None:
    found: list[bytes] = []
    threads = [
        Thread(target=lambda: found.append(Cache(tmp_path).get(digest("k"), lambda: b"y" * 100_000))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"y" * 100_000] * 8
    assert len([file for file in tmp_path.rglob("*") if file.is_file()]) == 1  # nothing is left aside


@pytest.mark.parametrize("change", ["shorter", "longer", "other", "empty", "moved", "fifo", "folder"])
def test_a_file_that_is_not_what_was_written_is_made_again(change: str, tmp_path: Path) -> None:
    cache, key = Cache(tmp_path), digest("k")
    cache.get(key, lambda: b"\x7fELF")
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    content = file.read_bytes()
    if change in ("fifo", "folder"):
        file.unlink()
        os.mkfifo(file) if change == "fifo" else file.mkdir()
    elif change == "moved":
        cache.get(digest("other"), lambda: b"\x7fPTX")
        Path(tmp_path, digest("other")[:2], digest("other")[2:]).replace(file)
    else:
        changed = {"shorter": content[:-1], "longer": content + b"x", "other": content[:-1] + b"x", "empty": b""}
        file.write_bytes(changed[change])
    found: list[bytes] = []
    thread = Thread(target=lambda: found.append(cache.get(key, lambda: b"\x7fELF")), daemon=True)
    thread.start()
    thread.join(20)
    assert found == [b"\x7fELF"]
    if change != "folder":
        assert file.read_bytes() == content


def test_what_cannot_be_parsed_is_made_again(tmp_path: Path) -> None:
    def parse(data: bytes) -> int:
        if not data.isdigit():
            raise UnusableError("no number")
        return int(data)

    cache = Cache(tmp_path)
    cache.get("key", lambda: b"text")
    assert cache.read("key", lambda: b"7", parse) == cache.read("key", lambda: b"8", parse) == 7


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert Cache(tmp_path / "file").get(digest("k"), lambda: b"z") == b"z"

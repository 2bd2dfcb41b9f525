"""The templates that there are for a pattern, and how the model ranks them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from custom_ops.expr.text import from_text
from custom_ops.fusion.codegen.kernel import FusionKernel, make
from custom_ops.fusion.codegen.plan.kernel_plan import PatternConfiguration
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.fusion.search.bench import candidates, point
from custom_ops.fusion.search.kernel_model import Gpu, h200, predict, ranked
from custom_ops.fusion.search.space import RowLayout, Rows, Templates, components, kernels, layouts
from custom_ops.machine import DEVICES
from tests.fusion_products import product
from tests.fusion_programs import GELU, LAYER_NORM_GRADIENT, SOFTMAX, adam, programs

PROCESSORS = 132


def best(text: str, shapes: list[tuple[int, ...]]) -> FusionKernel:
    """The one that is ranked first, of unknown rows."""
    pattern = Pattern.of(from_text(text), [(None, *shape[1:]) if len(shape) > 1 else shape for shape in shapes])
    sizes = pattern.program.sizes(pattern.merged(shapes))
    return ranked(list(kernels(pattern, sizes, layouts(pattern, PROCESSORS))), shapes)[0][0]


@pytest.mark.parametrize("name", list(programs(1, 1)))
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1000, 777)])
def test_every_pattern_has_kernels_whatever_its_sizes(name: str, rows: int, columns: int) -> None:
    program, tensors = programs(rows, columns)[name]
    shapes = [tensor.shape for tensor in tensors]
    for known in (None, shapes):
        pattern = Pattern.of(program, known)
        found = candidates(pattern, PROCESSORS)(point(shapes))
        assert found
        assert [time for _, time in found] == sorted(time for _, time in found)
        assert len({configuration for configuration, _ in found}) == len(found)


def written(text: str, shapes: list[tuple[int, ...]], rows: Rows, each: int, split: bool, known: bool = True) -> str:
    """The template of a stitching of one component, in 1056 CTAs of 256 threads."""
    pattern = Pattern.of(from_text(text), shapes if known else None)
    groups = components(pattern)
    layout = RowLayout(256, 4, each, 1056, split, cache=False)
    sizes = pattern.program.sizes(pattern.merged(shapes))
    return Templates(pattern, sizes, groups, layout).text((rows,) * len(groups))


FLAT, COLUMNS = "GRID_1056-CTA_256", "GRID_1056-CTA_32-WARP_8"


def gradient_shapes(columns: int) -> list[tuple[int, ...]]:
    return [(1000, columns), (1000, columns), (columns,), (1000,), (1000,)]


@pytest.mark.parametrize(
    ("columns", "known", "together"), [(768, True, True), (3000, True, False), (768, False, False)]
)
def test_sums_over_rows_are_added_up_within_these_rows_where_they_fit(
    columns: int, known: bool, together: bool
) -> None:
    """Eight warps of a CTA have a row each, and 64 registers a thread for sums: 8 * 768 numbers are no more than
    64 * 256, 8 * 3000 are, and none is kept of a size that is not known. Elsewhere they have separate rows."""
    found = written(LAYER_NORM_GRADIENT, gradient_shapes(columns), frozenset({0}), columns // 24, False, known)
    row = "[GRID_1056-WARP_8,CTA];"
    over, outputs = (row, COLUMNS) if together else (f"[WARP,{COLUMNS}];", FLAT)
    assert found == (
        f"reduce_8{row}reduce_10{row}reduce_16{over}reduce_17{over}"
        f"output_0{row}output_1[{outputs}];output_2[{outputs}];"
    )


TRANSPOSED = """program 1
axes 0 6 8
tensor float32 3
tensor float32 1
input 0 a0 a2 a1
input 1 a1
multiply 0 1
reduce sum 2 1 2
subtract 2 3
reduce sum 4 0
output 5 2 1
"""


def test_sums_over_rows_whose_loops_have_another_order_are_added_up_apart() -> None:
    """Loops run along axis 1 last, as tensors lie; the sums that rows would leave have axis 2 last."""
    shapes = [(1000, 8, 6), (6,)]
    pattern = Pattern.of(from_text(TRANSPOSED), shapes)
    assert pattern.in_order((1, 2)) == (2, 1)
    found = [make(pattern, configuration) for configuration, _ in candidates(pattern, PROCESSORS)(point(shapes))]
    assert found
    assert all(kernel.source.text for kernel in found)
    assert not any(mapping.over_rows for kernel in found for mapping in kernel.plan.mappings.values())


def test_a_row_is_shared_out_over_a_power_of_two_of_ctas() -> None:
    """Four rows of 100,000: 1056 CTAs would do for 264 each, but 256 threads see four elements of only 97 parts."""
    slabs = "[GRID_1056,GRID_64-CTA_256];"
    found = written(SOFTMAX, [(4, 100_000)], frozenset({0}), 4, True)
    assert found == f"reduce_1{slabs}reduce_4{slabs}output_0{slabs}"


def test_outputs_that_put_parts_together_have_several_threads_for_each_position() -> None:
    """Sums of 512 columns by warps of a CTA, each over one of 64 slabs of rows: 32 columns a CTA leave room for 66.
    The outputs that read no sum have a thread for each position."""
    found = written(GELU, [(8192, 512), (512,), (8192, 512)], None, 4, True)
    flat = f"[{FLAT},{FLAT}];"
    assert found == f"reduce_22[GRID_64-WARP_8,{COLUMNS}];output_0{flat}output_1{flat}output_2[{COLUMNS}];"


def owners(kernel: FusionKernel) -> set[str]:
    return {piece.owner.kind for piece in kernel.plan.pieces}


def test_rows_are_owned_by_what_their_length_asks_for() -> None:
    """Short rows by lanes or threads, long ones by a CTA, and one that is longer yet by several."""
    short = best(SOFTMAX, [(1_000_000, 8)])
    long = best(SOFTMAX, [(2000, 20_000)])
    longer = best(SOFTMAX, [(1, 10_000_000)])
    assert owners(short) <= {"lanes", "thread"}
    assert owners(long) == {"cta"}
    assert (short.plan.phases, long.plan.phases) == (1, 1)
    assert longer.plan.phases == 3
    assert max(piece.slabs for piece in longer.plan.pieces) >= PROCESSORS / 2


def test_what_reads_the_same_is_one_piece() -> None:
    """A gradient and its sums over rows: whichever way, the inputs are read once."""
    kernel = best(GELU, [(8192, 3072), (3072,), (8192, 3072)])
    (reading,) = [piece for piece in kernel.plan.pieces if piece.roots[0].name == "reduce_22"]
    assert {root.name for root in reading.roots} == {"reduce_22", "output_0", "output_1"}


def test_many_threads_put_parts_together() -> None:
    """All kernels of sums over rows of which each CTA has a part."""
    shapes = [(8192, 3072), (3072,), (8192, 3072)]
    pattern = Pattern.of(from_text(GELU), shapes)
    sizes = pattern.program.sizes(pattern.merged(shapes))
    for kernel in kernels(pattern, sizes, layouts(pattern, PROCESSORS)):
        for piece in kernel.plan.pieces:
            if piece.combined and not piece.tiled:
                assert piece.owner.threads > 1
                assert piece.owner.kind in ("strided", "cta", "lanes")


def test_variables_do_not_wait_for_each_other() -> None:
    program, tensors = adam([(40, 30), (7,), (9, 9, 9)])
    pattern = Pattern.of(program, [tensor.shape for tensor in tensors])
    assert sorted(len(group) for group in components(pattern)) == [1, 1, 3, 3, 3]


def test_more_bytes_take_longer_and_so_does_a_barrier() -> None:
    shapes = [(4096, 1024)]
    kernel = best(SOFTMAX, shapes)
    time = predict(kernel, shapes)
    moved = 2 * 4096 * 1024 * 4 / h200().bandwidth
    assert moved < time < 2 * moved + 2 * h200().launch
    assert predict(kernel, [(8192, 1024)]) > 1.5 * time
    slow = replace(h200(), bandwidth=h200().bandwidth / 2)
    assert predict(kernel, shapes, slow) > 1.5 * time
    longer, row = best(SOFTMAX, [(1, 10_000_000)]), [(1, 10_000_000)]
    assert longer.plan.cooperative
    waiting = replace(h200(), grid_barrier=h200().grid_barrier + 1000)
    assert predict(longer, row, waiting) == pytest.approx(predict(longer, row) + 2000)


@pytest.mark.parametrize(("columns", "cached"), [(None, 2), (256, 0)])
def test_what_is_waited_for_takes_its_time(columns: int | None, cached: int) -> None:
    """A row that one CTA loads at once waits for device memory, and in two more loops for the cache; where its size is
    known these find it in registers."""
    shapes = [(1, 256)]
    text = "".join(f"{root}[GRID_1,CTA];" for root in ("reduce_1", "reduce_4", "output_0"))
    kernel = make(Pattern.of(from_text(SOFTMAX), [(None, columns)]), PatternConfiguration(text, 256))
    for name, loops in (("latency", 1), ("cache_latency", cached)):
        slower = replace(h200(), **{name: getattr(h200(), name) + 1000})
        assert predict(kernel, shapes, slower) - predict(kernel, shapes) == pytest.approx(1000 * loops, abs=100)


@pytest.mark.parametrize(("rows", "used", "unused"), [(64, "tensor", "fma"), (4, "fma", "tensor")])
def test_a_product_takes_what_a_profile_says_of_multiplying(rows: int, used: str, unused: str) -> None:
    """Many rows are multiplied on tensor cores, few by FMAs; either way threads begin, and sums are loaded."""
    program, given = product(rows, 64, 256)
    shapes = [each.shape for each in given]
    pattern = Pattern.of(program, shapes)
    layout = RowLayout(128, 4, 4, 6, split=False, cache=False)
    kernel = next(kernels(pattern, pattern.program.sizes(pattern.merged(shapes)), [layout]))
    plain = predict(kernel, shapes, Gpu.of(DEVICES / "h200.json"))
    for name in (used, "thread", "shared_load"):
        assert predict(kernel, shapes, replace(h200(), **{name: 2 * getattr(h200(), name)})) > plain
    assert predict(kernel, shapes, replace(h200(), **{unused: 2 * getattr(h200(), unused)})) == plain


def test_half_types_are_moved_as_two_bytes() -> None:
    """A kernel of so many numbers that moving them takes the most time."""

    def seconds(dtype: str) -> float:
        program = from_text(f"program 1\naxes 0\ntensor {dtype} 1\ninput 0 a0\nadd 0 0\noutput 1 0\n")
        made = make(Pattern.of(program), PatternConfiguration(f"output_0[{FLAT}];", 256, 4))
        return predict(made, [(1 << 24,)])

    assert seconds("bfloat16") == seconds("float16")
    assert seconds("float32") - seconds("float16") == pytest.approx(2 * 2 * (1 << 24) / h200().bandwidth, rel=0.01)

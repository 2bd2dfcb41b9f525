"""The templates that there are for a pattern, and how the model ranks them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from custom_ops.expr.text import from_text
from custom_ops.fusion.codegen.bench import candidates, point
from custom_ops.fusion.codegen.kernel import FusionKernel
from custom_ops.fusion.codegen.model import H200, predict, ranked
from custom_ops.fusion.codegen.pattern import Pattern
from custom_ops.fusion.codegen.space import components, kernels, layouts
from tests.fusion_programs import GELU, SOFTMAX, adam, programs

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
    """Of sums over rows, of which each CTA has a part, in all kernels that there are."""
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
    moved = 2 * 4096 * 1024 * 4 / H200.bandwidth
    assert moved < time < 2 * moved + 2 * H200.launch
    assert predict(kernel, [(8192, 1024)]) > 1.5 * time
    slow = replace(H200, bandwidth=H200.bandwidth / 2)
    assert predict(kernel, shapes, slow) > 1.5 * time
    longer, row = best(SOFTMAX, [(1, 10_000_000)]), [(1, 10_000_000)]
    assert longer.plan.cooperative
    waiting = replace(H200, grid_barrier=H200.grid_barrier + 1000)
    assert predict(longer, row, waiting) == pytest.approx(predict(longer, row) + 2000)

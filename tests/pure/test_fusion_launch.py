"""How many CTAs a launch has: no more at once than the device runs, where they wait for each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from custom_ops.errors import KernelError
from custom_ops.expr.text import from_text
from custom_ops.fusion.codegen.description import describe
from custom_ops.fusion.codegen.kernel import FusionKernel, fit, make
from custom_ops.fusion.codegen.plan.kernel_plan import PatternConfiguration
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.fusion.programs import by_model
from custom_ops.fusion.search.kernel_model import h200, surely_runs
from custom_ops.fusion.search.ranking import Ranking
from tests.fusion_programs import SOFTMAX

SHAPES = [(10, 4096)]


def split_softmax() -> FusionKernel:
    """At most three rows at once, each shared out over four CTAs: a phase of 12 CTAs."""
    text = "".join(f"{root}[GRID_3,GRID_4-CTA_64];" for root in ("reduce_1", "reduce_4", "output_0"))
    return make(Pattern.of(from_text(SOFTMAX), SHAPES), PatternConfiguration(text, 64))


@pytest.mark.parametrize(("resident", "ctas"), [(0, 12), (100, 12), (12, 12), (11, 8), (8, 8), (7, 4), (4, 4)])
def test_a_cooperative_launch_fits_the_device(resident: int, ctas: int) -> None:
    """With a multiple of the four that share a row; 0 is any number."""
    kernel = split_softmax()
    assert kernel.plan.cooperative
    launch = kernel.launch(SHAPES, resident)
    assert launch.ctas == ctas
    assert launch.of_pieces == ((0, ctas),) * len(kernel.plan.pieces)


@pytest.mark.parametrize("resident", [1, 3])
def test_a_row_that_more_ctas_share_than_run_at_once_is_refused(resident: int) -> None:
    with pytest.raises(KernelError, match=f"a phase of 1 pieces does not fit {resident} CTAs at once"):
        split_softmax().launch(SHAPES, resident)


PIECES = some.lists(some.tuples(some.integers(1, 10**6), some.integers(1, 8)), min_size=1, max_size=6)


@given(PIECES, some.integers(0, 200))
def test_ctas_of_several_pieces_fit_wherever_one_of_each_does(pieces: list[tuple[int, int]], more: int) -> None:
    """A piece of few rows and two of many took 133 CTAs on a GPU that runs 132: shares were rounded up, none down."""
    slabs = [each for _, each in pieces]
    counts = [count * each for count, each in pieces]
    resident = sum(slabs) + more
    fitted = fit(counts, slabs, resident)
    assert sum(fitted) <= resident
    assert all(each <= count and not each % share for each, count, share in zip(fitted, counts, slabs, strict=True))
    assert all(each >= share for each, share in zip(fitted, slabs, strict=True))


def test_three_pieces_of_which_one_is_small_fit() -> None:
    assert fit([10_000, 10_000, 1], [1, 1, 1], 132) == [65, 65, 1]
    assert fit([1, 1, 10_000], [1, 1, 1], 132) == [1, 1, 130]


@pytest.mark.parametrize("processors", [1, 2])
def test_a_kernel_that_is_never_tried_is_sure_to_run(processors: int) -> None:
    """Few long rows are shared out over many CTAs, which wait for each other; such a kernel is ranked first here."""
    pattern, shapes = Pattern.of(from_text(SOFTMAX), [(2, 1 << 16)]), ((2, 1 << 16),)
    gpu = replace(h200(), processors=processors)
    ranked = Ranking()(pattern, shapes, processors)
    sure = [surely_runs(make(pattern, found), shapes, gpu) for found, _ in ranked]
    assert set(sure) == {True, False}
    unsure_first = [each for _, each in sorted(zip(sure, ranked, strict=True), key=lambda pair: pair[0])]
    ranking = Ranking(found={(pattern.digest, shapes, processors): unsure_first})
    assert by_model(processors, ranking)(pattern, shapes) == ranked[sure.index(True)][0]


def test_a_size_is_described_by_a_dimension_along_its_own_axis() -> None:
    """Rows lie along axis 0, which tensor 1 has; the tensor before it has axis 1 alone."""
    text = "program 1\naxes 0 0\ntensor float32 1\ntensor float32 2\ninput 0 a1\ninput 1 a0 a1\nadd 0 1\n"
    pattern = Pattern.of(from_text(text + "reduce max 2 1\noutput 3 0\n"))
    rows = "GRID_4-WARP_2"
    lines = describe(make(pattern, PatternConfiguration(f"reduce_3[{rows},CTA];output_0[{rows}];", 64)))
    assert lines["pieces"] == "0/4/1/2*1:0:0"
    assert lines["words"] == "tensor:0 tensor:1 output:0 extent:1:0:0 extent:0:0:0"

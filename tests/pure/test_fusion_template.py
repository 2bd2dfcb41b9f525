"""Templates as text, what attributes mean, and what a template makes of a pattern: phases, pieces, loops."""

from __future__ import annotations

import pytest

from custom_ops.errors import KernelError
from custom_ops.expr.text import from_text
from custom_ops.fusion.codegen.kernel import make
from custom_ops.fusion.codegen.plan.kernel_plan import PatternConfiguration, plan
from custom_ops.fusion.codegen.plan.mapping import Mapping, Owner, mapping
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.fusion.codegen.plan.pattern_axes import grouped
from custom_ops.fusion.codegen.plan.template import Level, RootSchedule, parse
from tests.fusion_programs import BATCH_NORM, LAYER_NORM_GRADIENT, SOFTMAX, adam

ROWS = "GRID_1056-WARP_8"
SOFTMAX_ROWS = f"reduce_1[{ROWS},CTA];reduce_4[{ROWS},CTA];output_0[{ROWS},CTA];"


def test_the_papers_schedules_are_read_and_written() -> None:
    text = "reduce_1[GRID,WARP,WARP,CTA]S;dot_1[GRID_128-WARP_2,WARP,WARP,CTA]S;mul_1[GRID,CTA,CTA,THREAD];"
    found = parse(text)
    grid = (Level("GRID", 128), Level("WARP", 2))
    assert found.schedules[1] == RootSchedule(
        "dot_1", (grid, (Level("WARP"),), (Level("WARP"),), (Level("CTA"),)), True
    )
    assert str(found) == text
    assert parse("reduce_1 [GRID, CTA] S;\n output_0[];") == parse("reduce_1[GRID,CTA]S;output_0[];")


@pytest.mark.parametrize(
    "text", ["", "reduce_1[GRID,CTA]", "reduce_1[GRID,,CTA];", "reduce_1[BLOCK];", "a[GRID-WARP_2];", "a[GRID];b[CTA"]
)
def test_what_is_no_template_is_refused(text: str) -> None:
    with pytest.raises(KernelError, match="cannot read"):
        parse(text)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("[GRID_9,CTA]", Mapping((0,), Owner("cta", 1, 256), 9, (1,))),
        ("[GRID_9-WARP_8,CTA]", Mapping((0,), Owner("lanes", 8, 32), 9, (1,))),
        ("[GRID_9-CTA_32,CTA]", Mapping((0,), Owner("lanes", 32, 8), 9, (1,))),
        ("[GRID_9-CTA_256,THREAD]", Mapping((0,), Owner("thread", 256, 1), 9, (1,))),
        ("[GRID_9-CTA_32-WARP_8,WARP]", Mapping((0,), Owner("strided", 32, 8), 9, (1,))),
        ("[GRID_9,GRID_4-CTA_256]", Mapping((0,), Owner("cta", 1, 256), 9, (1,), slabs=4, over_slabs=True)),
        ("[CTA,GRID_9]", Mapping((1,), Owner("cta", 1, 256), 9, (0,), over_rows=True)),
        ("[GRID_9-CTA_256,GRID_9-CTA_256]", Mapping((0, 1), Owner("thread", 256, 1), 9)),
        ("[WARP,CTA]S", Mapping((), Owner("cta", 1, 256), 1, (0,), (1,), "warps")),
        ("[CTA,THREAD]S", Mapping((), Owner("cta", 1, 256), 1, (0,), (1,), "serial")),
    ],
)
def test_attributes_of_a_reduction(schedule: str, expected: Mapping) -> None:
    """The attributes of the maximum over axis 1, or over both where both are rows, in CTAs of 256 threads."""
    over_all = schedule.startswith("[GRID_9-CTA_256,GRID")
    reduced = "reduce max 0 0 1\noutput 1\n" if over_all else "reduce max 0 1\noutput 1 0\n"
    pattern = Pattern.of(from_text(f"program 1\naxes 0 0\ntensor float32 2\ninput 0 a0 a1\n{reduced}output 0 1 0\n"))
    expected = Mapping(expected.rows, expected.owner, 9, over_rows=True) if over_all else expected
    assert mapping(pattern, pattern.roots[0], parse(f"reduce_1{schedule};").schedules[0], 256) == expected


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        ("[GRID_9-WARP_4,CTA]", "CTAs of 256 threads"),
        ("[GRID_9-CTA_48,CTA]", "CTAs of 256 threads"),
        ("[GRID_9-WARP_8,THREAD]", "expected CTA for all"),
        ("[GRID_9-WARP_8,GRID_4-CTA_32]", "all others are split"),
        ("[WARP,THREAD]S", "an array within a row"),
        ("[CTA,THREAD]", "an array within a row"),
        ("[GRID_9,CTA-THREAD_2]", "cannot read"),
        ("[GRID_9]", "2 attributes"),
    ],
)
def test_what_means_nothing_is_refused(schedule: str, reason: str) -> None:
    pattern = Pattern.of(from_text(SOFTMAX))
    with pytest.raises(KernelError, match=reason):
        mapping(pattern, pattern.roots[0], parse(f"reduce_1{schedule};").schedules[0], 256)


@pytest.mark.parametrize(("longer", "axes"), [(1000, (0,)), (1024, (1000,))])
def test_an_axis_keeps_its_size_where_a_tensor_is_longer(longer: int, axes: tuple[int, ...]) -> None:
    """The first 1000 numbers of one tensor are added to all of another; the shapes do not say how many."""
    both = "tensor float32 1\ntensor float32 1\ninput 0 a0\ninput 1 a0\nadd 0 1\n"
    pattern = Pattern.of(from_text(f"program 1\naxes 1000\n{both}output 2 0\n"), [(1000,), (longer,)])
    assert pattern.program.axes == axes
    assert pattern.program.sizes(pattern.merged([(1000,), (longer,)])) == (1000,)


def test_softmax_is_one_piece_of_three_loops() -> None:
    """Its maximum, its sum and its output follow each other within a row."""
    made = plan(Pattern.of(from_text(SOFTMAX), [(None, 1000)]), PatternConfiguration(SOFTMAX_ROWS, 256, 4))
    (piece,) = made.pieces
    assert [[root.name for root in loop.roots] for loop in piece.loops] == [["reduce_1"], ["reduce_4"], ["output_0"]]
    assert (piece.rows, piece.owner, made.phases, made.cooperative) == ((0,), Owner("lanes", 8, 32), 1, False)


def test_a_gradient_and_its_column_sums_are_read_once() -> None:
    """Layer normalisation: a loop over a row for what both reductions take, a loop for all else, and parts of the sums
    over rows that a second phase puts together."""
    columns = "GRID_3-CTA_256"
    text = "".join(f"{name}[{ROWS},CTA];" for name in ("reduce_8", "reduce_10", "reduce_16", "reduce_17", "output_0"))
    text += f"output_1[{columns}];output_2[{columns}];"
    shapes = [(None, 768), (None, 768), (768,), (None,), (None,)]
    made = make(Pattern.of(from_text(LAYER_NORM_GRADIENT), shapes), PatternConfiguration(text, 256, 4)).plan
    first, second = made.pieces
    loops = [[root.name for root in loop.roots] for loop in first.loops]
    assert loops == [["reduce_8", "reduce_10", "reduce_16", "reduce_17"], ["output_0"]]
    assert (first.phase, second.phase, second.combined, made.cooperative) == (0, 1, (16, 17), True)


def test_a_chain_of_reductions_over_split_columns_takes_a_phase_each() -> None:
    """The mean and the variance of batch normalisation: each puts together what the one before left."""
    rows, split = "GRID_4-CTA_32-WARP_8", "GRID_16-WARP_8"
    text = f"reduce_1[{split},{rows}];reduce_4[{split},{rows}];output_0[{rows}];output_1[{rows}];"
    pattern = Pattern.of(from_text(BATCH_NORM))
    made = plan(pattern, PatternConfiguration(text + f"output_2[{split},{rows}];", 256))
    phases = {root.name: piece.phase for piece in made.pieces for root in piece.roots}
    assert phases == {"reduce_1": 0, "reduce_4": 1, "output_0": 1, "output_1": 2, "output_2": 2}
    assert not any(piece.saved for piece in made.pieces)


def test_one_cta_waits_for_itself_alone() -> None:
    single = SOFTMAX_ROWS.replace("1056", "1").replace("output_0[GRID_1-WARP_8,CTA]", "output_0[GRID_1-CTA_256]")
    single = single.replace("output_0[GRID_1-CTA_256]", "output_0[GRID_1-CTA_256,GRID_1-CTA_256]")
    made = make(Pattern.of(from_text(SOFTMAX)), PatternConfiguration(single, 256))
    assert (made.plan.phases, made.plan.cooperative) == (2, False)
    assert "grid_barrier" not in made.source.text


def test_updates_of_variables_are_one_function() -> None:
    """Variables of any shapes: their axes become one, whose size is an argument."""
    program, tensors = adam([(40, 30), (7, 5, 3), (30,)])
    pattern = Pattern.of(program, [tensor.shape for tensor in tensors])
    flat = "GRID_4-CTA_256"
    text = "".join(f"output_{i}[{flat}];" for i in range(9)) + "output_9[];output_10[];"
    made = make(pattern, PatternConfiguration(text, 256, 4))
    assert pattern.program.axes == (0, 0, 0)
    assert made.source.text.count("__device__") == 2
    assert "run_piece<3, 13, piece_0>" in made.source.text
    assert grouped((7, 5, 3), pattern.groups[7]) == (105,)


def test_axes_stay_apart_where_something_tells_them_apart() -> None:
    """A transposed reader, a reduction over one of them, a tensor that is longer than its axis, a position."""
    head = "program 1\naxes {}\ntensor float32 2\ninput 0 a0 a1\n"
    for axes, rest, shape in (
        ("0 0", "output 0 1 0\n", (6, 4)),
        ("0 0", "reduce sum 0 1\noutput 1 0\n", (6, 4)),
        ("6 3", "output 0 0 1\n", (6, 4)),
        ("0 0", "position int32 1\noutput 0 0 1\noutput 1 0 1\n", (6, 4)),
    ):
        assert len(Pattern.of(from_text(head.format(axes) + rest), [shape]).program.axes) == 2
    assert Pattern.of(from_text(head.format("0 0") + "output 0 0 1\n"), [(6, 4)]).program.axes == (0,)


@pytest.mark.parametrize(
    ("number", "axes"),
    [
        ("20*a0+a1", (0,)),  # as the elements lie
        ("60*a0+3*a1", (0,)),
        ("24*a0+a1", (0, 20)),  # from the end of a row to the next one is a step of 5
        ("a0+20*a1", (0, 20)),
        ("20*a0", (0, 20)),
    ],
)
def test_axes_become_one_where_random_numbers_go_on_from_row_to_row(number: str, axes: tuple[int, ...]) -> None:
    text = "program 1\naxes 0 20\ntensor float32 2\ntensor uint64 1\ntensor uint64 1\ninput 0 a0 a1\n"
    program = from_text(text + f"random float32 1 2 {number}\nadd 0 1\noutput 2 0 1\n")
    assert Pattern.of(program, [(None, 20), (1,), (2,)]).program.axes == axes


@pytest.mark.parametrize("index", ["a0 a1 a0", "a1 a0 a1", "a0 a0 a1", "a0 a1 a0 a1", "a0 a1 a0+a1"])
def test_axes_that_a_tensor_has_several_times_stay_apart(index: str) -> None:
    shape = tuple(9 if "+" in word else 5 for word in index.split())
    program = from_text(f"program 1\naxes 5 5\ntensor float32 {len(shape)}\ninput 0 {index}\noutput 0 0 1\n")
    assert Pattern.of(program, [shape]).program.axes == (5, 5)


@pytest.mark.parametrize(
    ("text", "threads", "reason"),
    [
        ("reduce_1[GRID_4,CTA];", 256, "no schedule of"),
        (SOFTMAX_ROWS + "exp_9[GRID,CTA]S;", 256, "no root of the pattern"),
        (SOFTMAX_ROWS + f"exp_3[{ROWS},CTA];", 256, "no root of the pattern"),
        (SOFTMAX_ROWS + f"exp_3[{ROWS},CTA]S;", 256, "of unknown size"),
        (SOFTMAX_ROWS, 250, "a power of two"),
    ],
)
def test_a_template_that_does_not_fit_says_why(text: str, threads: int, reason: str) -> None:
    with pytest.raises(KernelError, match=reason):
        make(Pattern.of(from_text(SOFTMAX)), PatternConfiguration(text, threads))


def test_too_much_shared_memory_is_refused() -> None:
    pattern = Pattern.of(from_text(SOFTMAX), [(None, 100_000)])
    text = "".join(f"{name}[GRID_4,CTA];" for name in ("reduce_1", "reduce_4", "output_0")) + "exp_3[GRID_4,CTA]S;"
    with pytest.raises(KernelError, match=r"400,\d+ bytes of shared memory"):
        make(pattern, PatternConfiguration(text, 256))

"""Shared-memory planning: dominance, and arrays that take over each other's space."""

from __future__ import annotations

from itertools import permutations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.fusion.composition import composition, packed, statistics
from custom_ops.errors import ProgramError
from custom_ops.expr.program import Program
from custom_ops.expr.text import from_text
from custom_ops.fusion.codegen.kernel import make
from custom_ops.fusion.codegen.plan.dominance import DominanceTree
from custom_ops.fusion.codegen.plan.kernel_plan import KernelPlan, PatternConfiguration, Piece, plan
from custom_ops.fusion.codegen.plan.mapping import WARP
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.fusion.codegen.plan.shared import is_array, shared_plan
from tests.fusion_kernels import varied
from tests.fusion_programs import POOLING
from tests.random_programs import ON_GPU, programs
from tests.tiers import examples

ARRAYS = (
    "reduce_3[GRID_4,WARP,CTA]S;reduce_4[GRID_4,CTA];exp_6[GRID_4,CTA]S;reduce_7[GRID_4,CTA];divide_8[GRID_4,CTA]S;"
    "reduce_10[GRID_4,THREAD,CTA]S;output_0[GRID_4,CTA];"
)

# Of rows of 40 by 40: sums, their maximum and a number; sums of what the maximum scales, and a sum of those.
SCALED_SUMS = """program 1
axes 0 40 40
tensor float32 3
input 0 a0 a1 a2
reduce sum 0 2
reduce max 1 1
{}
multiply 0 2
reduce sum 4 2
reduce sum 5 1
add 6 3
output 7 0
"""
SCALED_ARRAYS = (
    "reduce_1[GRID_4,WARP,CTA]S;reduce_2[GRID_4,CTA];{}reduce_5[GRID_4,WARP,CTA]S;reduce_6[GRID_4,CTA];"
    "output_0[GRID_4];"
)


@given(st.lists(st.lists(st.integers(0, 11), max_size=3), min_size=12, max_size=12))
def test_dominance_is_what_every_path_meets(edges: list[list[int]]) -> None:
    """Vertices have edges to later ones; 0 is the root."""

    def successors(vertex: int, without: int | None = None) -> list[int]:
        return [other for other in edges[vertex] if other > vertex and other != without]

    def reached(without: int | None) -> set[int]:
        found, waiting = set[int](), [0] if without != 0 else []
        while waiting:
            vertex = waiting.pop()
            if vertex not in found:
                found.add(vertex)
                waiting += successors(vertex, without)
        return found

    tree = DominanceTree(0, successors)
    everywhere = reached(None)
    for over in range(12):
        without = reached(over)
        for vertex in range(12):
            expected = over in everywhere and vertex in everywhere and vertex not in without
            assert tree.dominates(over, vertex) == expected


def pooled(template: str, time: int, width: int) -> tuple[KernelPlan, Piece]:
    program = from_text(POOLING.replace("output 8 0 1\n", ""))  # so that all goes into the weighted sum
    pattern = Pattern.of(program, [(None, time, width), (width,)])
    found = plan(pattern, PatternConfiguration(template, 64))
    (piece,) = found.pieces
    return found, piece


def test_an_array_takes_over_the_space_of_one_it_dominates() -> None:
    """The scores, their exponentials and the weights lie in one place: each is made of the one before at the same
    positions. The weighted sum reads all weights for each of its numbers, so it cannot lie there too."""
    found, piece = pooled(ARRAYS, 40, 40)
    shared = shared_plan(found, piece)
    size = 40 * 4
    assert shared.exchange == 8 * 64 // WARP
    assert shared.requested == {3: size, 6: size, 8: size, 10: size}
    assert shared.places == {3: 16, 6: 16, 8: 16, 10: 16 + size}
    assert shared.bytes == 16 + 2 * size


def test_threads_meet_between_what_writes_an_array_and_what_reads_it() -> None:
    """The weighted sum reads weights that other threads have written."""
    pattern = pooled(ARRAYS, 40, 40)[0].pattern
    lines = make(pattern, PatternConfiguration(ARRAYS, 64)).source.text.splitlines()
    for array in ("array_3", "array_6", "array_8", "array_10"):
        uses = [number for number, line in enumerate(lines) if f"{array}[" in line]
        (written,) = (number for number in uses if f"{array}[" in lines[number].partition(" = ")[0])
        read = min(number for number in uses if number > written)
        assert "__syncthreads();" in "".join(lines[written:read]), array


def test_an_array_that_is_larger_lies_elsewhere() -> None:
    found, piece = pooled(ARRAYS, 40, 100)
    assert shared_plan(found, piece).places == {3: 16, 6: 16, 8: 16, 10: 16 + 160}


def test_an_array_that_does_not_dominate_takes_over_no_space() -> None:
    """Algorithm 4. The sums of a row are read for the last time for their maximum and minimum, before the scaled sums
    are written, which are made of the maximum. The minimum reaches the result past them, so that they dominate the sums
    only if there is a number in its place."""

    def places(minimum: str, template: str) -> dict[int, int]:
        program = from_text(SCALED_SUMS.format(minimum))
        found = plan(Pattern.of(program, [(None, 40, 40)]), PatternConfiguration(SCALED_ARRAYS.format(template), 64))
        (piece,) = found.pieces
        return shared_plan(found, piece).places

    assert places("reduce min 1 1", "reduce_3[GRID_4,CTA];") == {1: 16, 5: 16 + 160}
    assert places("constant float32 2.0", "") == {1: 16, 5: 16}


def test_rows_that_a_cta_computes_at_once_have_arrays_of_their_own() -> None:
    text = ARRAYS.replace("WARP,CTA", "CTA,THREAD").replace("GRID_4", "GRID_4-WARP_2")
    found, piece = pooled(text, 40, 40)
    assert shared_plan(found, piece).requested == dict.fromkeys((3, 6, 8, 10), 2 * 160)


def test_statistics_are_those_of_table_4() -> None:
    found, _ = pooled(ARRAYS, 40, 40)
    plain = make(Pattern.of(from_text(POOLING), None), PatternConfiguration(_apart(), 64)).plan
    assert statistics([plain]).patterns == 0
    table = statistics([found, plain])
    assert (table.patterns, table.average, table.largest) == (0.5, 16 + 320, 16 + 320)
    assert table.unshared == 16 + 640
    assert table.allocated == (16 + 320) / (16 + 640)


def test_the_threads_among_which_values_are_passed_on() -> None:
    found, _ = pooled(ARRAYS, 40, 40)
    alone = make(Pattern.of(from_text(ROWS)), PatternConfiguration(BY_THREADS, 64)).plan
    assert (composition(found), composition(alone)) == ("block", "thread")
    total = Pattern.of(from_text(SUM))
    shared_out = make(total, PatternConfiguration("reduce_1[GRID_8];output_0[];", 64)).plan
    by_warps = make(Pattern.of(from_text(ROWS)), PatternConfiguration(BY_WARPS, 64)).plan
    assert (composition(shared_out), composition(by_warps)) == ("grid", "warp")


def test_packed_parts_share_no_value_but_what_they_read() -> None:
    assert packed(Pattern.of(from_text(ROWS))) == 1
    two = ROWS.replace("output 1 0", "exp 0\noutput 1 0\noutput 2 0 1")
    assert packed(Pattern.of(from_text(two))) == 2
    tied = ROWS.replace("output 1 0", "add 0 1\noutput 1 0\noutput 2 0 1")
    assert packed(Pattern.of(from_text(tied))) == 1


SUM = "program 1\naxes 100\ntensor float32 1\ninput 0 a0\nreduce sum 0 0\noutput 1\n"
ROWS = "program 1\naxes 8 100\ntensor float32 2\ninput 0 a0 a1\nreduce sum 0 1\noutput 1 0\n"
BY_THREADS = "reduce_1[GRID_4-CTA_64,THREAD];output_0[GRID_4-CTA_64];"
BY_WARPS = "reduce_1[GRID_4-WARP_2,CTA];output_0[GRID_4-WARP_2];"


def _apart() -> str:
    """Everything by single threads: no shared memory."""
    rows = "GRID_4-CTA_64"
    return (
        f"reduce_3[{rows},{rows},THREAD];reduce_4[{rows},THREAD];reduce_7[{rows},THREAD];"
        f"reduce_10[{rows},THREAD,{rows}];output_0[{rows},{rows}];output_1[{rows},{rows}];"
    )


@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
@given(programs(ON_GPU))
def test_arrays_in_one_place_are_not_alive_at_once(made: tuple[Program, list[NDArray[object]]]) -> None:
    program, tensors = made
    shapes = [tensor.shape for tensor in tensors]
    try:
        program.sizes(shapes)
    except ProgramError:
        return
    for kernel in varied(Pattern.of(program, shapes), shapes):
        for piece in kernel.plan.pieces:
            _check(kernel.plan, piece)


def _check(found: KernelPlan, piece: Piece) -> None:
    pattern, shared = found.pattern, shared_plan(found, piece)
    written = {
        root.node: number
        for number, loop in enumerate(piece.loops)
        for root in loop.roots
        if is_array(root, found.mappings[root.name])
    }
    assert shared.places.keys() == written.keys()
    read = {place: len(piece.loops) if place in piece.saved else number for place, number in written.items()}
    for number, loop in enumerate(piece.loops):
        for root in loop.roots:
            needed = set(pattern.needs(root, written)) - ({root.node} if root.output is None else set())
            read.update({place: max(read[place], number) for place in needed & written.keys()})
    for a, b in permutations(written, 2):
        assert shared.exchange <= shared.places[a] <= shared.bytes - shared.requested[a]
        begin, end = shared.places[a], shared.places[a] + shared.requested[a]
        if begin < shared.places[b] + shared.requested[b] and shared.places[b] < end and written[a] <= written[b]:
            in_place = read[a] == written[b] and piece.loops[written[b]].way == "flat"
            assert read[a] < written[b] or (in_place and shared.places[a] == shared.places[b])

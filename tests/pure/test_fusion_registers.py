"""What threads keep in registers from loop to loop of a row, and what they load ahead: never more than they have."""

from __future__ import annotations

import pytest

from custom_ops.errors import KernelError
from custom_ops.expr.text import from_text
from custom_ops.fusion.codegen.kernel import make
from custom_ops.fusion.codegen.plan.kernel_plan import KernelPlan, PatternConfiguration, own_values, plan
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.fusion.codegen.plan.registers import KeptRegisters, ctas_at_once, keep
from tests.fusion_programs import SOFTMAX, adam

# After the sum, a row's output needs exp(x), value 2, and y, value 1, again.
WEIGHTED = """program 1
axes 0 0
tensor float32 2
tensor float32 2
input 0 a0 a1
input 1 a0 a1
exp 0
multiply 2 1
reduce sum 3 1
divide 2 4
add 5 1
output 6 0 1
"""

# Of each column the sum, and the sum of squares.
COLUMNS = """program 1
axes 0 0
tensor float32 2
input 0 a0 a1
square 0
reduce sum 0 0
reduce sum 1 0
output 2 1
output 3 1
"""


def powers(count: int) -> str:
    """The sums, for each row, of so many powers of its elements."""
    lines = ["program 1", "axes 0 0", "tensor float32 2", "input 0 a0 a1"]
    for power in range(count):
        lines += [f"multiply {2 * power - 1 if power else 0} 0", f"reduce sum {2 * power + 1} 1"]
    return "\n".join([*lines, *(f"output {2 * power + 2} 0" for power in range(count))]) + "\n"


def kept(made: KernelPlan) -> KeptRegisters:
    (piece,) = made.pieces
    return keep(made.pattern, piece, own_values(made, piece))


@pytest.mark.parametrize(
    ("threads", "elements", "found"),
    [
        (256, 32, {1, 2}),  # 2 * 32 of 96 registers
        (256, 64, {2}),  # 2 * 64 are too many: y, which is read again, goes first
        (1024, 16, {1, 2}),  # 65536 / 1024 - 32 = 32 registers
        (1024, 32, {2}),
    ],
)
def test_values_are_kept_while_there_are_registers(threads: int, elements: int, found: set[int]) -> None:
    pattern = Pattern.of(from_text(WEIGHTED), [(None, threads * elements)] * 2)
    rows = plan(pattern, PatternConfiguration("reduce_4[GRID_4,CTA];output_0[GRID_4,CTA];", threads))
    assert kept(rows).elements == (elements, elements)
    assert kept(rows).values == (frozenset(), frozenset(found))


@pytest.mark.parametrize(("elements", "ahead"), [(4, (0,)), (8, ())])
def test_a_row_is_loaded_ahead_while_there_are_registers(elements: int, ahead: tuple[int, ...]) -> None:
    """1024 threads have 64 registers each, of which 48 are for all else. They keep x and then exp(x), and load x of a
    row and of the next one: 4 * 4 registers for 4 elements, 4 * 8 for 8."""
    pattern = Pattern.of(from_text(SOFTMAX), [(None, 1024 * elements)])
    text = "reduce_1[GRID_4,CTA];reduce_4[GRID_4,CTA];output_0[GRID_4,CTA];"
    rows = kept(plan(pattern, PatternConfiguration(text, 1024, 4)))
    assert rows.values == (frozenset(), frozenset({0}), frozenset({3}))
    assert rows.ahead == ahead


def test_sums_over_rows_that_do_not_fit_are_refused() -> None:
    """A thread has a sum for each of 64 elements of a row: one of them fits the 96 registers, two do not."""
    columns, flat = 256 * 64, "GRID_4-CTA_256"
    text = f"reduce_2[GRID_4,CTA];reduce_3[GRID_4,CTA];output_0[{flat}];output_1[{flat}];"
    one = COLUMNS.replace("reduce sum 1 0\n", "").replace("output 3 1\n", "")
    make(
        Pattern.of(from_text(one), [(None, columns)]),
        PatternConfiguration(f"reduce_2[GRID_4,CTA];output_0[{flat}];", 256),
    )
    with pytest.raises(KernelError, match="reduce_3 adds up 16384 numbers, too many for 256 threads' registers"):
        make(Pattern.of(from_text(COLUMNS), [(None, columns)]), PatternConfiguration(text, 256))


def test_ctas_at_once_are_as_many_as_have_registers() -> None:
    """An update by Adam loads 4 tensors, 4 elements of each: 64 registers are enough, which 4 * 256 threads have."""
    program, tensors = adam([(4096,)])
    pattern = Pattern.of(program, [tensor.shape for tensor in tensors])
    flat = "".join(f"output_{i}[GRID_4-CTA_256];" for i in range(3)) + "output_3[];output_4[];"
    made = make(pattern, PatternConfiguration(flat, 256, 4))
    assert ctas_at_once(made.plan) == 65536 // (256 * 64)
    assert "__launch_bounds__(256, 4)" in made.source.text


@pytest.mark.parametrize(("count", "unrolled"), [(2, "#pragma unroll"), (40, "#pragma unroll 4")])
def test_a_loop_is_unrolled_while_its_code_stays_short(count: int, unrolled: str) -> None:
    """64 turns of 81 lines would keep NVRTC busy for seconds; 4 of them are 324 lines."""
    pattern = Pattern.of(from_text(powers(count)), [(None, 64 * 64)])
    template = "".join(f"reduce_{2 * n + 2}[GRID_4,CTA];output_{n}[GRID_4-CTA_64];" for n in range(count))
    lines = make(pattern, PatternConfiguration(template, 64)).source.text.splitlines()
    assert lines[next(place for place, line in enumerate(lines) if "k < 64" in line) - 1].strip() == unrolled


def test_a_loop_that_finds_values_in_registers_is_unrolled_whole() -> None:
    """Each turn of the second loop reads exp(x) from the register that the first left it in."""
    long = WEIGHTED.replace(
        "add 5 1\noutput 6 0 1", "add 5 1\n" + "".join(f"sin {6 + n}\n" for n in range(40)) + "output 46 0 1"
    )
    pattern = Pattern.of(from_text(long), [(None, 256 * 32)] * 2)
    text = make(pattern, PatternConfiguration("reduce_4[GRID_4,CTA];output_0[GRID_4,CTA];", 256)).source.text
    assert [line.strip() for line in text.splitlines() if "unroll" in line] == ["#pragma unroll"] * 2

"""How many steps a loop makes: counters of any start and step, up or down, to any bound."""

from __future__ import annotations

import operator

from hypothesis import given
from hypothesis import strategies as st

from graph_passes.passes.recurrent.find.counting import Linear, StepNumber, steps_until

HOLDS = {
    "Less": operator.lt,
    "LessEqual": operator.le,
    "Greater": operator.gt,
    "GreaterEqual": operator.ge,
    "NotEqual": operator.ne,
}
NUMBERS = st.integers(-9, 9)
SYMBOL = (("n", 0), 1)


def counted(start: int, step: int, op: str, limit: int) -> int:
    """The steps of a loop; 100 where it goes on."""
    steps = 0
    while HOLDS[op](start, limit) and steps < 100:
        start, steps = start + step, steps + 1
    return steps


@given(start=NUMBERS, step=NUMBERS.filter(bool), op=st.sampled_from(sorted(HOLDS)), limit=NUMBERS)
def test_steps_are_those_that_a_loop_makes(start: int, step: int, op: str, limit: int) -> None:
    found = steps_until(StepNumber(Linear(number=start), step), op, Linear(number=limit))
    if found is None:  # it counts away from its limit, or passes it by
        away = (op in ("Less", "LessEqual") and step < 0) or (op in ("Greater", "GreaterEqual") and step > 0)
        assert away or (op == "NotEqual" and counted(start, step, op, limit) == 100)
    else:
        assert max(0, int(found.key)) == counted(start, step, op, limit)


@given(start=NUMBERS, op=st.sampled_from(["Less", "LessEqual"]), known=NUMBERS)
def test_a_bound_may_be_a_size_that_is_not_known(start: int, op: str, known: int) -> None:
    limit = Linear(frozenset({SYMBOL}), known)
    found = steps_until(StepNumber(Linear(number=start), 1), op, limit)
    assert found == Linear(frozenset({SYMBOL}), known - start + (op == "LessEqual"))
    assert steps_until(StepNumber(Linear(number=start), 2), op, limit) is None

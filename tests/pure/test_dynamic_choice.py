"""How rows of a warp are chosen: kernels take turns, and the fastest stays."""

from __future__ import annotations

from custom_ops.dynamic.choice import FIRST_STEPS, ROUNDS, TIMED_STEPS, Choice
from custom_ops.dynamic.codegen.gpu_program import DynamicProgram, build
from custom_ops.dynamic.codegen.on_chip import Chip
from tests.dynamic_specs import tree_rnn

PROGRAMS = [build(tree_rnn(8), 90, Chip(processors=2), rows, compile_source=lambda *_, **__: b"") for rows in (1, 2, 4)]


def run(seconds_of_a_node: dict[int, float]) -> tuple[Choice, list[int], int]:
    now, pending, waits = 0.0, 0.0, 0

    def wait() -> None:
        nonlocal now, pending, waits
        now, pending, waits = now + pending, 0.0, waits + 1

    choice, ran = Choice(PROGRAMS, lambda: now), []
    while not choice.done:
        program: DynamicProgram = choice.program
        nodes = 1 + len(ran) % 7
        ran.append(program.rows)
        first = ran[-FIRST_STEPS - 1 :].count(program.rows) <= FIRST_STEPS
        pending += nodes * seconds_of_a_node[program.rows] + (100.0 if first else 0.0)  # its first steps load it
        choice.ran(nodes, wait)
    return choice, ran, waits


def test_the_fastest_for_a_node_stays() -> None:
    for fastest in (1, 2, 4):
        choice, ran, waits = run({rows: 1.0 if rows == fastest else 1.5 for rows in (1, 2, 4)})
        assert choice.program.rows == fastest
        assert len(ran) == ROUNDS * 3 * (FIRST_STEPS + TIMED_STEPS)
        assert waits == ROUNDS * 3 * 2  # a training loop is made to wait for the device twice a turn, and else never


def test_one_kernel_is_no_choice() -> None:
    assert Choice(PROGRAMS[:1]).done

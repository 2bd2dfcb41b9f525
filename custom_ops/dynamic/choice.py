"""How many rows of a matrix a warp has: chosen while the net trains, by what real batches take (VPPS, III-A2)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from custom_ops.dynamic.codegen.gpu_program import DynamicProgram
from custom_ops.timing.rounds import Rounds, fastest

ROWS = (1, 2, 4)
FIRST_STEPS = 2  # of a kernel, which load it
TIMED_STEPS = 16
ROUNDS = 2


class Choice:
    """Kernels that compute the same to the bit take turns, and the fastest stays.

    Attributes:
        program: what the next step runs.
        done: whether that is the fastest.
    """

    def __init__(self, programs: Sequence[DynamicProgram], clock: Callable[[], float] = time.perf_counter) -> None:
        self._programs, self._clock = list(programs), clock
        self._rounds = Rounds(len(self._programs), ROUNDS)  # of seconds a node
        self._steps = self._nodes = 0
        self._began = 0.0
        self.program = self._programs[0]
        self.done = len(self._programs) == 1

    def ran(self, nodes: int, wait: Callable[[], object]) -> None:
        """A step of `program` over so many nodes was started; `wait` returns when it is over."""
        self._steps += 1
        if self._steps <= FIRST_STEPS:
            if self._steps == FIRST_STEPS:
                wait()
                self._began, self._nodes = self._clock(), 0
            return
        self._nodes += nodes
        if self._steps < FIRST_STEPS + TIMED_STEPS:
            return
        wait()
        self._rounds.add((self._clock() - self._began) / max(1, self._nodes))
        self._steps, self.done = 0, self._rounds.clear
        self.program = self._programs[fastest(self._rounds.times) or 0 if self.done else self._rounds.turn]

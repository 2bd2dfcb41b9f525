"""Where a step is on its way to the plan that it keeps."""

from __future__ import annotations

import enum


class Stage(enum.Enum):
    """What the next call of a step is for.

    WARM      everything large moves: cuDNN chooses its algorithms when they first run, among those whose workspace
              fits, so memory should be plenty then
    OBSERVE   the same, with probes: op times, workspace, what else is in memory
    TRIAL     plans by measurement, with probes; on a GPU for falling shares of the budget, each run twice. The fastest
              that met the budget stays: more memory is not always faster, because an allocator near its limit is
              fragmented, and then convolutions fall back to slower algorithms.
    CHECK     the plan as it will run, without probes: does its peak stay within the budget? else plan again
    READY     nothing more is to be found out
    """

    WARM = enum.auto()
    OBSERVE = enum.auto()
    TRIAL = enum.auto()
    CHECK = enum.auto()
    READY = enum.auto()

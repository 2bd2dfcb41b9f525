"""One traced training step under a memory budget: estimated, observed, planned, tried.

    call 1      WARM      everything large moves: cuDNN chooses its algorithms when they first run, among those whose
                          workspace fits, so memory should be plenty then
    call 2      OBSERVE   the same, with probes: op times, workspace, what else is in memory
    calls 3..   TRIAL     plans by measurement, with probes; on a GPU for falling shares of the budget, each run twice.
                          The fastest that met the budget stays: more memory is not always faster, because an allocator
                          near its limit is fragmented, and then convolutions fall back to slower algorithms.
    next 3      CHECK     the plan as it will run, without probes: does its peak stay within the budget? else plan again
    then        READY

Every call computes the same step, so training starts with the first. A step that fits by far is left as it was; three
of its calls are watched, too, for what it takes.

A GPU's memory may run out under a plan, and a step that has written variables cannot be run again. So there the first
three stages are dry runs, all of them in the first call: the same graph, but no variable is written.
"""

from __future__ import annotations

import enum

SURELY_FITS = 0.75  # of the budget: a step estimated at less is not observed
GOOD_ENOUGH = 1.02  # times the ops' own run times: nothing is left to gain
CHECKS = 3  # unprobed steps whose peak is watched
PATIENT_CALLS = 3  # that could not be measured, until the step does without

Stage = enum.Enum("Stage", "WARM OBSERVE TRIAL CHECK READY")

"""Timing of a step's two variants on copies of its variables, a slice of time in each call.

The first runs of a large step make its kernels. A thread does that, while calls go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import tensorflow as tf

from custom_ops.background import NEXT, go_on
from tfmem.capture.captured import every_node
from tfmem.capture.concrete_function import flat_arguments
from tfmem.steps.fuser import Fuser
from tfmem.steps.states import Comparing
from tfmem.steps.variable_copies import Copies
from tfmem.steps.variants import Variants
from tfmem.steps.work import Work
from tfmem.timing.ab_timing import Slices, Times

LARGE = 300  # ops of a step whose first run, which makes their kernels, a call had better not wait for: an estimate
SLICE = 1.0  # seconds that one call may be held up by timing
PATIENT = 60.0  # the limit where the user asked for timing


class RegionsFailedError(Exception):
    """A step runs without its regions, but not with them: a fault of tfmem's."""


def timed_on_copies(
    state: Comparing, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Comparing, Times | None]:
    """A slice of timing with the arguments of a call: the state that has what was timed so far, and the clear result.

    Raises:
        NotCopiedError: there is no memory for copies of the variables.
        RegionsFailedError: the step failed with its regions alone.
        tf.errors.OpError: the step failed.
    """
    fuser, variants = state.fuser, state.variants
    patient = fuser.engine.settings.options.fusion.tune == "full"
    limit = PATIENT if patient else SLICE
    copies, timing = state.copies, state.timing
    if timing is None or copies is None:
        arguments = flat_arguments(fuser.trace.concrete, args, kwargs)
        if state.work is None and not patient and _is_large(fuser):
            work: Work[Copies] = Work(partial(_warmed, fuser, variants, arguments), "tfmem first runs", NEXT)
            work.begin()
            return replace(state, work=work), None
        copies = state.work.take() if state.work is not None else _copies(fuser, arguments)
        if copies is None:
            assert state.work is not None
            raise state.work.error or RuntimeError("the first runs ended without a result")
        timing = Slices()
    times = timing.go_on(partial(copies.run, variants.given), partial(_run_stitched, copies, variants), limit)
    return replace(state, copies=copies, timing=timing), times


def _is_large(fuser: Fuser) -> bool:
    return sum(1 for _ in every_node(fuser.trace.optimized().graph_def)) >= LARGE


def _copies(fuser: Fuser, arguments: Sequence[tf.Tensor]) -> Copies:
    return Copies(fuser.trace.concrete, arguments, fuser.engine.memory.free)


def _warmed(fuser: Fuser, variants: Variants, arguments: Sequence[tf.Tensor]) -> Copies:
    """Copies on which both variants have run: a first run makes kernels, which took up to 12 s for an unrolled RNN.

    On a GPU it also times products, while no call runs.
    """
    copies = _copies(fuser, arguments)
    quiet = fuser.engine.quiet if fuser.engine.settings.target.is_gpu else nullcontext
    for run in (partial(copies.run, variants.given), partial(_run_stitched, copies, variants)):
        go_on()
        with quiet():
            run()
    return copies


def _run_stitched(copies: Copies, variants: Variants) -> object:
    """Run the stitched variant; the given one has run on these copies.

    Raises:
        RegionsFailedError: an op failed, and not for lack of memory. In a comparison with XLA the op's error is raised.
    """
    try:
        return copies.run(variants.stitched)
    except tf.errors.OpError as error:
        if variants.xla or isinstance(error, tf.errors.ResourceExhaustedError):
            raise
        raise RegionsFailedError(f"with its regions, the step raised {type(error).__name__}: {error}") from error

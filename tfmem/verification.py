"""`tfmem.verify` checks that the optimised object computes what the original computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from graph_passes import checks
from graph_passes.errors import VerificationError
from graph_passes.passes.split.split_regions import Exactness

SPLIT_TOLERANCE = 1e-3  # a gradient near 0 may change its sign, and then Adam steps the other way
_LEAST = np.finfo(np.float64).tiny  # of integers beyond 2**53 that differ: float64 may not tell


@dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    Attributes:
        outputs: how many outputs were compared.
        variables: how many variables were compared after each step.
        steps: how many steps were run on each side.
        bit_equal: whether every number was equal to the bit (NaN equals NaN, and 0 equals -0).
        largest_difference: the largest |before - after| / max(1, |before|) of any number.
        exactness: what was asked for: equality to the bit, or sums over the batch that are added by piece, in a fixed
            order, or the tolerance that was given.
    """

    outputs: int
    variables: int
    steps: int
    bit_equal: bool
    largest_difference: float
    exactness: str = field(default="", compare=False)


def verify(
    before: Callable[..., Any],
    after: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    steps: int = 4,
    variables: Sequence[tf.Variable] = (),
    tolerance: float | Literal["auto"] = "auto",
) -> Verification:
    """Run both functions on the same inputs from the same state, and compare outputs and variables after every step.

    `verify` restores the variables before the second run and at the end.

    Args:
        before: the original; called as `before(*inputs)`.
        after: the optimised one.
        inputs: positional arguments.
        steps: how often each is run; more than three, so that the final plan is compared as well.
        variables: the variables that the step updates, with the optimizer's.
        tolerance: the largest relative difference that counts as equal; 0 asks for equality to the bit. Recurrent
            layers and fusion change the order of sums, so they need a tolerance. `auto`: 0, but 1e-3 where parts of
            `after` run on pieces of the batch.

    Returns:
        What was compared.

    Raises:
        OptionsError: an argument is of the wrong type or out of range.
        VerificationError: an output or a variable differs, with its place, step and size.
    """
    for name, function in (("before", before), ("after", after)):
        if not callable(function):
            checks.refuse(name, function, "something that can be called, as before(*inputs)")
    inputs = checks.series("inputs", inputs, "a list of positional arguments")
    variables = checks.series("variables", variables, "a list of variables")
    for variable in variables:
        if not hasattr(variable, "assign") or not hasattr(variable, "numpy"):
            checks.refuse("variables", variable, "variables, as model.variables has them")
    steps = checks.whole("steps", steps, 1)
    is_given = not (isinstance(tolerance, str) and tolerance == "auto")
    given = checks.number("tolerance", tolerance) if is_given else None
    start = [np.copy(variable.numpy()) for variable in variables]
    try:
        expected = _run(before, inputs, steps, variables)
        _restore(variables, start)
        found = _run(after, inputs, steps, variables)
    finally:
        _restore(variables, start)
    allowed, exactness = _asked(given, after)
    largest, equal = 0.0, True
    outputs = len(expected[0]) - len(variables)  # there is a step
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if len(ours) != len(theirs):
            counts = [len(values) - len(variables) for values in (ours, theirs)]
            raise VerificationError(
                f"step {step}: the optimised function returns {counts[0]} outputs, the original {counts[1]}; "
                "compare the function with the one that it was made of"
            )
        for place, (new, old) in enumerate(zip(ours, theirs, strict=True)):
            what = f"output {place}" if place < outputs else f"variable '{variables[place - outputs].name}'"
            if new.shape != old.shape or new.dtype != old.dtype:
                raise VerificationError(
                    f"step {step}: {what} is {new.dtype}{new.shape}, the original's is {old.dtype}{old.shape}; "
                    "compare the function with the one that it was made of"
                )
            if not new.dtype.hasobject and new.tobytes() == old.tobytes():
                continue
            difference = _difference(new, old)
            equal = equal and difference == 0.0
            if not difference <= allowed:
                raise VerificationError(
                    f"step {step}: {what} differs by {difference:.3g}, relative; allowed is {allowed:.3g}. "
                    "Recurrent layers and fusion change the order of sums: pass a larger tolerance. Random or atomic "
                    "ops differ from run to run: set seeds and tf.config.experimental.enable_op_determinism()"
                )
            largest = max(largest, difference)
    return Verification(outputs, len(variables), steps, equal, largest, exactness)


def _asked(given: float | None, after: object) -> tuple[float, str]:
    """The tolerance, and what it stands for in words; `after` has run."""
    if given is not None:
        return given, f"equal within {given:g}, relative" if given else str(Exactness.BITS)
    splits = getattr(getattr(after, "report", None), "splits", ())
    return (SPLIT_TOLERANCE, splits[0].exactness) if splits else (0.0, str(Exactness.BITS))


def _run(
    function: Callable[..., Any], inputs: Sequence[Any], steps: int, variables: Sequence[tf.Variable]
) -> list[list[np.ndarray[Any, Any]]]:
    history = []
    for _ in range(steps):
        flat = tf.nest.flatten(function(*inputs), expand_composites=True)  # sparse and ragged ones by their parts
        outputs = [np.asarray(output) for output in flat]
        history.append(outputs + [np.copy(variable.numpy()) for variable in variables])
    return history


def _restore(variables: Sequence[tf.Variable], values: Sequence[np.ndarray[Any, Any]]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _difference(new: np.ndarray[Any, Any], old: np.ndarray[Any, Any]) -> float:
    """The largest relative difference; infinity where one is NaN or infinite and the other is not."""
    if new.dtype.kind in "OSU":
        return 0.0 if np.array_equal(new, old) else float("inf")
    a, b = new.astype(np.complex128), old.astype(np.complex128)
    with np.errstate(invalid="ignore"):
        same = (new == old) | (np.isnan(a) & np.isnan(b))
        relative = np.abs(a - b) / np.maximum(1.0, np.abs(b))
        relative = np.where(same, 0.0, np.maximum(relative, _LEAST))
    return float(np.where(np.isnan(relative), np.inf, relative).max(initial=0.0))

"""An error over one recurrence affects that one alone: it stays unchanged, and the report says why."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from custom_ops.background import go_on
from graph_passes import refusals
from graph_passes.passes.recurrent.find.loops import Unreadable
from graph_passes.passes.recurrent.match import Match, RecurrentPlan, Unmatched
from graph_passes.refusals import Reason, Refusal

T = TypeVar("T")


@contextmanager
def attempt(unmatched: list[Unmatched], name: str, carrier: str, *reasons: type[Exception]) -> Iterator[None]:
    """What is done about one recurrence: if it fails, the recurrence is added to `unmatched`.

    Args:
        unmatched: the recurrences that stay.
        name: the recurrence.
        carrier: its kind.
        reasons: errors that are reasons, as `Unreadable` is; all others are faults of tfmem.
    """
    go_on()
    try:
        yield
    except Exception as error:  # whatever it is, the user's function runs without this replacement
        is_reason = isinstance(error, (Unreadable, *reasons))
        unmatched.append(Unmatched(name, carrier, _refusal(error)) if is_reason else fault(name, carrier, error))


def attempted(unmatched: list[Unmatched], matches: Iterable[Match], change: Callable[[Match], T]) -> list[T]:
    """What `change` makes of each match, but for those of which it fails; these are added to `unmatched`."""
    found: list[T] = []
    for match in matches:
        with attempt(unmatched, match.name, match.carrier):
            found.append(change(match))
    return found


def fault(name: str, carrier: str, error: Exception) -> Unmatched:
    """What the report says of a recurrence that stays because tfmem failed."""
    return Unmatched(name, carrier, refusals.fault(error), "".join(traceback.format_exception(error)))


def _refusal(error: Exception) -> Refusal:
    return error.refusal if isinstance(error, Unreadable) else Reason.CELL_REFUSED(detail=str(error))


def without(plan: RecurrentPlan, errors: Mapping[str, Exception]) -> RecurrentPlan:
    """`plan` without the matches, named in `errors`, whose rewrite could not be carried out."""
    failed = [fault(each.name, each.carrier, errors[each.name]) for each in plan.matches if each.name in errors]
    matches = tuple(match for match in plan.matches if match.name not in errors)
    return replace(plan, matches=matches, unmatched=(*plan.unmatched, *failed))

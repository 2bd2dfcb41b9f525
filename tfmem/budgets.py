"""Memory budgets: what a user gives, for each device or by device, and what that is in bytes. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Integral, Real
from typing import Any, Protocol

from graph_passes.checks import LARGEST, shown
from graph_passes.errors import InvalidBudgetError
from tfmem.device_names import allocator_of, plain_name

Budget = int | float | str | None  # of one device

_EXPECTED = 'bytes, a text such as "10GiB", or a fraction of at most 1.0'
_BY_DEVICE = 'a budget for each device, {"GPU:0": "10GiB", "GPU:1": "8GiB"}'
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


@dataclass(frozen=True)
class DeviceBudgets:
    """Budgets by device.

    Attributes:
        entries: the plain name of a device ("GPU:0") with its budget; None for that device's default.
    """

    entries: tuple[tuple[str, Budget], ...]

    @classmethod
    def of(cls, given: Mapping[Any, Any]) -> DeviceBudgets:
        """The budgets that a user's dict holds.

        Raises:
            InvalidBudgetError: the dict is empty, a key is not the name of a device, two keys name devices of one
                allocator, or a value is no budget.
        """
        if not given:
            raise InvalidBudgetError(f"memory_budget={{}}: expected {_BY_DEVICE}, or one budget for each device")
        found: dict[str, Budget] = {}
        for key, budget in given.items():
            name = plain_name(key) if isinstance(key, str) else ""
            if not name:
                raise InvalidBudgetError(
                    f"memory_budget={shown(given)}: {shown(key)} is not the name of a device; expected {_BY_DEVICE}"
                )
            if allocator_of(name) != name:
                raise InvalidBudgetError(
                    f"memory_budget={shown(given)}: all CPUs of a process share the memory of CPU:0; give one budget, "
                    f"for CPU:0 instead of {name}"
                )
            if name in found:
                raise InvalidBudgetError(f"memory_budget={shown(given)}: {name} has two budgets; give one")
            parse_budget(budget, LARGEST, f"memory_budget[{key!r}]")
            found[name] = budget
        return cls(tuple(found.items()))

    def __repr__(self) -> str:
        return repr(dict(self.entries))

    @property
    def devices(self) -> tuple[str, ...]:
        """Plain names of the devices that have an entry."""
        return tuple(name for name, _ in self.entries)

    @property
    def gives_any(self) -> bool:
        """Whether a device has another budget than its default."""
        return any(budget is not None for _, budget in self.entries)

    def require_known(self, known: Sequence[str]) -> None:
        """Refuse an entry of a device that this process does not have.

        Args:
            known: plain names of its devices.

        Raises:
            InvalidBudgetError: there is such an entry.
        """
        unknown = [name for name in self.devices if name not in known]
        if unknown:
            raise InvalidBudgetError(
                f"memory_budget={self!r}: there is no device {', '.join(unknown)}; there are: {', '.join(known)}"
            )

    def require_used(self, used: Collection[str]) -> None:
        """Refuse an entry of a device that a step does not use.

        Args:
            used: plain names of the devices whose memory the step takes.

        Raises:
            InvalidBudgetError: there is such an entry.
        """
        unused = [name for name in self.devices if name not in used]
        if unused:
            raise InvalidBudgetError(
                f"memory_budget={self!r}: the step does not use {', '.join(unused)}; expected budgets for devices that "
                f"it uses, which are: {', '.join(sorted(used))}"
            )


Budgets = Budget | DeviceBudgets | Mapping[str, Budget]  # what users give


class HasBudget(Protocol):
    """Options, as far as this module reads them."""

    @property
    def memory_budget(self) -> Budgets: ...


def checked_budget(given: Any) -> Budget | DeviceBudgets:
    """A user's budget in the form that the rest of tfmem reads.

    Raises:
        InvalidBudgetError: it is no budget for any device.
    """
    if isinstance(given, DeviceBudgets):
        return given
    if isinstance(given, Mapping):
        return DeviceBudgets.of(given)
    parse_budget(given, LARGEST)
    budget: Budget = given
    return budget


def budget_on(given: Budgets, device: str, device_memory: int) -> int | None:
    """Bytes that a step may use of a device; None where the user gave no budget for it.

    Args:
        given: what `checked_budget` returned, or what it takes.
        device: plain name of the device.
        device_memory: its bytes.

    Raises:
        InvalidBudgetError: see `parse_budget`.
    """
    if isinstance(given, Mapping):
        given = DeviceBudgets.of(given)
    if not isinstance(given, DeviceBudgets):
        return parse_budget(given, device_memory)
    name = allocator_of(device)
    return parse_budget(dict(given.entries).get(name), device_memory, f"memory_budget[{name!r}]")


def budget_of(
    options: HasBudget, passes: Collection[str], device: str, memory: int, limited: bool
) -> tuple[int | None, bool]:
    """The bytes that a step may use of a device, None for no limit; and whether the user gave a budget for any device.

    Args:
        options: the user's.
        passes: those that run.
        device: plain name of the device, "GPU:0".
        memory: its bytes.
        limited: whether these are the limit where the user gives none.

    Raises:
        InvalidBudgetError: see `parse_budget`.
    """
    given = options.memory_budget
    found = budget_on(given, device, memory)
    if "offload" not in passes:
        return None, False
    is_given = found is not None or (isinstance(given, DeviceBudgets) and given.gives_any)
    return memory if found is None and limited else found, is_given


def parse_budget(budget: Budget, device_memory: int, name: str = "memory_budget") -> int | None:
    """A memory budget in bytes; None for None.

    Args:
        budget: see `Options.memory_budget`.
        device_memory: bytes of the device, which a fraction is taken of and a budget must not exceed.
        name: what the budget is called in messages.

    Raises:
        InvalidBudgetError: the budget is zero, negative, over the device's memory, or not a size.
    """
    if budget is None:
        return None
    size: Any
    if isinstance(budget, str):
        if (parsed := parse_size(budget)) is None:
            raise _no_budget(name, budget, f"is not a size; expected {_EXPECTED}")
        size, is_fraction = parsed
    elif isinstance(budget, Real) and not isinstance(budget, bool):
        size, is_fraction = budget, not isinstance(budget, Integral)
    else:
        raise InvalidBudgetError(f"{name}={shown(budget)}: expected {_EXPECTED}")
    if is_fraction:
        if not 0 < size <= 1:  # nor is NaN
            raise InvalidBudgetError(
                f"{name}={shown(budget)}: a fraction must be above 0 and at most 1; expected {_EXPECTED}"
            )
        size = float(size) * device_memory
    if size < 1:
        raise _no_budget(name, budget, f"leaves no memory at all; expected {_EXPECTED}")
    if size > device_memory:
        found = "more than any device has"
        if device_memory < size <= LARGEST:
            found = f"{int(size):,} bytes, but the device has {device_memory:,}"
        raise _no_budget(name, budget, f"is {found}; give a smaller budget, or None for all of it")
    return int(size)


def _no_budget(name: str, budget: Budget, why: str) -> InvalidBudgetError:
    return InvalidBudgetError(f"{name}={shown(budget)} {why}")


def parse_size(given: str) -> tuple[Decimal, bool] | None:
    """The size in a text, and whether it is a fraction: "0.5" without a unit is one."""
    match = re.fullmatch(r"\s*([0-9]{1,40}(?:\.[0-9]{1,40})?|\.[0-9]{1,40})\s*([A-Za-z]*)\s*", given)
    if not match or match[2].upper() not in _UNITS:
        return None
    return Decimal(match[1]) * _UNITS[match[2].upper()], not match[2] and "." in match[1]

"""The figures of one device in a report, and the words for sizes and times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Peaks(Protocol):
    """Peaks and a budget, as `Report` and `DeviceReport` have them."""

    @property
    def budget(self) -> int | None: ...

    @property
    def peak_predicted(self) -> int: ...

    @property
    def peak_measured(self) -> int | None: ...


@dataclass(frozen=True)
class DeviceReport:
    """The figures of one device of a step that runs on several.

    Attributes:
        device: its name in `memory_budget`: "GPU:1". "CPU:0" stands for all CPUs of a process, which share its memory.
        budget: bytes; None for no limit.
        peak_before: peak memory of the unmodified step there.
        peak_predicted: the plan's peak.
        peak_measured: the allocator's peak while the step ran, and `peak_uncounted`; None until then.
        peak_uncounted: see `Report`.
        bytes_out: bytes that leave in a step, by plan.
        bytes_in: bytes that come back.
        transfers: how many tensors move.
        lanes: how many devices of the step take their memory from it: 1 for a GPU.
    """

    device: str
    budget: int | None
    peak_before: int
    peak_predicted: int
    peak_measured: int | None = None
    peak_uncounted: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    transfers: int = 0
    lanes: int = 1

    @property
    def over(self) -> int:
        """Bytes by which the measured peak exceeds the budget; 0 where it does not, or nothing is measured."""
        return max(0, self.peak_measured - self.budget) if self.peak_measured and self.budget is not None else 0

    def __str__(self) -> str:
        moved = f"{size(self.bytes_out)} out, {size(self.bytes_in)} in ({many(self.transfers, 'tensor')})"
        several = f" ({self.lanes} devices)" if self.lanes > 1 else ""
        peak = f"{size(self.peak_before)} before, {size(self.peak_predicted)} planned"
        return (
            f"{self.device}{several}: budget {size(self.budget)}; peak {peak}, {size(self.peak_measured)} "
            f"measured{deviation(self)}; {moved}"
        )


def size(count: int | None) -> str:
    """Bytes in words, with the largest binary unit that leaves at least 1; `-` for None."""
    if count is None:
        return "-"
    amount, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1023.95 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"


def sizes(*counts: int) -> list[str]:
    """Bytes in words, of which only the last names the unit if all have the same one."""
    words = [size(count) for count in counts]
    units = {word.rpartition(" ")[2] for word in words}
    return [*(word.rpartition(" ")[0] for word in words[:-1]), words[-1]] if len(units) == 1 else words


def duration(nanoseconds: int | None) -> str:
    """Nanoseconds in words; `-` for None."""
    if nanoseconds is None:
        return "-"
    for unit, scale in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        amount = nanoseconds / scale
        if abs(amount) >= 0.9995:  # rounded it is 1
            return f"{_digits(amount)} {unit}"
    return f"{nanoseconds} ns"


def milliseconds(seconds: float) -> str:
    """Seconds in milliseconds, whose number can be compared with others."""
    return f"{_digits(1e3 * seconds)} ms"


def _digits(amount: float) -> str:
    """Three digits, or all that are before the point."""
    return f"{amount:.3g}" if abs(amount) < 999.5 else f"{amount:.0f}"


def many(count: int, what: str) -> str:
    """A number of things in words."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def deviation(report: Peaks) -> str:
    """How far the measured peak is from the plan, and whether it broke the budget."""
    if report.peak_measured is None or not report.peak_predicted:
        return ""
    off = f" ({report.peak_measured / report.peak_predicted - 1:+.1%} vs. plan)"
    over = report.budget is not None and report.peak_measured > report.budget
    return off + (" OVER BUDGET" if over else "")

"""Waiting for a machine that others use, too, to be idle, so that what is measured is not them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

BUSY = 0.2  # the share of all processors that others may use
LOOK = 0.2  # seconds


@dataclass(frozen=True)
class Clocks:
    """Seconds of processors that all processes have used, that this one has, and that have gone by."""

    all: float
    own: float
    wall: float

    @classmethod
    def now(cls) -> Clocks:
        """Read."""
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        idle = ticks[3] + ticks[4]
        return cls((sum(ticks) - idle) / os.sysconf("SC_CLK_TCK"), time.process_time(), time.monotonic())

    def others_since(self, before: Clocks) -> float:
        """The share of the processors that other processes used."""
        used = (self.all - before.all) - (self.own - before.own)
        return used / max(self.wall - before.wall, 1e-9) / len(os.sched_getaffinity(0))


@dataclass
class Patience:
    """How long one is ready to wait.

    Attributes:
        seconds: that are left; with none, nothing is waited for and nothing was disturbed.
    """

    seconds: float

    def wait(self) -> Clocks:
        """Wait until the other processes are idle."""
        before = Clocks.now()
        while self.seconds > 0:
            time.sleep(LOOK)
            self.seconds -= LOOK
            now = Clocks.now()
            if now.others_since(before) <= BUSY:
                return now
            before = now
        return before

    def was_disturbed(self, before: Clocks) -> bool:
        """Whether others were busy since; if so, that is time that was waited."""
        now = Clocks.now()
        disturbed = self.seconds > 0 and now.others_since(before) > BUSY
        self.seconds -= (now.wall - before.wall) * disturbed
        return disturbed

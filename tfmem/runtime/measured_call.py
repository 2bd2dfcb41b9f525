"""One measured call: its result, what its probes read, what flowed, how much memory it took.

The allocator's peak and the op library's counters are the whole process's, so measured calls run one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from custom_ops.load import Counters, Library, ProbeRow
from graph_passes.analysis.memory.observe import Sample
from tfmem.devices import Target, memory
from tfmem.runtime.measuring_lock import alone

Flow = tuple[Counters, Counters]  # the op library's counters before and after


@dataclass(frozen=True)
class Meter:
    """Measures calls.

    Attributes:
        library: the op library.
        target: the device that they run on.
    """

    library: Library
    target: Target

    def sampled(self, run: int, function: Callable[[], Any]) -> tuple[Any, list[Sample] | None, Flow]:
        """Call `function`, whose probes write to table `run`.

        If the call fails, the table keeps what the probes wrote until then.

        Returns:
            The result, the samples (None if another measured call ran meanwhile), and the op library's counters before
            and after.
        """
        with alone() as turn:
            self.library.clear_probes(run)
            before = self.library.counters()
            if turn.held:
                self.library.set_stall_timing(True)
                memory(self.library, self.target.name, reset=True)
            try:
                result = function()
                tf.test.experimental.sync_devices()
            finally:
                if turn.held:
                    self.library.set_stall_timing(False)
            after = self.library.counters()
        rows = self.library.probes(run)
        self.library.clear_probes(run)
        if not turn.alone:
            return result, None, (before, after)
        samples = [Sample(row.index, 1e-9 * self.clock(row), row.bytes_in_use, row.peak_bytes) for row in rows]
        return result, samples, (before, after)

    def clock(self, row: ProbeRow) -> int:
        """The nanoseconds at which a probe was passed, by the device that runs the ops."""
        return row.device_ns if self.target.is_gpu else row.host_ns

    def watched(self, function: Callable[[], Any]) -> tuple[Any, int | None]:
        """Call `function`; its result, and the allocator's peak in bytes while it ran.

        No peak if another measured call ran meanwhile.
        """
        with alone() as turn:
            if turn.held:
                memory(self.library, self.target.name, reset=True)
            result = function()
            tf.test.experimental.sync_devices()
            peak = memory(self.library, self.target.name).peak_bytes
        return result, peak if turn.alone else None

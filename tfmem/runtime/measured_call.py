"""One measured call: its result, what its probes read, what flowed, how much memory it took.

The allocator's peak and the op library's counters are the whole process's, so measured calls run one at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from custom_ops.load import Counters, Library, ProbeRow
from graph_passes.analysis.memory.observe import Sample
from graph_passes.graph.ir import Graph
from graph_passes.graph.ops import calls_python
from tfmem.devices import Target, memory, wait_for_devices
from tfmem.runtime.measuring_lock import WaitsFor, measured

Flow = tuple[Counters, Counters]  # the op library's counters before and after


def waits_for(graph: Graph, processes: bool = False) -> WaitsFor:
    """What a measured call of a step may wait for.

    Args:
        graph: the step's.
        processes: whether other processes run it, too.
    """
    if processes:
        return WaitsFor.PROCESSES
    return WaitsFor.PYTHON if calls_python(graph) else WaitsFor.NOTHING


@dataclass(frozen=True)
class Meter:
    """Measures calls.

    Attributes:
        library: the op library.
        target: the device that they run on.
    """

    library: Library
    target: Target

    def sampled(
        self, run: int, function: Callable[[], Any], waits: WaitsFor = WaitsFor.NOTHING
    ) -> tuple[Any, list[Sample] | None, Flow]:
        """Call `function`, whose probes write to table `run`; `waits` as in `sampled_on`.

        If the call fails, the table keeps what the probes wrote until then.

        Returns:
            The result, the samples (None if another measured call ran meanwhile), and the op library's counters before
            and after.
        """
        result, samples, flow = self.sampled_on([run], function, waits)
        return result, None if samples is None else samples[0], flow

    def sampled_on(
        self, runs: Sequence[int], function: Callable[[], Any], waits: WaitsFor = WaitsFor.NOTHING
    ) -> tuple[Any, list[list[Sample]] | None, Flow]:
        """`sampled` of a step whose probes write to several tables; the samples of each.

        Args:
            runs: the tables.
            function: what is measured.
            waits: what it may wait for meanwhile.
        """
        with measured(waits) as turn:
            for run in runs:
                self.library.clear_probes(run)
            before = self.library.counters()
            if turn.held:
                self.library.set_stall_timing(True)
                memory(self.library, self.target.name, reset=True)
            try:
                result = function()
                wait_for_devices()
            finally:
                if turn.held:
                    self.library.set_stall_timing(False)
            after = self.library.counters()
        samples = [self._read(run) for run in runs]
        return result, samples if turn.alone else None, (before, after)

    def _read(self, run: int) -> list[Sample]:
        rows = self.library.probes(run)
        self.library.clear_probes(run)
        return [Sample(row.index, 1e-9 * self.clock(row), row.bytes_in_use, row.peak_bytes) for row in rows]

    def clock(self, row: ProbeRow) -> int:
        """The nanoseconds at which a probe was passed, by the device that runs the ops."""
        return row.device_ns if self.target.is_gpu else row.host_ns

    def watched(self, function: Callable[[], Any], waits: WaitsFor = WaitsFor.NOTHING) -> tuple[Any, int | None]:
        """Call `function`; its result, and the allocator's peak in bytes while it ran; `waits` as in `watched_on`.

        No peak if another measured call ran meanwhile.
        """
        result, peaks = self.watched_on([self.target.name], function, waits)
        return result, None if peaks is None else peaks[0]

    def timed_on(
        self, devices: Sequence[str], function: Callable[[], Any], waits: WaitsFor = WaitsFor.NOTHING
    ) -> tuple[Any, tuple[int, ...] | None, float]:
        """`watched_on`, and the seconds until all devices had ended."""
        began = 0.0

        def timed() -> Any:
            nonlocal began
            began = time.perf_counter()
            return function()

        result, peaks = self.watched_on(devices, timed, waits)
        return result, peaks, time.perf_counter() - began

    def watched_on(
        self, devices: Sequence[str], function: Callable[[], Any], waits: WaitsFor = WaitsFor.NOTHING
    ) -> tuple[Any, tuple[int, ...] | None]:
        """Call `function`; its result, and the peak of each device's allocator in bytes while it ran.

        No peaks if another measured call ran meanwhile.

        Args:
            devices: as TensorFlow names them.
            function: what is watched.
            waits: what it may wait for meanwhile.
        """
        with measured(waits) as turn:
            if turn.held:
                for device in devices:
                    memory(self.library, device, reset=True)
            result = function()
            wait_for_devices()
            peaks = tuple(memory(self.library, device).peak_bytes for device in devices)
        return result, peaks if turn.alone else None

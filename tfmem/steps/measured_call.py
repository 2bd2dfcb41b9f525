"""One measured call: its result, what its probes read, what flowed, how much memory it took.

The allocator's peak and the op library's counters are the whole process's, so measured calls run one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from custom_ops.load import Counters
from graph_passes.analysis.memory.observe import Sample
from tfmem.devices import memory
from tfmem.runtime.engine import Engine
from tfmem.runtime.measuring_lock import alone


def sampled(
    engine: Engine, run: int, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, list[Sample] | None, tuple[Counters, Counters]]:
    """Call `function`, whose probes write to table `run`.

    If the call fails, the table keeps what the probes wrote until then.

    Returns:
        The result, the samples (None if another measured call ran meanwhile), and the op library's counters before and
        after.
    """
    library, target = engine.library, engine.target
    with alone() as turn:
        library.clear_probes(run)
        before = library.counters()
        if turn.held:
            library.set_stall_timing(True)
            memory(library, target.name, reset=True)
        try:
            result = function(*args, **kwargs)
            tf.test.experimental.sync_devices()
        finally:
            if turn.held:
                library.set_stall_timing(False)
        after = library.counters()
    rows = library.probes(run)
    library.clear_probes(run)
    if not turn.alone:
        return result, None, (before, after)
    clock = [row.device_ns if target.is_gpu else row.host_ns for row in rows]
    samples = [
        Sample(row.index, 1e-9 * time, row.bytes_in_use, row.peak_bytes) for row, time in zip(rows, clock, strict=True)
    ]
    return result, samples, (before, after)


def watched(
    engine: Engine, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, int | None]:
    """Call `function`; its result, and the allocator's peak in bytes while it ran.

    No peak if another measured call ran meanwhile.
    """
    with alone() as turn:
        if turn.held:
            memory(engine.library, engine.target.name, reset=True)
        result = function(*args, **kwargs)
        tf.test.experimental.sync_devices()
        peak = memory(engine.library, engine.target.name).peak_bytes
    return result, peak if turn.alone else None

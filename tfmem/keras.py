"""For Keras: a callback that reports memory while a model trains, and the search for the largest batch.

model = tfmem.optimize(model, memory_budget="8GiB")
model.fit(images, labels, callbacks=[tfmem.keras.MemoryReport("logs")])
"""

from __future__ import annotations

import statistics
import struct
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from graph_passes.errors import GraphError
from graph_passes.report import RECOMPUTED, Report
from tfmem.api import report
from tfmem.budgets import Budget
from tfmem.html_report import write_html
from tfmem.options import Options
from tfmem.planner import plan
from tfmem.plot import PlotError, plot_report

__all__ = ["MemoryReport", "largest_batch"]


class MemoryReport(keras.callbacks.Callback):
    """Report what tfmem does to a model that trains: planned and measured peak, stall and step time.

    The numbers are in the `logs` of each epoch, and so in `history`: `tfmem_peak_planned` and `tfmem_peak_measured` in
    bytes, `tfmem_stall_ms` and `tfmem_step_ms`. The headline is printed after the first epoch, and again after one in
    which another plan ran or the budget was missed, but not where the measured peak or time alone is another.
    """

    def __init__(self, log_dir: str | Path = "", html: str | Path = "", verbose: int = 1) -> None:
        """
        Args:
            log_dir: where TensorBoard looks; the scalars and the picture of memory go there. "" writes none.
            html: the file of a page with all pictures, which is written when training ends. "" writes none.
            verbose: 0 prints nothing.
        """
        super().__init__()
        self._log_dir, self._html, self._verbose = str(log_dir), str(html), verbose
        self._writer: Any = None
        self._steps: list[float] = []
        self._began = 0.0
        self._told: object = None

    def _implements_train_batch_hooks(self) -> bool:
        """What tf_keras asks of a callback, whose class is another there."""
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False

    @property
    def report(self) -> Report | None:
        """The report of the model, or of its wrapped optimizer; None before the first step."""
        for holder in (self.model, getattr(self.model, "optimizer", None)):
            try:
                return report(holder)
            except GraphError:
                continue
        return None

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin to time a step."""
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Time a step."""
        self._steps.append(time.perf_counter() - self._began)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the numbers of an epoch to its `logs`, and tell the headline if it is a new one."""
        found = self.report
        if found is None:
            return
        numbers = self._numbers(found)
        if logs is not None:
            logs.update(numbers)
        if self._verbose and (told := _told(found)) != self._told:
            self._told = told
            print(f"\ntfmem: {found.headline}", file=sys.stderr)
        if self._log_dir:
            self._write(epoch, numbers, found)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Write the page, and close TensorBoard's file."""
        found = self.report
        if self._html and found is not None:
            write_html(found, self._html)
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _numbers(self, found: Report) -> dict[str, float]:
        numbers: dict[str, float | None] = {
            "tfmem_peak_planned": found.peak_predicted if found.budget is not None else None,
            "tfmem_peak_measured": found.peak_measured,
            "tfmem_stall_ms": None if found.stall_measured_ns is None else found.stall_measured_ns / 1e6,
            "tfmem_step_ms": 1e3 * statistics.median(self._steps) if self._steps else None,
        }
        self._steps = []
        return {name: value for name, value in numbers.items() if value is not None}

    def _write(self, epoch: int, numbers: dict[str, float], found: Report) -> None:
        """One point of each scalar; the picture where matplotlib is installed and the report has curves."""
        if self._writer is None:
            with tf.Graph().as_default():  # the writer of TensorFlow 2 needs TensorBoard
                self._writer = tf.compat.v1.summary.FileWriter(self._log_dir)
        summary = tf.compat.v1.Summary()
        for name, value in numbers.items():
            summary.value.add(tag=name.replace("tfmem_", "tfmem/"), simple_value=value)
        with tempfile.TemporaryDirectory() as folder, suppress(PlotError):
            picture = plot_report(found, Path(folder, "memory.png")).read_bytes()
            width, height = struct.unpack(">II", picture[16:24])
            image = tf.compat.v1.Summary.Image(width=width, height=height, encoded_image_string=picture)
            summary.value.add(tag="tfmem/memory", image=image)
        self._writer.add_summary(summary, epoch)


def _told(found: Report) -> object:
    """What a report says without what is measured in each epoch, except whether that is within the budget."""
    over = found.budget is not None and (found.peak_measured or 0) > found.budget
    moved = sum(record.offload_after != RECOMPUTED for record in found.transfers)
    return found.decision, over, moved, len(found.transfers), len(found.splits), found.replaced, len(found.running)


def largest_batch(
    model: Any, memory_budget: Budget, start: int = 32, device: str = "", options: Options | None = None
) -> int:
    """The largest batch of a compiled model for which a plan keeps within the budget; 0 if none does.

    Nothing runs: the step is traced for several batches, and planned by estimates. Where parts of the step may be split
    along the batch, as they are by default, a batch that is an eighth larger may fit, too. On a GPU leave some room:
    the workspace of convolutions can need slightly more than is estimated.

    Args:
        model: a compiled Keras model that says what its inputs are.
        memory_budget: bytes, "10GiB", or a fraction of the device's memory.
        start: the first batch to try.
        device: see `tfmem.plan`.
        options: see `tfmem.plan`; `OffloadOptions(split="never")` finds the largest batch with nothing split, which
            is quick and exact.

    Raises:
        GraphError: the step cannot be traced.
        InvalidBudgetError: the budget is no size.
    """
    found = plan(model, start, budget=memory_budget, device=device, curve=False, max_batch=True, options=options)
    return found.max_batch or 0

"""The settings and services that the steps of one optimised object share on a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Self

import tensorflow as tf

from custom_ops.load import Library
from graph_passes.analysis.memory.simulate import Link
from tfmem.runtime.alternation import Alternation
from tfmem.runtime.device_memory import DeviceMemory
from tfmem.runtime.estimate import Estimate, estimate
from tfmem.runtime.measured_call import Meter
from tfmem.runtime.notices import Notices
from tfmem.runtime.settings import Settings
from tfmem.runtime.workers import Workers


@dataclass(frozen=True, eq=False, kw_only=True)
class Engine:
    """What the steps of an optimised object run with.

    Attributes:
        settings: the user's options, resolved for the device.
        library: the op library.
        memory: the device's.
        meter: measures calls.
        link: bandwidth between the device and where tensors go.
        notices: the warnings of the object.
        alternation: of steps and of what is measured meanwhile.
        workers: how steps agree with those of other workers.
    """

    settings: Settings
    library: Library
    memory: DeviceMemory
    meter: Meter
    link: Link
    notices: Notices
    alternation: Alternation = field(default_factory=Alternation)
    workers: Workers = field(default_factory=Workers)

    def under(self, settings: Settings) -> Self:
        """These services under other settings."""
        return replace(self, settings=settings)

    def estimate(self, workspace: bool) -> Estimate:
        """Costs before anything ran; see `estimate`."""
        return estimate(self.settings.target, self.memory.in_use, workspace)

    @property
    def spill_key(self) -> str:
        """What stands for the directory of spill files in graphs."""
        return self.library.spill_key(self.settings.options.offload.spill_directory)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """A block in which no step of the object runs, and the device has finished what earlier steps enqueued.

        This waits for a number that TensorFlow computes and copies back. Synchronizing the CUDA context would end
        another thread's capture of a CUDA graph.
        """
        with self.alternation.measurement(self._finish):
            yield

    def _finish(self) -> None:
        with suppress(tf.errors.OpError), tf.init_scope(), tf.device(self.settings.target.name):
            (tf.zeros([]) + 1.0).numpy()

"""The workers of a cluster, and the board on which they tell each other things: TensorFlow's coordination service.

Relies on TensorFlow's context: no public API reads and writes what the service keeps. An entry is written once, and a
second writer gets an error. So the workers agree on what the first of them wrote.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import tensorflow as tf
from tensorflow.python.eager import context

PATIENCE = 300.0  # seconds; while a worker waits here, it would otherwise wait in its first collective
_AT_ONCE = 1.0  # seconds of waiting that no signal can interrupt


@dataclass(frozen=True)
class Board:
    """What all workers of the cluster read and write.

    Attributes:
        task: this worker, as TensorFlow names it.
        tasks: all workers.
    """

    task: str
    tasks: tuple[str, ...]

    def put(self, key: str, value: str) -> bool:
        """Write an entry; whether it is new. One that is there stays."""
        try:
            context.context().set_config_key_value(key, value)
        except tf.errors.AlreadyExistsError:
            return False
        return True

    def get(self, key: str, until: float) -> str | None:
        """An entry, waiting for it until a time of `time.monotonic`; None if it is not there by then.

        Raises:
            tf.errors.OpError: the cluster has lost a worker, whose entry would never come.
        """
        while True:
            seconds = min(_AT_ONCE, max(0.001, until - time.monotonic()))  # 0 would be for ever
            try:
                value: str = context.context().get_config_key_value(key, round(1000 * seconds))
                return value
            except tf.errors.DeadlineExceededError:
                self._require_all()
                if time.monotonic() >= until:
                    return None

    def _require_all(self) -> None:
        jobs = Counter(tf.DeviceSpec.from_string(task).job for task in self.tasks)
        lost = next(filter(None, context.context().get_task_states(list(jobs.items()))), None)
        if lost is not None:
            raise lost

    def report(self, error: tf.errors.OpError) -> None:
        """Tell all workers of an error, so that the collectives in which they wait for this one fail."""
        with suppress(tf.errors.OpError, ValueError):  # the cluster has gone already
            context.context().report_error_to_cluster(error.error_code, f"{self.task} failed: {error.message[:1000]}")


@dataclass(frozen=True)
class Workers:
    """How the steps of one optimised object agree with those of other workers.

    Attributes:
        version: what the workers must have in common.
        patience: seconds to wait for the other workers.
        turns: how many steps of a name the workers agreed on.
    """

    version: str = ""
    patience: float = PATIENCE
    turns: dict[str, int] = field(default_factory=dict)

    def board(self) -> Board | None:
        """The cluster's; None where this process is no worker of one."""
        service = context.context().coordination_service
        if service is None or not service.service_type:
            return None
        tasks = [f"/job:{job.name}/task:{at}" for job in service.coordinated_job_list for at in range(job.num_tasks)]
        here = tf.DeviceSpec.from_string(tf.config.list_logical_devices("CPU")[0].name)
        task = f"/job:{here.job}/task:{here.task}"
        return Board(task, tuple(tasks)) if task in tasks and len(tasks) > 1 else None

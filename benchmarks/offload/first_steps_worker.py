"""The first calls of one step of `benchmarks.offload.first_steps`, in this process:
`python -m benchmarks.offload.first_steps_worker TASK_JSON RESULT_FILE`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import tfmem
from benchmarks.offload.first_steps import BATCH, CALLS, SIDE
from benchmarks.offload.networks import model
from examples import models


def main() -> None:
    """Read the task, run it, write the result."""
    task, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    batch, step = images(task["net"]), training(task["net"])
    if task["budget"]:
        step = tfmem.optimize(step, memory_budget=task["budget"])
    wall, processor = [], []
    for _ in range(CALLS):
        began, used = time.perf_counter(), time.process_time()
        float(step(*batch))
        wall.append(time.perf_counter() - began)
        processor.append(time.process_time() - used)
    found: dict[str, Any] = {"status": "ok", "wall": wall, "processor": processor}
    if not task["budget"]:
        found["peak"] = tfmem.plan(training(task["net"]), batch, curve=False).peak_before
    path.write_text(json.dumps(found))


def training(net: str) -> Any:
    """A training step of the network, with Adam."""
    keras.utils.set_random_seed(0)
    if net == "unet":
        return models.make_step(model(net, SIDE))
    return models.make_step(
        getattr(keras.applications, net)(
            weights=None, input_shape=(SIDE, SIDE, 3), classes=10, classifier_activation=None
        )
    )


def images(net: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Noise, and labels of it."""
    labels = [BATCH, SIDE, SIDE] if net == "unet" else [BATCH]
    return tf.random.stateless_normal([BATCH, SIDE, SIDE, 3], [1, 2]), tf.zeros(labels, tf.int32)


if __name__ == "__main__":
    main()

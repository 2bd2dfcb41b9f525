"""One training of `benchmarks.offload.training`.

python -m benchmarks.offload.training_worker TASK_JSON RESULT_FILE
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import tfmem
from tfmem.devices import memory

SIDE, CLASSES = 32, 10
TRAINED, HELD_OUT = 2048, 256
ENOUGH = 0.85  # accuracy
EVERY = 10  # steps between two looks at it
LAST = 5  # steps whose peak counts


def main() -> int:
    """Do the task of the command line."""
    task, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    tf.keras.utils.set_random_seed(1)
    tf.config.experimental.enable_op_determinism()
    path.write_text(json.dumps({"status": "ok", **trained(task)}))
    return 0


def trained(task: dict[str, Any]) -> dict[str, Any]:
    """Losses until the accuracy is reached, and what the training took."""
    device = "/device:GPU:0" if tf.config.list_physical_devices("GPU") else "/device:CPU:0"
    model, library = network(task["width"]), tfmem.load_ops()
    images, labels = made(TRAINED, seed=2)
    held_out = made(HELD_OUT, seed=3)
    model.optimizer.build(model.trainable_variables)
    before = memory(library, device).bytes_in_use
    if task["budget"]:
        tfmem.optimize(model, memory_budget=task["budget"], passes=("offload",), cache_directory="")
    losses: list[float] = []
    seconds, peaks, accuracy, began = [], [], 0.0, time.perf_counter()
    while accuracy < ENOUGH and len(losses) < task["steps"]:
        first = len(losses) * task["batch"] % (TRAINED - task["batch"] + 1)
        batch = slice(first, first + task["batch"])
        memory(library, device, reset=True)
        start = time.perf_counter()
        losses.append(float(model.train_on_batch(images[batch], labels[batch])))
        seconds.append(time.perf_counter() - start)
        peaks.append(memory(library, device).peak_bytes)
        if len(losses) % EVERY == 0:
            accuracy = right(model, *held_out)
    return {
        "losses": losses,
        "accuracy": accuracy,
        "seconds": time.perf_counter() - began,
        "step": statistics.median(seconds[len(seconds) // 2 :]),
        "before": before,
        "peak": max(peaks[-LAST:]),
    }


def network(width: int) -> Any:
    """VGG's kind of net, for small images."""
    layers = tf.keras.layers
    hidden = given = layers.Input((SIDE, SIDE, 3))
    for filters in (width, 2 * width, 4 * width):
        for _ in range(2):
            hidden = layers.Conv2D(filters, 3, padding="same", use_bias=False)(hidden)
            hidden = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(hidden))
        hidden = layers.MaxPooling2D()(hidden)
    model = tf.keras.Model(given, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(hidden)))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(1e-3), loss, jit_compile=False)
    return model


def made(count: int, seed: int) -> tuple[Any, Any]:
    """Images and their labels: the pattern of a class, moved by some pixels, under noise."""
    patterns = np.random.default_rng(1).normal(size=(CLASSES, SIDE // 4, SIDE // 4, 3)).repeat(4, 1).repeat(4, 2)
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, CLASSES, count)
    moved = [np.roll(patterns[label], draw.integers(-4, 5, 2), (0, 1)) for label in labels]
    noise = draw.normal(size=(count, SIDE, SIDE, 3), scale=1.5)
    return (np.stack(moved) + noise).astype("float32"), labels


def right(model: Any, images: Any, labels: Any) -> float:
    """The share of images whose label the model says."""
    said = np.argmax(model(images, training=False), axis=1)
    return float(np.mean(said == labels))


if __name__ == "__main__":
    sys.exit(main())

"""One case in a process: `python -m benchmarks.distribution.case TASK_JSON RESULT_FILE`; see `benchmarks.distribution`.

With "workers", this process starts one for each GPU, and they train under MultiWorkerMirroredStrategy.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STEPS, WARM = 25, 6
PATIENCE = 60.0  # seconds until tfmem has decided how the steps of one process run, at the most


def main() -> None:
    """Read the task, run it, write the result."""
    task, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    if task["workers"] and "worker" not in task:
        path.write_text(json.dumps(of_workers(task, path)))
        return
    path.write_text(json.dumps({"status": "ok", **run(task)}))


def visible_gpus(count: int) -> list[str]:
    """The first GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (given.split(",") if given else list(map(str, range(count))))[:count]


def of_workers(task: dict[str, Any], path: Path) -> dict[str, Any]:
    """What the first of several workers measured, each a process with one GPU, over loopback."""
    sockets = [socket.socket() for _ in range(task["gpus"])]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    processes, visible = [], visible_gpus(task["gpus"])
    for index in range(task["gpus"]):
        told = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        variables = {**os.environ, "TF_CONFIG": json.dumps(told), "CUDA_VISIBLE_DEVICES": visible[index]}
        arguments = [json.dumps({**task, "worker": index}), f"{path}.{index}"]
        command = [sys.executable, "-m", "benchmarks.distribution.case", *arguments]
        processes.append(subprocess.Popen(command, env=variables))
    try:
        statuses = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(statuses):
        return {"status": "error", "message": f"workers ended with {statuses}"}
    found: list[dict[str, Any]] = [json.loads(Path(f"{path}.{index}").read_text()) for index in range(task["gpus"])]
    peaks = [peak for each in found for peak in each["peaks"]]
    return {**found[0], "peaks": peaks, "alike": len({each["digest"] for each in found}) == 1}


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a step, peaks in bytes, losses, and a digest of losses and weights."""
    import keras as keras3
    import numpy as np
    import tensorflow as tf
    import tf_keras

    import tfmem
    from benchmarks.offload.networks import VOCABULARY, bert, masked

    keras: Any = tf_keras if task["workers"] else keras3  # Keras 3's fit fails in several workers
    if task["exact"]:
        tf.config.experimental.enable_op_determinism()
    if task["workers"]:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    elif task["gpus"] == 1:
        strategy = tf.distribute.get_strategy()
    else:
        strategy = tf.distribute.MirroredStrategy()
    replicas, random = strategy.num_replicas_in_sync, np.random.default_rng(0)
    batch = task["batch"] * replicas
    if task["network"] == "BERT":
        inputs = random.integers(0, VOCABULARY, (batch, task["side"]))
        labels = inputs[:, : masked(task["side"])]
    else:
        inputs = random.normal(size=(batch, task["side"], task["side"], 3)).astype(np.float32)
        labels = random.integers(0, 1000, batch)
    data = tf.data.Dataset.from_tensors((inputs, labels)).repeat()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        if task["network"] == "BERT":
            model: Any = bert(task["side"])
        else:
            made = getattr(keras.applications, task["network"])
            model = made(weights=None, input_shape=inputs.shape[1:], classifier_activation=None)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(1e-3), loss, jit_compile=False)
    times = clock(keras)
    if task["options"] is not None:
        options = dict(task["options"])
        if "fusion" in options.get("passes", ()):
            options["fusion"] = tfmem.FusionOptions(tune="off")  # as replicas are: by the model, without timing
        model = tfmem.optimize(model, memory_budget=task["budget"], **options)
    gpus = [f"GPU:{index}" for index in range(1 if task["workers"] else task["gpus"])]
    gpus = gpus if tf.config.list_physical_devices("GPU") else ["CPU:0"]
    for gpu in gpus:
        tf.config.experimental.reset_memory_stats(gpu)
    begun = time.perf_counter()
    model.fit(data, steps_per_epoch=STEPS, epochs=1, verbose=0, callbacks=[times])
    weights = [value.numpy() for value in model.trainable_variables]
    timed = times
    if task["options"] is not None and not task["workers"] and not tfmem.report(model).decided:
        while not tfmem.report(model).decided and time.perf_counter() < begun + PATIENCE:
            model.fit(data, steps_per_epoch=WARM, epochs=1, verbose=0)
        timed = clock(keras)
        model.fit(data, steps_per_epoch=STEPS, epochs=1, verbose=0, callbacks=[timed])
    outcome: dict[str, Any] = {
        "ms": 1e3 * float(np.median(np.diff(timed.ended[WARM:]))),
        "first": times.ended[0] - begun,
        "timed_after": timed.ended[0] - begun,
        "losses": times.losses,
        "peaks": [int(tf.config.experimental.get_memory_info(gpu)["peak"]) for gpu in gpus],
        "digest": digest(times.losses, weights),
    }
    if task["options"] is not None:
        report = tfmem.report(model)
        outcome["report"] = {
            "decision": str(report.decision.value),
            "moved": len(report.transfers),
            "regions": len(report.running),
            "notes": report.notes,
        }
    return outcome


def clock(keras: Any) -> Any:
    """A callback that keeps when each step ended, and its loss."""

    class Clock(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []
            self.ended: list[float] = []

        def on_train_batch_end(self, _: int, logs: Any = None) -> None:
            self.losses.append(float(logs["loss"]))
            self.ended.append(time.perf_counter())

    return Clock()


def digest(losses: Any, weights: Any) -> str:
    """Equal for losses and weights that are equal to the bit."""
    found = hashlib.sha256(json.dumps(losses).encode())
    for value in weights:
        found.update(value.tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()

"""One case in a process; see `benchmarks.distribution`. Prints its outcome as one line of JSON."""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import Any

STEPS, WARM = 25, 5


def main(network: str, batch: str, share: str, exact: str) -> None:
    """TensorFlow's own step, then one with a budget of `share` of its peak."""
    import keras
    import tensorflow as tf

    if exact == "True":
        tf.config.experimental.enable_op_determinism()
    strategy = tf.distribute.MirroredStrategy()
    plain, expected = run(strategy, network, int(batch), None)
    gc.collect()
    keras.backend.clear_session()
    gc.collect()
    budget = int(float(share) * max(plain["peaks"]))
    ours, found = run(strategy, network, int(batch), budget)
    equal = plain["losses"] == ours["losses"] and all((a == b).all() for a, b in zip(expected, found, strict=True))
    print(json.dumps({"budget": budget, "plain": plain, "tfmem": ours, "equal": equal}))


def run(strategy: Any, network: str, batch: int, budget: int | None) -> tuple[dict[str, Any], list[Any]]:
    """Times, peaks in bytes and losses of some steps, and the weights of all replicas after them."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfmem

    gpus = [device.name.split("device:")[1] for device in tf.config.list_logical_devices("GPU")]
    random = np.random.default_rng(0)
    images = random.normal(size=(batch * len(gpus), 224, 224, 3)).astype(np.float32)
    data = tf.data.Dataset.from_tensors((images, random.integers(0, 1000, len(images)))).repeat()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = getattr(keras.applications, network)(weights=None)
        model.compile(keras.optimizers.SGD(1e-3), "sparse_categorical_crossentropy", jit_compile=False)
    losses: list[float] = []
    ended: list[float] = []

    class Clock(keras.callbacks.Callback):
        def on_train_batch_end(self, _: int, logs: Any = None) -> None:
            losses.append(float(logs["loss"]))
            ended.append(time.perf_counter())

    if budget is not None:
        tfmem.optimize(model, memory_budget=budget)
    for gpu in gpus:
        tf.config.experimental.reset_memory_stats(gpu)
    begun = time.perf_counter()
    model.fit(data, steps_per_epoch=STEPS, epochs=1, verbose=0, callbacks=[Clock()])
    outcome = {
        "ms": 1e3 * float(np.median(np.diff(ended[WARM:]))),
        "first": ended[0] - begun,
        "losses": losses,
        "peaks": [int(tf.config.experimental.get_memory_info(gpu)["peak"]) for gpu in gpus],
    }
    if budget is not None:
        outcome["moved"] = len(tfmem.report(model).transfers)
    weights = [value.numpy() for each in model.trainable_variables for value in each.value.values]
    return outcome, weights


if __name__ == "__main__":
    main(*sys.argv[1:])

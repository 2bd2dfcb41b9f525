"""Train a CNN in a custom loop on all GPUs, or on two logical CPUs: without tfmem, then under a budget, and compare.

    python -m examples.train_distributed
    python -m examples.train_distributed --width 1 --image-size 224 --batch 128 --memory-budget 8GiB

Both trainings start from the same weights, under one `tf.distribute.MirroredStrategy`. Without `--memory-budget` each
device gets 90% of what the step would need there. Prints losses, what each device needed, and what moved."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from examples import images, models

SHARE = 0.9  # without --memory-budget: this share of what the step needs on a device
AMPLE = 0.9  # of a device's memory


def main(arguments: list[str] | None = None) -> int:
    """Train twice and compare. Returns 1 where losses differ, or where no tensor moved."""
    options = parse(arguments)

    import tensorflow as tf

    import tfmem

    devices = use_devices(tf)
    strategy = tf.distribute.MirroredStrategy(devices)
    print(f"{options.model}, batch {options.batch} on each of {', '.join(devices)}")
    given = [next(images.batches("digits", options.batch, options.image_size, 1, at)) for at in range(len(devices))]
    batch = strategy.experimental_distribute_values_from_function(
        lambda context: tuple(map(tf.constant, given[context.replica_id_in_sync_group]))
    )

    print("without tfmem:")
    expected = losses_of(options, strategy, batch, lambda step: step)[1]
    budget = options.memory_budget
    if budget is None:
        print("under a budget in which the step fits, to see what it needs:")
        fits = losses_of(options, strategy, batch, partial(tfmem.optimize, memory_budget=AMPLE))[0]
        budget = {found.device: round(SHARE * found.peak_before) for found in tfmem.report(fits).devices}
        del fits
    gc.collect()  # the variables of earlier models would take of the budget
    print(f"under the budget, {budget}:")
    try:
        step, losses = losses_of(options, strategy, batch, partial(tfmem.optimize, memory_budget=budget))
    except tfmem.BudgetError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    report = tfmem.report(step)
    print(report.to_text())
    if losses != expected:
        print("FAILED: the losses differ", file=sys.stderr)
        return 1
    print(f"the losses of {options.steps} steps are bit for bit the same")
    if not report.transfers:
        print("FAILED: no tensor moved; give a smaller --memory-budget, or a larger --batch", file=sys.stderr)
        return 1
    return 0


def losses_of(
    options: argparse.Namespace, strategy: Any, batch: Any, optimize: Callable[[Any], Any]
) -> tuple[Any, list[float]]:
    """The step of a new model, as `optimize` gives it, and the sum of the replicas' losses in each step."""
    import keras
    import tensorflow as tf

    with strategy.scope():
        model = models.build(options.model, options.image_size, 10, options.width, seed=options.seed)
        optimizer = keras.optimizers.Adam(models.LEARNING_RATE)
        optimizer.build(model.trainable_variables)

    def replica(pictures: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(pictures, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica, args=batch), axis=None)

    step = optimize(train)
    began = time.monotonic()
    losses = [float(step(batch)) for _ in range(options.steps)]
    print(f"  {time.monotonic() - began:.1f} s, losses {' '.join(f'{loss:.4f}' for loss in losses)}")
    return step, losses


def use_devices(tf: Any) -> list[str]:
    """Names of all GPUs, or of two logical CPUs where there is none; before TensorFlow starts any."""
    tf.config.experimental.enable_op_determinism()
    tf.keras.utils.set_random_seed(0)
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if not gpus:
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return [f"GPU:{number}" for number in range(len(gpus))] or ["CPU:0", "CPU:1"]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vgg19", choices=("alexnet", "resnet152", "vgg19"))
    parser.add_argument("--memory-budget", help="for each device: bytes, '8GiB', or a share of its memory")
    parser.add_argument("--batch", type=int, default=128, help="images of one replica in a step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--image-size", type=int, default=64, help="pixels (default: %(default)s)")
    parser.add_argument(
        "--width", type=float, default=0.125, help="factor on each layer's channels (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args(arguments)
    for name in ("batch", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())

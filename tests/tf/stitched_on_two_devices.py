"""Steps that lie on two devices, stitched: a separate program, as logical devices are made before TensorFlow begins.

    python -m tests.tf.stitched_on_two_devices GPU

One GPU, or the CPU, is split in two where there is but one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

import tfmem
from tests.tf.stitched_steps import BY_MODEL, PASSES

STEPS = 8
BYTES = 4096  # megabytes of a half of a GPU


class Halves:
    """Two layers, each with its weights, layer normalisation and momentum on a separate device.

    Attributes:
        variables: weights, then velocities.
        step: takes features; returns the loss.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        rng = np.random.default_rng(0)
        self._devices = devices
        self.weights, self.velocities = [], []
        for device in devices:
            with tf.device(device):
                self.weights.append(tf.Variable(rng.normal(size=(24, 24)).astype(np.float32) / 5))
                self.velocities.append(tf.Variable(tf.zeros([24, 24])))
        self.variables = self.weights + self.velocities
        self.step = tf.function(self._run)

    def _run(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            for device, weights in zip(self._devices, self.weights, strict=True):
                with tf.device(device):
                    y = tf.nn.gelu(x @ weights)
                    mean, variance = tf.nn.moments(y, [1], keepdims=True)
                    x = (y - mean) * tf.math.rsqrt(variance + 1e-3)
            with tf.device(self._devices[-1]):
                loss = tf.reduce_mean(tf.square(x - 0.5))
        gradients = tape.gradient(loss, self.weights)
        for device, weights, velocity, gradient in zip(
            self._devices, self.weights, self.velocities, gradients, strict=True
        ):
            with tf.device(device):
                weights.assign_sub(velocity.assign(0.9 * velocity + 0.1 * gradient))
        return loss


def trained(net: Halves, step: Any) -> list[Any]:
    """Losses and variables after some steps."""
    rng = np.random.default_rng(1)
    losses = [step(tf.constant(rng.normal(size=(16, 24)).astype(np.float32))).numpy() for _ in range(STEPS)]
    return [losses, *(each.numpy() for each in net.variables)]


def stitched(net: Halves) -> tuple[list[Any], tfmem.Report]:
    step = tfmem.optimize(net.step, passes=PASSES, fusion=BY_MODEL, cache_directory="")
    return trained(net, step), tfmem.report(step)


def main(kind: str) -> None:
    physical = tf.config.list_physical_devices(kind)
    if len(physical) < 2:
        half = tf.config.LogicalDeviceConfiguration(BYTES if kind == "GPU" else None)
        tf.config.set_logical_device_configuration(physical[0], [half] * 2)
    tf.config.experimental.enable_tensor_float_32_execution(False)
    first, second = (f"/job:localhost/replica:0/task:0/device:{kind}:{index}" for index in range(2))
    expected = trained(plain := Halves([first, second]), plain.step)

    # one step over both
    found, report = stitched(Halves([first, second]))
    print(len(report.regions), "regions", report.notes)
    if len(report.regions) < 2:
        raise SystemExit(f"a region on each device was expected:\n{report}")
    compare(found, expected)

    # a step for each, one after the other and at once
    for made in (list(map(on, (first, second))), list(ThreadPoolExecutor(2).map(on, (first, second)))):
        for each in made:
            compare(each, expected)
    print("equal")


def on(device: str) -> list[Any]:
    return stitched(Halves([device, device]))[0]


def compare(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main(sys.argv[1])

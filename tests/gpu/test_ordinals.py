"""What is measured beside TensorFlow is measured on the GPU that the device's name means."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tensorflow as tf

PROGRAM = """
import tensorflow as tf
gpus = tf.config.list_physical_devices("GPU")
{setup}
import tfmem
from custom_ops.jit.device import Device
from custom_ops.jit.launch import checked, cuda_driver
from tfmem.devices import find_target, measured_link

library = tfmem.load_ops()
target = find_target({device!r}, library)
with tf.device(target.name):
    held = tf.zeros([1 << 30], tf.uint8)
driver = cuda_driver()

def free(ordinal):
    with Device(ordinal):
        return checked(driver, driver.cuMemGetInfo(), "read its memory")  # of two numbers the first

# TensorFlow's memory was taken on this GPU, whatever its name there
assert min(range(len(gpus)), key=free) == target.ordinal == {ordinal}, (target, [free(n) for n in range(len(gpus))])
assert measured_link(target, library).offload > 1e9
"""
SPLIT = "tf.config.set_logical_device_configuration(gpus[{}], [tf.config.LogicalDeviceConfiguration(8192)] * 2)"
GROW = "[tf.config.experimental.set_memory_growth(gpu, True) for gpu in gpus]"


@pytest.mark.parametrize(
    ("setup", "device", "ordinal"),
    [
        (f"{GROW}; tf.config.set_visible_devices(gpus[1], 'GPU')", "GPU:0", 1),
        (f"{GROW}; tf.config.set_visible_devices([gpus[1], gpus[0]], 'GPU')", "GPU:0", 0),
        (GROW, "GPU:1", 1),
        (SPLIT.format(0), "GPU:1", 0),
        (SPLIT.format(1) + "; tf.config.set_visible_devices(gpus[1], 'GPU')", "GPU:1", 1),
    ],
)
def test_the_gpu_that_is_measured_is_the_one_that_tensorflow_uses(setup: str, device: str, ordinal: int) -> None:
    if len(tf.config.list_physical_devices("GPU")) < 2:
        pytest.skip("needs two GPUs")
    program = PROGRAM.format(setup=setup, device=device, ordinal=ordinal)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]

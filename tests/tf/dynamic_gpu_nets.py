"""What tests of dynamic nets on the fake GPU share."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from custom_ops.dynamic.codegen.gpu_program import DynamicProgram, build
from custom_ops.dynamic.codegen.on_chip import Chip
from custom_ops.dynamic.op import forward_backward
from custom_ops.load import load
from tests.tf.dynamic_nets import TreeLSTM, nodes
from tests.tf.fake_gpu import ARCH, FakeGpu
from tfmem import dynamic

CHIP = Chip(processors=3)


def program_of(gpu: FakeGpu, handle: dynamic.Handle, chip: Chip = CHIP, **options) -> DynamicProgram:
    return build(handle.spec, ARCH, chip, compile_source=gpu.compile_source, **options)


def as_arrays(gradients):
    return [tf.convert_to_tensor(gradient).numpy() for gradient in gradients]


def assert_like(found, expected, tolerance=1e-5):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, float(np.abs(b).max())))


def check_net(gpu: FakeGpu, net: TreeLSTM, trees, chip: Chip = CHIP, **options) -> DynamicProgram:
    handle = net.specialize()
    program = program_of(gpu, handle, chip, **options)
    batch = handle.batch([nodes(handle, tree) for tree in trees])
    found, _, gradients = forward_backward(load().ops, handle.spec, handle.parameters, batch, 0, None, program)
    losses, expected = net.gradients(trees)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert_like(as_arrays(gradients), expected)
    return program

"""Products of matrices within fusion kernels on a GPU: in every tile, beside float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from custom_ops.fusion.codegen.kernel import make
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.fusion.search.kernel_model import ranked
from custom_ops.fusion.search.space import kernels, layouts
from custom_ops.jit.device import DeviceContext
from custom_ops.jit.image import KernelImage
from custom_ops.jit.launch import LoadedKernel, Module
from tests.fusion_kernels import run
from tests.fusion_products import Given, exact, heads, layer, product, softmax, together

CASES: dict[str, Given] = {
    "product": product(32, 512, 512),
    "odd": product(37, 21, 333, "a0 a2", "a1 a2"),
    "few rows": product(4, 512, 2048),
    "half": product(49, 256, 256, dtype="float16"),
    "bfloat16": product(32, 64, 512, dtype="bfloat16"),
    "float64": product(5, 40, 100, dtype="float64"),
    "layer": layer(32, 256, 128),
    "heads": heads(4, 8, 32, 33, 64),
    "together": together(33, 64, 96),
    "softmax": softmax(8, 32, 33, 64),
}


@pytest.fixture(scope="module")
def device() -> Iterator[DeviceContext]:
    with DeviceContext() as found:
        yield found


@pytest.mark.parametrize("name", list(CASES))
def test_products(device: DeviceContext, name: str) -> None:
    """The five best of the model: right, the same numbers each time, and no registers spilled."""
    program, tensors = CASES[name]
    shapes = [tensor.shape for tensor in tensors]
    pattern = Pattern.of(program, shapes)
    sizes = pattern.program.sizes(pattern.merged(shapes))
    found = [kernel for kernel, _ in ranked(list(kernels(pattern, sizes, layouts(pattern, device.processors))), shapes)]
    assert found
    expected = exact(program, tensors)
    for kernel in (make(pattern, each.plan.configuration) for each in found[:5]):
        code = device.compile_source(kernel.source.text, device.arch, contract=False)
        with closing(Module(code, device.driver)) as module:
            image = KernelImage(
                device.arch, kernel.entry, kernel.plan.configuration.threads, code, kernel.source.shared
            )
            assert LoadedKernel(image, module).local == 0, kernel.plan.configuration
            for tf32 in (False, True):
                first, again = (run(device, kernel, tensors, module, code, tf32=tf32) for _ in range(2))
                error = 2e-2 if tensors[0].dtype.itemsize == 2 else 4e-3 if tf32 else 2e-5
                for result, same, right in zip(first, again, expected, strict=True):
                    np.testing.assert_array_equal(result, same)
                    scale = max(1.0, float(np.abs(right).max()))
                    np.testing.assert_allclose(result.astype(np.float64), right, rtol=0, atol=error * scale)

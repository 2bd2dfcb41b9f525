"""The elementwise functions of kernels/math.cuh against float64, for every float32 there is. Needs a GPU and NVRTC."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from custom_ops.jit import nvrtc
from custom_ops.jit.device import DeviceContext
from custom_ops.jit.launch import checked, cuda_driver

pytest_plugins = ("tests.gpu_device",)

BLOCKS, THREADS = 1056, 256
SOURCE = """
#include "math.cuh"
using namespace tfmem;

// Units in the last place of the truth; results below 1.2e-38 may be 0.
__device__ double distance(double truth, float found) {
  if (truth != truth) return found != found ? 0.0 : INFINITE;
  if (found != found) return INFINITE;
  if (fabs(truth) < 1.2e-38) return fabs(found - truth) < 1.2e-38 ? 0.0 : INFINITE;
  return fabs(found - truth) / ldexp(1.0, ilogb(truth) - 23);
}

extern "C" __global__ void check(double* worst) {
  double largest = 0.0;
  for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < 1ull << 32; i += gridDim.x * blockDim.x) {
    const float x = __uint_as_float(static_cast<unsigned>(i));
    largest = fmax(largest, distance(TRUTH, FUNCTION(x)));
  }
  worst[blockIdx.x * blockDim.x + threadIdx.x] = largest;
}
"""


@pytest.mark.parametrize(
    ("function", "truth", "bound"),
    [
        ("sigmoid", "1.0 / (1.0 + exp(-static_cast<double>(x)))", 5.0),
        ("hyperbolic_tangent", "tanh(static_cast<double>(x))", 3.0),
    ],
)
def test_units_in_the_last_place(device: DeviceContext, function: str, truth: str, bound: float) -> None:
    driver = cuda_driver()
    names = {"FUNCTION": function, "TRUTH": truth, "INFINITE": "1e30"}
    defined = "".join(f"#define {name} {value}\n" for name, value in names.items())
    image = nvrtc.compile_source(defined + SOURCE, device.arch)
    module = checked(driver, driver.cuModuleLoadData(image), "load the check")
    kernel = checked(driver, driver.cuModuleGetFunction(module, b"check"), "find the check")
    worst = np.full(BLOCKS * THREADS, np.nan)
    place = device.upload(worst)
    argument = ctypes.c_uint64(place)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    launch = (kernel, BLOCKS, 1, 1, THREADS, 1, 1, 0, device.stream, ctypes.addressof(arguments), 0)
    checked(driver, driver.cuLaunchKernel(*launch), "launch the check")
    assert device.download(place, worst).max() <= bound

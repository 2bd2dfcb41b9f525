"""Where a step of our recurrent kernels goes, by the clock of one thread of each CTA.

    python -m benchmarks.recurrent.profile --only lstm/1024 lstm/512 lstm/256 --output profile.json

The kernel that the tuner chooses for a case is compiled once more with the clock read where a part of a step ends
(TFMEM_MARK in custom_ops/kernels/common.cuh), which takes about 0.06 us each time. It needs cuda.bindings and NVRTC, no
framework."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from benchmarks.offload.tables import table
from benchmarks.records import begun, save
from benchmarks.recurrent.cases import BOUNDS, TOP, Case, kernel_in_words, single_passes
from benchmarks.recurrent.kernels import choose, specs_of
from benchmarks.runs import asked, command_line
from custom_ops.jit import nvrtc
from custom_ops.jit.device import Device
from custom_ops.jit.launch import checked, cuda_driver
from custom_ops.recurrent.codegen.source import generate
from custom_ops.recurrent.launch import Launcher
from custom_ops.recurrent.program import build
from custom_ops.recurrent.search.samples import Samples
from custom_ops.recurrent.spec import Configuration, RecurrentSpec

PARTS = ("waiting for operands", "product", "sums of the cluster", "elementwise, sending", "reading ahead")
MOST_CTAS = 1024
TICKS = "tfmem_ticks"
MARKS = f"""
__shared__ unsigned long long tfmem_sum[{len(PARTS)}];
__shared__ unsigned long long tfmem_last;
__device__ unsigned long long {TICKS}[{len(PARTS)} * {MOST_CTAS}];
#define TFMEM_MARK(part)                                                  \\
  if (threadIdx.x == 0) {{                                                  \\
    const unsigned long long now = clock64();                             \\
    if ((part) < 0) {{                                                      \\
      for (int i = 0; i < {len(PARTS)}; ++i) tfmem_sum[i] = 0;                        \\
    }} else {{                                                              \\
      tfmem_sum[(part) < 0 ? 0 : (part)] += now - tfmem_last;             \\
    }}                                                                     \\
    tfmem_last = now;                                                     \\
  }}
#define TFMEM_MARKS_END                                                   \\
  if (threadIdx.x == 0) {{                                                  \\
    const int cta = blockIdx.x + gridDim.x * blockIdx.y;                  \\
    for (int i = 0; i < {len(PARTS)}; ++i) {TICKS}[i * {MOST_CTAS} + cta] = tfmem_sum[i]; \\
  }}
"""


def main(arguments: list[str] | None = None) -> int:
    """Profile the cases asked for, print a table, keep the results."""
    parser = command_line("recurrent.profile", __doc__, "recurrent_profile.json")
    parser.add_argument("--precision", choices=BOUNDS, default="highest", help="of the products (highest)")
    options, cases = asked(parser, arguments, single_passes())
    if not cases:
        return 0
    results = begun(options)
    deadline = time.monotonic() + options.total_seconds
    for case in cases:
        name = case.name if options.precision == "highest" else f"{case.name}, {options.precision}"
        if (name not in results["cases"] or options.again) and time.monotonic() < deadline:
            results["cases"][name] = profiled(case, options.precision)
            save(results, options.output)
    print(written(results))
    return 0


def written(results: Mapping[str, Any]) -> str:
    """The table of all that was profiled."""
    rows = [row(name, outcome) for name, outcome in results["cases"].items()]
    return table(
        "### Where a step goes, us, by the clock of one thread of each CTA", ("case", "kernel", *PARTS, "step"), rows
    )


def marked(spec: RecurrentSpec, configuration: Configuration, arch: int) -> str:
    """The source of a kernel that reads the clock."""
    return MARKS + generate(spec, configuration, arch)


def profiled(case: Case, precision: str) -> dict[str, Any]:
    """Microseconds of a step: the whole, without marks and with them, and its parts, the mean over CTAs."""
    (spec,) = specs_of(case, precision)
    _, report = choose(case, precision, TOP)
    (kernel,) = report["kernels"]
    configuration = Configuration(**kernel["configuration"])
    with Device() as device:
        program = build(spec, configuration, device.arch)
        code = nvrtc.compile_source(marked(spec, configuration, device.arch), device.arch)
        launcher = Launcher(replace(program, image=replace(program.image, code=code)))
        samples = Samples(spec, device, case.batch, case.steps)
        memory = device.allocate(launcher.memory_bytes(case.batch))
        milliseconds = device.time(
            lambda: launcher(case.steps, case.batch, samples.pointers, memory, device.stream, (False,))
        )
        ticks = device.download(launcher.module.address_of(TICKS), np.zeros((len(PARTS), MOST_CTAS), np.uint64))
    used = ticks[:, : configuration.ctas * launcher.groups(case.batch)].astype(float)
    parts = used.mean(axis=1) / case.steps / ticks_of_a_microsecond()
    return {
        **asdict(case),
        "precision": precision,
        "configuration": asdict(configuration),
        "step": kernel["nanoseconds"] / case.steps / 1e3,
        "marked": 1e3 * milliseconds / case.steps,
        "parts": dict(zip(PARTS, parts.tolist(), strict=True)),
    }


def ticks_of_a_microsecond() -> float:
    """Of a multiprocessor's clock at its highest rate, which short kernels run at."""
    driver = cuda_driver()
    device = checked(driver, driver.cuDeviceGet(0), "find the device")
    rate = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CLOCK_RATE  # kHz
    return float(checked(driver, driver.cuDeviceGetAttribute(rate, device), "read its clock rate")) / 1e3


def row(name: str, outcome: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table."""
    parts = (f"{outcome['parts'][part]:.2f}" for part in PARTS)
    return (f"`{name}`", kernel_in_words(outcome["configuration"]), *parts, f"{outcome['step']:.2f}")


if __name__ == "__main__":
    sys.exit(main())

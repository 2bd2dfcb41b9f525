"""The micro-benchmark's kernels compile for every architecture that tfmem supports."""

import pytest

from custom_ops.errors import KernelError
from custom_ops.jit import nvrtc
from custom_ops.recurrent.search import microbenchmark
from tests.compiled import cubin


@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90])
def test_the_kernels_compile(arch):
    try:
        nvrtc.compiler_version()
    except KernelError as error:
        pytest.skip(str(error))
    assert cubin(microbenchmark.source(arch), arch)[:4] == b"\x7fELF"


def test_every_kernel_that_is_launched_is_there():
    launched = {microbenchmark.IN_CLUSTERS}

    def launch(point, iterations):
        launched.add(point.kernel)
        return float(iterations)

    microbenchmark.fit(launch, "some GPU", 90, ((1.0, 132.0), (8.0, 16.0)))
    source = microbenchmark.source(90)
    assert {name for name in launched if f" {name}(float* data" not in source} == set()

"""The micro-benchmark's kernels compile for every architecture that tfmem supports."""

import pytest

from custom_ops.errors import KernelError
from custom_ops.jit import microbenchmark, nvrtc


@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90])
def test_the_kernels_compile(arch):
    try:
        nvrtc.compiler_version()
    except KernelError as error:
        pytest.skip(str(error))
    assert nvrtc.compile_source(microbenchmark.source(arch), arch)[:4] == b"\x7fELF"

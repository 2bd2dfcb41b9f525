"""The GPU mechanism's order of streams, on a fake CUDA driver: no GPU needed, only g++.

In this folder because the mechanism's errors are absl's, which TensorFlow's library holds.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import tensorflow as tf

from custom_ops import build_flags

HERE = Path(__file__).parent
PARTS = ("cuda_driver", "faults", "gpu_link", "gpu_tickets", "host_memory", "pinned_pool")


@pytest.mark.skipif(shutil.which(build_flags.compiler()) is None, reason="needs a C++ compiler")
def test_every_kernel_sees_its_data(tmp_path: Path) -> None:
    sources = [build_flags.PACKAGE / "ops" / f"{part}.cc" for part in PARTS]
    sources.append(HERE / "stream_order.cc")
    objects = [tmp_path / f"{source.stem}.o" for source in sources]
    for source, target in zip(sources, objects, strict=True):
        command = build_flags.compile_command(source, target)
        subprocess.run([*command, f"-I{HERE}", "-O1"], check=True)
    driver = tmp_path / "libcuda.so.1"  # found by dlopen through LD_LIBRARY_PATH
    fake = str(HERE / "fake_cuda.cc")
    shared = ["-shared", "-fPIC", "-O1", "-std=c++17", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([build_flags.compiler(), *shared, fake, "-o", str(driver)], check=True)
    program = tmp_path / "stream_order"
    link = [flag for flag in build_flags.link_command(objects, program) if flag != "-shared"]
    subprocess.run([*link, str(driver)], check=True)
    libraries = os.pathsep.join([str(tmp_path), tf.sysconfig.get_lib()])
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
    result = subprocess.run([str(program)], env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr

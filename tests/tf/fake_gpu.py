"""TfmemFusion as it runs on a GPU, on the fake driver: what it is made of, and how it is called.

In a separate process, since the op library finds a driver once."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from custom_ops import build_flags
from custom_ops.fusion import programs
from custom_ops.fusion.programs import Choose, FusionProgram
from custom_ops.fusion.region import Region
from custom_ops.fusion.text import to_text
from custom_ops.image_functions import named
from custom_ops.load import load
from tests.cuda_on_cpu.driver import Compiler
from tests.tf.native_programs import built, fake_driver, object_file, shared_library
from tests.tf.python_server import run_python

HERE = Path(__file__).parent
ARCH, PROCESSORS = 90, 132
LIBRARIES = "TFMEM_TEST_FAKE_GPU"  # in the environment: the paths of what `build` has made
OUT_OF_MEMORY, UNKNOWN = 2, 999
ALGORITHMS = 5  # of fake_cublas.cc


def build(op: str = "fusion_on_fake_gpu") -> dict[str, str]:
    """The environment of a process with a `FakeGpu`: where the fake libraries lie, and the op of `op`.cc on them."""
    driver = fake_driver()
    libraries = [_library(*names, driver) for names in (("libcublasLt.so.12", "cublas"), ("libcudnn.so.9", "cudnn"))]
    library = build_flags.PACKAGE / build_flags.library_name(tf.__version__)
    found = [driver, *libraries, shared_library(op, [object_file(HERE / f"{op}.cc")], library)]
    return {**os.environ, LIBRARIES: os.pathsep.join(map(str, found))}


def _library(name: str, fake: str, driver: Path) -> Path:
    """One of NVIDIA's libraries on the fake driver."""
    plain = [build_flags.compiler(), "-std=c++17", "-O1", "-fPIC", "-shared", f"-Wl,-soname,{name}"]
    sources = [HERE / f"fake_{fake}.cc", driver]
    reads = [*sources, *sorted(HERE.glob("*.h"))]
    return built(name, reads, lambda target: [*plain, *map(str, sources), "-o", str(target)])


def run_file(file: str, op: str = "fusion_on_fake_gpu", long: str = "none") -> None:
    """Runs a file of tests on a fake GPU, in another process: the op library finds a driver once.

    Args:
        file: in this folder, without "_on_fake_gpu.py".
        op: the source of the op that runs on it.
        long: which tests of the file, as pytest's `--long` has it.
    """
    if shutil.which(build_flags.compiler()) is None:
        pytest.skip("needs a C++ compiler")
    options = ["-q", "-x", "-p", "no:cacheprovider", f"--long={long}"]
    command = ["-m", "pytest", *options, f"tests/tf/{file}_on_fake_gpu.py"]
    done = run_python(command, environment=build(op), timeout=1100)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-8000:]}\n{done.stderr[-2000:]}"


class FakeGpu:
    """The fake driver of this process, and the op on it.

    Attributes:
        compile_source: as NVRTC's; makes kernels for the CPU.
        cublas: its library of products.
        cudnn: its library of convolutions.
    """

    def __init__(self, driver: str, cublas: str, cudnn: str, op: str) -> None:
        tf.config.list_logical_devices()  # TensorFlow has looked for a driver by now
        load()
        self._driver = ctypes.CDLL(driver, mode=ctypes.RTLD_GLOBAL)
        self.cublas = ctypes.CDLL(cublas, mode=ctypes.RTLD_GLOBAL)
        self.cudnn = ctypes.CDLL(cudnn, mode=ctypes.RTLD_GLOBAL)
        self._driver.fake_run_at_once()
        tf.load_op_library(op)
        self.compile_source = Compiler()

    def fail(self, function: str, after: int = 0, times: int = 1, code: int = UNKNOWN) -> None:
        """Let calls of a driver's or cuBLASLt's function fail: so many after so many good ones."""
        self._driver.fake_fail(function.encode(), after, times, code)

    def calls(self, function: str) -> int:
        """How many there were by now."""
        return int(self._driver.fake_calls(function.encode()))

    def new_stream(self) -> int:
        """A stream of the driver, on which the library multiplies."""
        stream = ctypes.c_void_p()
        self._driver.cuStreamCreate(ctypes.byref(stream), 1)
        return int(stream.value or 0)

    def alive(self) -> tuple[int, int, int]:
        """Graphs, graphs that can be launched, and what cuBLASLt was asked to make."""
        return self._driver.fake_live_graphs(), self._driver.fake_live_execs(), self.cublas.fake_live_cublas()

    def kernel_errors(self) -> int:
        """Launches that a kernel ended."""
        return int(self._driver.fake_kernel_errors())

    def programs(self, region: Region, choose: Choose | None = None) -> list[FusionProgram]:
        """The programs of a region, for this device."""
        return programs.build(region, ARCH, choose or programs.by_model(PROCESSORS), compile_source=self.compile_source)

    def set_time(self, algorithm: int, milliseconds: float) -> None:
        """What a product takes by an algorithm of cuBLASLt's; none: what all take that have no time set."""
        self.cublas.fake_cublas_time(algorithm, ctypes.c_float(milliseconds))

    def runs(self) -> list[int]:
        """How many products ran by each algorithm, in the order in which cuBLASLt gives them."""
        return [self.cublas.fake_cublas_runs(number) for number in range(ALGORITHMS)]

    def asked(self) -> tuple[int, int, int, int]:
        """The last product's types of matrices, sums and factors, as asked of cuBLASLt, and their alignment."""
        found = (ctypes.c_int * 4)()
        self.cublas.fake_cublas_asked(found)
        return found[0], found[1], found[2], found[3]

    def fusion(
        self,
        region: Region,
        args: Sequence[Any],
        variables: Sequence[Any],
        made: Sequence[FusionProgram],
        timed: bool = False,
    ) -> list[Any]:
        """The op, in the graph that is being built; `timed`: whether it may time its products."""
        types = [tf.as_dtype(region.values[value].dtype) for value in region.outputs]
        return list(
            load().ops.tfmem_fusion(
                args=[tf.convert_to_tensor(arg) for arg in args],
                variables=list(variables),
                T_out=types,
                region=to_text(region),
                programs=[program.to_text() for program in made],
                images=named([program.image.code for program in made]),
                time_products=timed,
            )
        )


@pytest.fixture(name="gpu", scope="session")
def fixture_gpu() -> FakeGpu:
    """The GPU of the process, in which TfmemFusion runs on it from then on."""
    return FakeGpu(*os.environ[LIBRARIES].split(os.pathsep))


@pytest.fixture(autouse=True)
def fixture_no_kernel_fails(gpu: FakeGpu) -> Iterator[None]:
    yield
    assert gpu.kernel_errors() == 0

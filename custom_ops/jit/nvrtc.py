"""CUDA source to machine code with NVRTC, NVIDIA's run-time compiler, through `cuda.bindings`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from custom_ops.errors import KernelError

CompileSource = Callable[..., bytes]  # as `compile_source`

KERNELS = Path(__file__).parents[1] / "kernels"
MISSING = (
    "NVRTC is needed to compile GPU kernels and was not found ({}): install it with `pip install tfmem[gpu]` "
    "(cuda-bindings and nvidia-cuda-nvrtc of the CUDA version that your driver supports)"
)


def compile_source(source: str, arch: int, features: str = "", contract: bool = True) -> bytes:
    """The cubin of `source` for compute capability `arch` (90 for 9.0). `#include`s find custom_ops/kernels.

    `features`: "a" for instructions that no other architecture has. `contract`: whether a product and a sum may become
    one instruction, which rounds once.

    Raises:
        KernelError: NVRTC is missing, does not know `arch`, or rejects the source; with its own words.
    """
    nvrtc = _nvrtc()
    options = compile_options(arch, features, contract)
    return _compiled(source, options, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)


def compile_ptx(source: str, arch: int, features: str = "", contract: bool = True) -> bytes:
    """The PTX of `source`, which drivers compile for compute capability `arch` and all later ones.

    Raises:
        KernelError: see `compile_source`.
    """
    nvrtc = _nvrtc()
    options = [f"--gpu-architecture=compute_{arch}", *compile_options(arch, features, contract)[1:]]
    return _compiled(source, options, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)


def _compiled(source: str, options: list[str], size: Callable[..., Any], read: Callable[..., Any]) -> bytes:
    nvrtc = _nvrtc()
    names, texts = zip(*sorted(headers().items()), strict=True)
    encoded = [text.encode() for text in texts], [name.encode() for name in names]
    program = _checked(
        nvrtc, nvrtc.nvrtcCreateProgram(source.encode(), b"recurrent.cu", len(names), encoded[0], encoded[1])
    )
    try:
        given = [option.encode() for option in options]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            target = options[0].rpartition("=")[2]
            raise KernelError(f"NVRTC {compiler_version()} rejects a kernel for {target}:\n{_log(nvrtc, program)}")
        image = b" " * _checked(nvrtc, size(program))
        _checked(nvrtc, read(program, image))
        return image
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def compile_options(arch: int, features: str = "", contract: bool = True) -> list[str]:
    options = [f"--gpu-architecture=sm_{arch}{features}", "--std=c++17", "--device-as-default-execution-space"]
    return options if contract else [*options, "--fmad=false"]


@cache
def headers() -> dict[str, str]:
    """The kernel templates, by the name that an `#include` has for them."""
    return {file.name: file.read_text() for file in KERNELS.glob("*.cuh")}


def header_texts() -> list[str]:
    """Names and texts of all templates, in a fixed order: what a key of a cache has of them."""
    return [text for item in sorted(headers().items()) for text in item]


@cache
def compiler_version() -> str:
    """The version of the loaded NVRTC.

    Raises:
        KernelError: there is none.
    """
    major, minor = _checked(_nvrtc(), _nvrtc().nvrtcVersion())
    for package in ("nvidia-cuda-nvrtc", f"nvidia-cuda-nvrtc-cu{major}"):  # the patch level, where pip knows it
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return f"{major}.{minor}"


@cache
def _nvrtc() -> ModuleType:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # loads the library
    except (ImportError, RuntimeError) as error:
        raise KernelError(MISSING.format(error)) from error
    return nvrtc


def _checked(nvrtc: ModuleType, returned: tuple[Any, ...]) -> Any:
    result, *values = returned
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelError(f"NVRTC failed: {nvrtc.nvrtcGetErrorString(result)[1].decode()}")
    return values[0] if len(values) == 1 else values


def _log(nvrtc: ModuleType, program: Any) -> str:
    log = b" " * _checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
    _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
    return log.decode().strip("\0 \n")

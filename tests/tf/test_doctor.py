"""Each line of `tfmem doctor`, broken once."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from custom_ops.errors import KernelError, OpLibraryError
from tfmem.doctor import LOOKS, Finding, FindingState, Surroundings, examine, worst
from tfmem.options import Options


def importing(**broken: Any) -> Callable[[str], Any]:
    """An import in which some modules are others, or raise."""

    def imported(name: str) -> Any:
        found = broken.get(name.replace(".", "_"))
        if isinstance(found, Exception):
            raise found
        return found or importlib.import_module(name)

    return imported


def machine(tmp_path: Path, **changes: Any) -> Surroundings:
    (tmp_path / "Python.h").touch()
    driver = tmp_path / "version"
    driver.write_text("NVRM version: 580\n")
    given = {"options": Options(cache_directory=str(tmp_path / "cache")), "python_headers": tmp_path, "driver": driver}
    return Surroundings(**{**given, **changes})


def found(machine: Surroundings, what: str) -> Finding:
    return next(each for each in examine(machine) if each.what == what)


def raising(error: Exception) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise error

    return call


def no_devices(**others: Any) -> SimpleNamespace:
    return SimpleNamespace(config=SimpleNamespace(list_physical_devices=lambda _: []), **others)


MISSING = ImportError("no module")
BROKEN: dict[str, tuple[dict[str, Any], FindingState, str, str]] = {
    "TensorFlow": (
        {"imported": importing(tensorflow=SimpleNamespace(__version__="2.20.1"))},
        FindingState.BROKEN,
        "2.20.1; tfmem is for 2.21",
        "pip install 'tensorflow",
    ),
    "Keras": (
        {
            "imported": importing(
                keras=SimpleNamespace(__version__="3.9", backend=SimpleNamespace(backend=lambda: "jax"))
            )
        },
        FindingState.LACKS,
        "3.9 on jax",
        "export KERAS_BACKEND=tensorflow",
    ),
    "op library": (
        {"imported": importing(custom_ops_load=SimpleNamespace(load=raising(OpLibraryError("no op library: run X"))))},
        FindingState.BROKEN,
        "no op library: run X",
        "",
    ),
    "oneDNN": (
        {
            "imported": importing(
                tfmem_devices=SimpleNamespace(memory=lambda *_: SimpleNamespace(bytes_in_use=-1)),
                custom_ops_load=SimpleNamespace(load=lambda: None),
            )
        },
        FindingState.LACKS,
        "off: the CPU's allocator counts nothing",
        "export TF_ENABLE_ONEDNN_OPTS=1",
    ),
    "headers": ({"python_headers": Path("/nowhere")}, FindingState.LACKS, "no Python.h in /nowhere", "python3-dev"),
    "driver": (
        {"driver": Path("/nowhere"), "cards": (Path("/dev/nvidia0"),)},
        FindingState.BROKEN,
        "no NVIDIA driver",
        "install NVIDIA's driver",
    ),
    "GPUs": (
        {"imported": importing(tensorflow=no_devices(__version__="2.21.0")), "cards": (Path("/dev/nvidia0"),)},
        FindingState.BROKEN,
        "TensorFlow sees none of 1 card",
        "tensorflow[and-cuda]",
    ),
    "link": (
        {"imported": importing(tfmem_api=SimpleNamespace(make_engine=raising(OSError("no room"))))},
        FindingState.BROKEN,
        "OSError: no room",
        "report this",
    ),
    "NVRTC": (
        {
            "imported": importing(
                custom_ops_jit_nvrtc=SimpleNamespace(compiler_version=raising(KernelError("not found")))
            )
        },
        FindingState.LACKS,
        "no kernels for GPUs can be compiled: not found",
        "pip install 'tfmem[gpu]'",
    ),
    "cache": (
        {"options": Options(cache_directory=__file__)},
        FindingState.LACKS,
        "cannot be written",
        "TFMEM_CACHE_DIR",
    ),
}


@pytest.mark.parametrize("what", LOOKS)
def test_a_broken_part_is_told_with_its_cure(what: str, tmp_path: Path) -> None:
    changes, state, words, cure = BROKEN[what]
    broken = found(machine(tmp_path, **changes), what)
    assert broken.state is state
    assert words in broken.found
    assert cure in broken.cure


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no folder in which not even root can make a file")
def test_a_cache_is_written_to_before_it_is_said_to_work(tmp_path: Path) -> None:
    """Root has permission in /proc, where no file can be made."""
    broken = found(machine(tmp_path, options=Options(cache_directory="/proc/self")), "cache")
    assert (broken.state, broken.found) == (FindingState.LACKS, "/proc/self cannot be written")


def test_a_part_that_is_not_there_is_told_too(tmp_path: Path) -> None:
    none = machine(tmp_path, imported=importing(tensorflow=MISSING, keras=MISSING), options=Options(cache_directory=""))
    findings = list(examine(none))
    assert {each.what: each.state for each in findings if each.what in ("TensorFlow", "Keras", "cache")} == {
        "TensorFlow": FindingState.BROKEN,
        "Keras": FindingState.LACKS,
        "cache": FindingState.LACKS,
    }
    assert worst(findings) is FindingState.BROKEN


def test_a_whole_machine_works(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "profile").write_text("12345")
    findings = list(examine(machine(tmp_path)))
    states = {each.what: each.state for each in findings}
    for what in ("TensorFlow", "Keras", "op library", "oneDNN", "headers", "driver", "link", "cache"):
        assert states[what] is FindingState.WORKS, what
    assert next(each.found for each in findings if each.what == "cache").endswith("1 file, 5 B, the oldest 0 days old")
    assert worst(findings) is FindingState.WORKS

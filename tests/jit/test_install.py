"""What `pip install .` makes: the wheel runs outside the checkout, and misfits are named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MINOR = ".".join(version("tensorflow").split(".")[:2])
LIBRARY = f"custom_ops/_tfmem_ops.tf{MINOR}.so"
EXTENSION = "custom_ops/_extension.abi3.so"
SECONDS = 600  # for one call of Python; the longest compiles all

pytestmark = pytest.mark.timeout(1200)  # one test waits for what all of them need


def python(*arguments: str, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess:
    """Runs this Python elsewhere; what lies in `path` is imported before all else."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    left = ROOT / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "custom_ops"
    left.mkdir(parents=True, exist_ok=True)
    (left / "_tfmem_ops.tf1.15.so").touch()  # as an earlier build for another TensorFlow leaves one
    options = ["--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder)]
    built = python("-m", "pip", "wheel", *options, str(ROOT), cwd=folder)
    assert built.returncode == 0, built.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """A folder with nothing but the wheel's files."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    return site


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A folder to be imported from, where a test puts another tensorflow.py."""
    folder = tmp_path / "stub"
    folder.mkdir()
    return folder


def test_wheel_holds_packages_data_and_both_libraries(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "-cp311-abi3-linux_" in wheel.name
    assert sorted(name for name in names if name.endswith(".so")) == [EXTENSION, LIBRARY]
    assert "custom_ops/_extension.pyi" in names
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {
        "tfmem",
        "graph_passes",
        "custom_ops",
    }
    profiles = (ROOT / "custom_ops/devices").glob("*.json")
    assert {f"custom_ops/devices/{path.name}" for path in profiles} <= set(names)
    (scripts,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "tfmem = tfmem.cli.main:main" in zipfile.ZipFile(wheel).read(scripts).decode()
    assert "tfmem/cli/main.py" in names


def test_wheel_runs_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    script = """
import tensorflow as tf, tfmem
from custom_ops.load import load
library, tensor = load(), tf.range(1000.0)
handle = library.ops.mem_op_offload(tensor=tensor)
library.ops.mem_op_release(tensor=tensor, handle=handle)
fetched = library.ops.mem_op_prefetch(handle=handle, T=tf.float32, shape=[1000])
back = library.ops.mem_op_await(tensor=fetched, handle=handle)
assert bool(tf.reduce_all(back == tensor))
from tfmem import dynamic
from custom_ops import _extension
assert dynamic.specialize([]).forward_backward([dynamic.constant(1.0) * 2]).losses[0] == 2
print(tfmem.__file__, library.path, _extension.__file__)
"""
    done = python("-c", script, cwd=tmp_path, path=installed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(installed / name) for name in ("tfmem/__init__.py", LIBRARY, EXTENSION)]


def test_library_for_another_tensorflow_is_refused(installed: Path, tmp_path: Path) -> None:
    (installed / LIBRARY).rename(installed / "custom_ops/_tfmem_ops.tf2.18.so")
    done = python("-c", "from custom_ops.load import load; load()", cwd=tmp_path, path=installed)
    message = done.stderr.splitlines()[-1]
    assert "OpLibraryError" in message
    assert version("tensorflow") in message
    assert "_tfmem_ops.tf2.18.so" in message
    assert "pip install --no-build-isolation ." in message


def test_tfmem_imports_without_a_library(installed: Path, tmp_path: Path) -> None:
    (installed / LIBRARY).unlink()
    done = python("-c", "import tfmem", cwd=tmp_path, path=installed)
    assert done.returncode == 0, done.stderr


# The checkout may be installed as editable, and has an extension module.
NOT_EDITABLE = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if not getattr(each, "__module__", "").startswith("__editable__")]
"""


def test_a_missing_extension_is_named(installed: Path, tmp_path: Path) -> None:
    (installed / EXTENSION).unlink()
    done = python("-c", f"{NOT_EDITABLE}import tfmem.dynamic", cwd=tmp_path, path=installed)
    assert done.returncode != 0
    (message,) = (line for line in done.stderr.splitlines() if "OpLibraryError:" in line)  # beside TensorFlow's own
    assert "tfmem.dynamic has no extension module: " in message
    assert "pip install --no-build-isolation ." in message


def test_a_checkout_that_hides_what_is_installed_says_so(installed: Path, tmp_path: Path) -> None:
    # As a clone after `pip install .`: sources without libraries, in the folder where Python starts.
    checkout = tmp_path / "clone"
    shutil.copytree(installed, checkout, ignore=shutil.ignore_patterns("*.so", "*.dist-info"))
    (checkout / "setup.py").touch()
    for script in ("import tfmem.dynamic", "from custom_ops.load import load; load()"):
        done = python("-c", f"{NOT_EDITABLE}{script}", cwd=checkout, path=installed)
        assert done.returncode != 0
        (message,) = (line for line in done.stderr.splitlines() if "OpLibraryError:" in line)
        assert f"{checkout} is a checkout" in message
        assert f"cd {checkout} && python setup.py build_ext --inplace" in message
        assert "pip install" not in message  # which would build what is hidden


def test_the_op_library_needs_no_symbols_of_python(installed: Path) -> None:
    needed = subprocess.run(
        ["nm", "--dynamic", "--undefined-only", str(installed / LIBRARY)],
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    ).stdout.split()
    assert "malloc" in {name.partition("@")[0] for name in needed}
    assert not [name for name in needed if name.startswith(("Py", "_Py"))]


def test_unchanged_sources_are_not_compiled_again(wheel: Path) -> None:
    again = python("setup.py", "--quiet", "build_ext", cwd=ROOT)
    assert again.returncode == 0, again.stderr
    assert "compiling" not in again.stdout
    assert "linking" not in again.stdout


def test_build_without_tensorflow_says_what_to_do(stub: Path) -> None:
    (stub / "tensorflow.py").write_text("raise ImportError('it is not here')")
    done = python("setup.py", "--quiet", "build_ext", cwd=ROOT, path=stub)
    assert done.returncode != 0
    assert "cannot import tensorflow (it is not here)" in done.stderr
    assert "pip install --no-build-isolation ." in done.stderr
    assert "Traceback" not in done.stderr


def test_build_without_headers_of_python_says_what_to_do(tmp_path: Path) -> None:
    script = (
        "import pathlib, runpy, sys\n"
        "from custom_ops import build_flags\n"
        f"build_flags.python_include = lambda: pathlib.Path({str(tmp_path)!r})\n"
        "sys.argv[1:] = ['--quiet', 'build_ext']\n"
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    done = python("-c", script, cwd=ROOT)
    assert done.returncode != 0
    assert f"Python's headers are not in {tmp_path}" in done.stderr
    assert "apt-get install python3-dev" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("tensorflow", "is_added"),
    [
        ("__version__ = '2.21.3'", False),
        ("__version__ = '2.20.0'", True),
        ("raise ImportError", True),
    ],
)
def test_isolated_build_takes_the_installed_tensorflow_if_it_is_supported(
    stub: Path, tensorflow: str, is_added: bool
) -> None:
    (stub / "tensorflow.py").write_text(tensorflow)
    script = (
        "import sys; sys.path.insert(0, 'tools')\n"
        "from build_backend import get_requires_for_build_wheel\n"
        "print(*get_requires_for_build_wheel(), sep='\\n')"
    )
    done = python("-c", script, cwd=ROOT, path=stub)
    assert done.returncode == 0, done.stderr
    added = [line for line in done.stdout.splitlines() if line.startswith("tensorflow")]
    assert added == (["tensorflow<2.22,>=2.21"] if is_added else [])


def test_supported_tensorflow_is_named_alike() -> None:
    """pyproject.toml decides; the build's message repeats it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bound = next(text for text in project["dependencies"] if text.startswith("tensorflow"))
    assert f"'{bound}'" in (ROOT / "tools/find_tensorflow.py").read_text()

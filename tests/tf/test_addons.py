"""`import tfmem.addons as tfa`: what it needs, what it says without, and that it leaves nothing behind.

`tf.keras` is Keras 2 or 3 for all of a process, so these run in separate processes. What the cells compute is in
`addons_cases.py`, which the last test runs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.tf.python_server import run_python

ROOT = Path(__file__).resolve().parents[2]
CASES = Path(__file__).with_name("addons_cases.py")

if find_spec("tensorflow_addons") is None or find_spec("tf_keras") is None:
    reason = "TensorFlow Addons or tf_keras is not installed; docs/packaging.md says how"
    pytest.skip(reason, allow_module_level=True)


def python(*arguments: str, legacy: bool = True, seconds: float = 100) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TF_USE_LEGACY_KERAS"}
    if legacy:
        environment["TF_USE_LEGACY_KERAS"] = "1"
    return run_python(arguments, environment, ROOT, seconds)


def error_of(script: str, legacy: bool = True) -> str:
    """The last line of the traceback with which a script ends."""
    done = python("-c", script, legacy=legacy)
    assert done.returncode == 1, done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_keras_3_is_refused_by_name_of_the_variable() -> None:
    error = error_of("import tfmem.addons", legacy=False)
    assert error.startswith("tfmem.addons.AddonsError: TensorFlow Addons needs Keras 2, but tf.keras is Keras 3")
    assert "TF_USE_LEGACY_KERAS=1 before TensorFlow is imported" in error


def test_the_variable_set_too_late_is_refused() -> None:
    script = "import os, tensorflow as tf; tf.keras.Model; os.environ['TF_USE_LEGACY_KERAS'] = '1'; import tfmem.addons"
    assert "before TensorFlow is imported for the first time" in error_of(script, legacy=False)


@pytest.mark.long
def test_what_is_not_installed_is_named_with_the_command_that_installs_it() -> None:
    assert "pip install 'tfmem[legacy]'" in error_of("import sys; sys.modules['tf_keras'] = None; import tfmem.addons")
    error = error_of("import sys; sys.modules['tensorflow_addons'] = None; import tfmem.addons")
    assert "pip install" in error
    assert '"tensorflow-addons==0.23.0"' in error
    assert ("--target" in error) == (sys.version_info >= (3, 12))
    error = error_of("import sys; sys.modules['typeguard'] = None; import tfmem.addons")
    assert "is installed but does not import" in error
    assert "typeguard" in error


def test_a_failed_import_may_be_tried_again() -> None:
    script = (
        "import sys; sys.modules['typeguard'] = None\n"
        "try: import tfmem.addons\n"
        "except ImportError: del sys.modules['typeguard']\n"
        "import tfmem.addons as tfa; print(tfa.__version__)\n"
    )
    done = python("-c", script)
    assert done.stdout == "0.23.0\n", done.stderr


def test_keras_3_stays_what_it_is() -> None:
    script = (
        "import sys, keras\n"
        "before = {name: module for name, module in sys.modules.items() if name.split('.')[0] == 'keras'}\n"
        "import tfmem.addons\n"
        "after = {name: module for name, module in sys.modules.items() if name.split('.')[0] == 'keras'}\n"
        "assert before == after and 'keras.src.utils' in after and 'keras.src.engine' not in after\n"
        "assert keras.src.utils is after['keras.src.utils'] and keras.__version__[0] == '3'\n"
        "print(keras.layers.Dense(2)(keras.ops.ones([3, 4])).shape)\n"
    )
    done = python("-c", script)
    assert done.stdout == "(3, 2)\n", done.stderr


def test_importing_it_is_quiet() -> None:
    script = "import warnings; warnings.filterwarnings('error', module='tensorflow_addons'); import tfmem.addons"
    done = python("-c", script)
    assert done.returncode == 0, done.stderr
    assert "TensorFlow Addons" not in done.stderr


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("long", ["none", pytest.param("only", marks=pytest.mark.long)])
def test_cases(long: str) -> None:
    """The tests of `addons_cases.py`, in one process in which `tf.keras` is Keras 2."""
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "--long", long, str(CASES), seconds=500)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout, done.stdout

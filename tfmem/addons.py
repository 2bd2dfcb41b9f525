"""TensorFlow Addons (TFA) on a current TensorFlow: `import tfmem.addons as tfa`.

TFA 0.23, its last release, is written for Keras 2 and imports three of its modules as `keras.src...`. Keras 3 lacks one
of these and has other modules under the other names. So while TFA is imported, the three names lead to the modules of
`tf_keras`, the Keras 2 that still has releases; afterwards they are restored.

Importing this module imports TFA, and raises `AddonsError` if something is missing."""

from __future__ import annotations

import sys
import sysconfig
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from custom_ops.errors import TfmemError

RELEASE = "0.23.0"
_KERAS_MODULES = ("src", "src.engine", "src.utils")


class AddonsError(TfmemError, ImportError):
    """TensorFlow Addons cannot be imported here; the message says what to do."""


def install_command() -> str:
    """The command that installs TFA for the Python that runs.

    TFA's wheels end at Python 3.11, but its Python code runs on later versions. pip takes a wheel of another Python
    only with `--target`. The wheel's compiled ops fit TensorFlow 2.15 only; functions that need them raise when called.
    """
    if sys.version_info < (3, 12):
        return f'pip install "tensorflow-addons=={RELEASE}"'
    return (
        f'pip install "typeguard<3" && pip install --no-deps --only-binary=:all: --python-version 3.11 '
        f'--target "{sysconfig.get_path("purelib")}" "tensorflow-addons=={RELEASE}"'
    )


def _import_addons() -> ModuleType:
    """Import TFA.

    Raises:
        AddonsError: TFA or tf_keras is not installed, or `tf.keras` is Keras 3.
    """
    if find_spec("tf_keras") is None:
        raise AddonsError("TensorFlow Addons needs tf_keras, which is not installed: pip install 'tfmem[legacy]'")
    if find_spec("tensorflow_addons") is None:
        raise AddonsError(f"TensorFlow Addons is not installed; install it: {install_command()}")
    import tensorflow as tf
    import tf_keras

    if tf.keras.layers.Layer is not tf_keras.layers.Layer:
        raise AddonsError(
            "TensorFlow Addons needs Keras 2, but tf.keras is Keras 3: set the environment variable "
            "TF_USE_LEGACY_KERAS=1 before TensorFlow is imported for the first time"
        )
    modules = {f"keras.{name}": import_module(f"tf_keras.{name}") for name in _KERAS_MODULES}
    try:
        with _known_as(modules), warnings.catch_warnings():
            # its warnings: development has ended, and it does not support this TensorFlow
            warnings.filterwarnings("ignore", category=UserWarning, module="tensorflow_addons")
            addons = import_module("tensorflow_addons")
    except ImportError as error:
        raise AddonsError(
            f"TensorFlow Addons is installed but does not import; {install_command()} reinstalls it: {error}"
        ) from error
    addons.options.disable_custom_kernel()  # TensorFlow 2.15's; TFA has many of them in Python as well
    return addons


@contextmanager
def _known_as(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Make modules importable by other names within the context."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


_addons = _import_addons()


def __getattr__(name: str) -> Any:
    """Return any name of `tensorflow_addons`."""
    return getattr(_addons, name)


def __dir__() -> list[str]:
    return dir(_addons)

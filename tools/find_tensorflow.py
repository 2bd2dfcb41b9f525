"""Finds the TensorFlow to build against, also from behind pip's build isolation."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from types import ModuleType


class TensorFlowNotFoundError(Exception):
    """TensorFlow cannot be imported where the op library is built."""


def find_tensorflow() -> ModuleType:
    """Imports the TensorFlow that will load the op library.

    pip builds in a separate environment, where only build requirements can be imported. The
    packages of the environment that it installs into are added behind those.

    Raises:
        TensorFlowNotFoundError: neither environment has one; the message says what to do.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # a build has no use for its greetings
    target = [*map(sysconfig.get_path, ("purelib", "platlib")), site.getusersitepackages()]
    sys.path += [folder for folder in dict.fromkeys(target) if folder not in sys.path]
    try:
        import tensorflow
    except ImportError as error:
        raise TensorFlowNotFoundError(
            "tfmem's op library is compiled against the TensorFlow that will load it, and "
            f"{sys.executable} cannot import tensorflow ({error}). Install it first, then tfmem:\n"
            "    pip install 'tensorflow>=2.21,<2.22'\n"
            "    pip install --no-build-isolation ."
        ) from error
    return tensorflow

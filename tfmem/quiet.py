"""TensorFlow without the lines that it logs while it starts."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what is written to the file of stderr while the block runs; show it only if the block fails.

    TensorFlow logs which instructions its binary uses, and that there is no GPU, before its log level is read.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept:
        before = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            kept.seek(0)
            os.write(before, kept.read())
            raise
        finally:
            os.dup2(before, 2)
            os.close(before)


def start_tensorflow(threads: int | None = None) -> None:
    """Import TensorFlow and let it find its devices, quietly; `threads` of an op, TensorFlow's own number if None."""
    with quiet():
        import tensorflow as tf

        if threads is not None:
            tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.list_logical_devices()

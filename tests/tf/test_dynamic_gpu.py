"""Dynamic nets on a GPU, without one: their kernel runs on the CPU, its driver is a fake."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from custom_ops import build_flags
from tests.tf import fake_gpu


def test_nets_on_a_fake_gpu(tmp_path: Path) -> None:
    """In a process of their own: see `fake_gpu`."""
    if shutil.which(build_flags.compiler()) is None:
        pytest.skip("needs a C++ compiler")
    fake_gpu.build(tmp_path, "dynamic_on_fake_gpu")
    files = [f"tests/tf/{name}_on_fake_gpu.py" for name in ("dynamic", "dynamic_tiles")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, fake_gpu.FOLDER: str(tmp_path)}
    root = build_flags.PACKAGE.parent
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-8000:]}\n{done.stderr[-2000:]}"

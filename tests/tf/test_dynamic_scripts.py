"""Scripts for a GPU are checked before they run: a damaged one is refused, whatever its instruction."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from custom_ops import build_flags
from custom_ops.dynamic.codegen.gpu_program import build
from custom_ops.dynamic.codegen.on_chip import Chip
from tests.dynamic_specs import tree_rnn
from tests.tf import native_programs

TILED_FROM = 1000  # cycles of a node in a product that is in tiles


@pytest.mark.long
def test_a_damaged_script_is_refused(tmp_path: Path) -> None:
    if shutil.which(build_flags.compiler()) is None:
        pytest.skip("needs a C++ compiler")
    spec, code = tree_rnn(90), b"no kernel runs"
    program = build(spec, 90, Chip(processors=5), compile_source=lambda *_: code)
    # One of the products that may be is computed in tiles, and the others by all processors.
    words = [line.split() for line in program.to_text().splitlines()]
    products = [line for line in words if line[0].startswith("segment") and len(line) == 9 and line[7] != "0"]
    assert len(products) > 1
    for number, line in enumerate(products):
        line[6] = "1" if number else str(TILED_FROM)
    header = "\n".join(map(" ".join, words))
    files = {"spec": spec.text.encode(), "header": header.encode(), "code": code}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    binary = native_programs.build("dynamic_scripts")
    command = [str(binary), *(str(tmp_path / name) for name in files)]
    done = subprocess.run(
        command, env=native_programs.environment(), capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    refused = dict(line.split() for line in done.stdout.splitlines())
    assert len(refused) == 9
    assert all(int(count) > 0 for count in refused.values()), refused  # every instruction was there

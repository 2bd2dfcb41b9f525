"""What reads cells, programs of all kinds and dynamic nets, on corrupt texts.

`make fuzz` runs a million of them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from custom_ops import build_flags
from tests.tf.fuzz_parsers import fuzz

INPUTS, SEED = 40_000, 20


@pytest.mark.timeout(1800)
@pytest.mark.long
def test_no_text_reads_past_what_there_is(tmp_path: Path) -> None:
    if shutil.which(build_flags.compiler()) is None:
        pytest.skip("needs a C++ compiler")
    result = fuzz(INPUTS, SEED, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    counts = re.findall(r"(\d+) (?:taken|run)", result.stdout)
    assert len(counts) == 8, result.stdout
    assert all(int(count) > INPUTS // 250 for count in counts), result.stdout  # not all are refused at once

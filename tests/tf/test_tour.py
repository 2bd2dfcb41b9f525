"""docs/tour.md shows what `python -m examples.tour` prints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "examples").is_dir():
    pytest.skip("the examples are not installed; run from a checkout", allow_module_level=True)


def test_the_page_quotes_what_the_example_prints():
    # A process of its own: what other tests still hold in memory counts against the example's budget.
    command = [sys.executable, "-m", "examples.tour"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    blocks = re.findall(r"^```text\n(.*?)^```$", (ROOT / "docs/tour.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 9
    for block in blocks:
        assert block in printed

"""docs/tour.md shows what `python -m examples.tour` prints."""

import re
from pathlib import Path

import pytest

from tests.tf.python_server import run_python

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "examples").is_dir():
    pytest.skip("the examples are not installed; run from a checkout", allow_module_level=True)


def test_the_page_quotes_what_the_example_prints():
    # A separate process: what other tests still hold in memory counts against the example's budget.
    done = run_python(["-m", "examples.tour"], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    blocks = re.findall(r"^```text\n(.*?)^```$", (ROOT / "docs/tour.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 9
    for block in blocks:
        assert block in printed

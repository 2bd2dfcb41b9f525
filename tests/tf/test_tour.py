"""docs/tour.md shows what `python -m examples.tour` prints."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "examples").is_dir():
    pytest.skip("the examples are not installed; run from a checkout", allow_module_level=True)

from examples import tour  # noqa: E402


def test_the_page_quotes_what_the_example_prints(capsys):
    tour.main()
    printed = capsys.readouterr().out
    blocks = re.findall(r"^```text\n(.*?)^```$", (ROOT / "docs/tour.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 9
    for block in blocks:
        assert block in printed

"""Every Python block of the documentation runs; and the notebook."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.tf.python_server import run_python

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "docs").is_dir():
    pytest.skip("the documentation is not installed; run from a checkout", allow_module_level=True)

SHORT = ("README.md", "docs/index.md", "docs/use.md", "docs/cli.md", "docs/offload.md", "docs/fusion.md")
SHORT += ("docs/tour.md",)
SHORT += tuple(f"docs/guides/{name}.md" for name in ("memory", "keras", "serve", "trees"))
LONG = ("docs/dynamic.md", "docs/guides/gpus.md", "docs/options.md", "docs/recurrent.md", "docs/distribution.md")


def ran(pages: tuple[str, ...]) -> str:
    environment = {**os.environ, "TFMEM_CACHE_DIR": "", "TFMEM_PROGRESS": "0", "PYTHONPATH": str(ROOT)}
    done = run_python(["-m", "tests.tf.docs_code", *pages], environment=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_blocks_of_pages_run() -> None:
    assert ran(SHORT).splitlines() == [f"ran {page}" for page in SHORT]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_blocks_of_other_pages_run() -> None:
    assert ran(LONG).splitlines() == [f"ran {page}" for page in LONG]


def test_no_page_with_blocks_is_left_out() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    found = {str(page.relative_to(ROOT)) for page in pages if "\n```python\n" in page.read_text()}
    assert found == {*SHORT, *LONG}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


NOTEBOOK = ROOT / "examples/quickstart.ipynb"


def test_the_notebook_is_kept_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code[0] == next(cell for cell in cells if cell["cell_type"] == "code")
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    for cell in code:
        compile("".join(cell["source"]), "cell", "exec")


@pytest.mark.long
def test_the_notebook_shows_an_effect_in_its_first_cell() -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, 4)
    nbclient.NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(ROOT)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    peak, before = map(float, re.search(r"peak ([\d.]+) instead of ([\d.]+) MiB", printed).groups())  # type: ignore[union-attr]
    assert peak < before
    losses = re.findall(r"losses with\w* tfmem: +(\[.*\])", printed)
    assert len(losses) == 2
    assert losses[0] == losses[1]
    assert any("image/png" in output.get("data", {}) for output in outputs)

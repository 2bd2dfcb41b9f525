"""The Tree-LSTM example and the benchmark of dynamic nets, small."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from tests.tf.python_server import run_python

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "examples").is_dir():
    pytest.skip("the examples are not installed; run from a checkout", allow_module_level=True)

from benchmarks.dynamic import __main__ as benchmark  # noqa: E402
from examples import trees  # noqa: E402


def test_trees_are_read_as_they_are_written(tmp_path):
    file = tmp_path / "trees.txt"
    file.write_text("(3 (2 It) (4 (2 's) (4 8\u00a01/2)))\n(2 no)\n")
    assert trees.read(file) == [(3, (2, "It"), (4, (2, "'s"), (4, "8\u00a01/2"))), (2, "no")]
    file.write_text("(3 (2 It))\n")
    with pytest.raises(ValueError, match=r"trees\.txt:1 is no binary tree"):
        trees.read(file)


def test_the_example_learns():
    command = ["-m", "examples.tree_lstm", "--sentences", "600", "--hidden", "32", "--batch", "16"]
    done = run_python(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [
        tuple(map(float, pair)) for pair in re.findall(r"loss (\S+), accuracy on held-out trees (\S+)", done.stdout)
    ]
    assert len(found) == 3
    assert found[-1][0] < 0.5 * found[0][0]
    assert found[-1][1] > 0.5


@pytest.mark.long
def test_the_benchmark_measures_each_size(tmp_path, monkeypatch, capsys):
    output = tmp_path / "rows.json"
    given = ["--hidden", "16", "--batch", "1", "4", "--rounds", "1", "--sentences", "8", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["benchmarks.dynamic", *given])
    benchmark.main()
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split(" | ")[:2] for line in lines] == [["| 16", "1"], ["| 16", "4"]]
    assert output.read_text().count('"tfmem"') == 2


def test_the_cell_of_the_guide_trains():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guides/trees.md").read_text(), re.DOTALL)
    (block,) = (block for block in blocks if "from tfmem import dynamic\n" in block)
    names = {"tf": tf}
    exec(block, names)
    first = float(names["losses"][0])
    for _ in range(20):
        last = float(names["net"].step([names["tree"]]).losses[0])
    assert last < first


def test_the_table_shows_medians_and_ratios():
    def row(system, wall):
        return {"system": system, "hidden": 8, "batch": 2, "sentences": 100, "wall": wall, "processor": 2 * wall}

    rows = [row("tfmem", seconds) for seconds in (1, 2, 10)] + [row("dynet", 4), row("tfmem, batches made before", 1)]
    assert benchmark.table(rows)[2] == "| 8 | 2 | 100 | 50 | 25 | 2.0 | 25 | 12 | 2.0 |"

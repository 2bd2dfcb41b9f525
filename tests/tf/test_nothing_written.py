"""What tfmem writes: its cache and the output that the user names, and no other file, not even for a while."""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import gettempdir

from tests.tf.python_server import run_python

PROGRAM = """
import json, os, sys
from pathlib import Path

sys.dont_write_bytecode = True  # what Python writes is not tfmem's
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
written = set()

def note(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and (arguments[2] or 0) & WRITES:
        written.add(os.path.abspath(arguments[0]))
    if event in ("os.mkdir", "os.rename", "os.link", "os.symlink"):
        written.update(os.path.abspath(each) for each in arguments[:2] if isinstance(each, str))

sys.addaudithook(note)
import keras, numpy as np, tensorflow as tf, tfmem
from tfmem.cli.main import main

def model():
    layers = [keras.layers.Conv2D(8, 3, padding="same", activation="relu") for _ in range(4)]
    found = keras.Sequential([keras.Input((32, 32, 3)), *layers, keras.layers.Flatten(), keras.layers.Dense(4)])
    found.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return found

x, y = np.ones([64, 32, 32, 3], np.float32), np.zeros(64, np.int32)
free = tfmem.plan(model(), 64, curve=False)
budget = (free.smallest_budget + free.peak_before) // 2
trained = tfmem.optimize(model(), memory_budget=budget)
trained.fit(x, y, batch_size=64, epochs=8, verbose=0)
assert tfmem.report(trained).transfers
tfmem.explain(trained)
layer = keras.layers.LSTM(8)
module = tf.Module()
module.layer, module.run = layer, tf.function(layer, input_signature=[tf.TensorSpec((None, 5, 4))])
os.chdir("given")
tf.saved_model.save(module, "lstm", signatures=module.run)
before = set(written)
for command in (
    ["optimize", "lstm", "--output", "out/lstm"],
    ["report", "out/lstm", "--html", "out/report.html"],
    ["explain", "out/lstm"],
    ["doctor"], ["devices"], ["cache"],
):
    assert main([*command, "--json"]) == 0, command
print("WRITTEN " + json.dumps(sorted(written - before)))
print("BEFORE " + json.dumps(sorted(each for each in before if "lstm" not in each)))
"""


def test_only_the_cache_and_the_given_output_are_written(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("home", "temporary", "given", "cache")}
    for folder in folders.values():
        folder.mkdir()
    (tmp_path / "given/out").mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {
        **os.environ,
        "HOME": str(folders["home"]),
        "TMPDIR": str(folders["temporary"]),
        "TFMEM_CACHE_DIR": str(folders["cache"]),
        "TFMEM_PROGRESS": "0",
    }
    done = run_python(["program.py"], environment=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("WRITTEN", "BEFORE")))
    written = [Path(each) for line in lines.values() for each in json.loads(line)]
    assert any(each.is_relative_to(folders["cache"]) for each in written), "the hook sees what is written"
    allowed = (folders["cache"], folders["temporary"], folders["given"] / "out")
    others = [each for each in written if not any(each.is_relative_to(folder) for folder in allowed)]
    assert [each for each in others if each.is_relative_to(tmp_path)] == []
    tensorflows = ("/dev/", "/proc/", f"{gettempdir()}/__autograph_generated_file")
    named = [each for each in others if each != Path(gettempdir())]  # a file without a name has its folder's
    assert [each for each in named if not str(each).startswith(tensorflows)] == []
    left = {
        name: sorted(map(str, folder.rglob("*"))) for name, folder in folders.items() if name in ("home", "temporary")
    }
    assert left == {"home": [], "temporary": []}
    assert {each.name for each in folders["given"].iterdir()} == {"lstm", "out"}
    assert {each.name for each in (folders["given"] / "out").iterdir()} == {"lstm", "report.html"}
    assert {each.name for each in tmp_path.iterdir()} == {*folders, "program.py"}

"""No graph names a directory: it carries a key, which means something to the process that gave it out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from custom_ops.load import Library
from tests.tf.memop_trips import round_trip, settled
from tests.tf.python_server import run_python


def descriptors_in(folder: Path) -> int:
    """Open files of this process that lie in `folder`; spill files have no name but this."""
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        try:
            found += str(path.readlink()).startswith(str(folder))
        except FileNotFoundError:
            continue
    return found


def exported(library: Library, **attributes: str) -> tf.compat.v1.GraphDef:
    """A graph that moves a tensor there and back, with attributes as its author likes."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [100], name="x")
        tf.identity(round_trip(library, x), name="y")
    graph_def = graph.as_graph_def()
    for node in graph_def.node:
        if node.op == "MemOpOffload":
            for name, value in attributes.items():
                node.attr[name].s = value.encode()
    return graph_def


def run(graph_def: tf.compat.v1.GraphDef) -> Any:
    x = np.arange(100, dtype=np.float32)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.import_graph_def(graph_def, name="")
        result = session.run("y:0", {"x:0": x})
    assert np.array_equal(result, x)


def test_a_key_is_the_directorys_and_tells_nothing_of_it(library: Library, tmp_path: Path) -> None:
    key = library.spill_key(str(tmp_path))
    assert key == library.spill_key(str(tmp_path)) != library.spill_key(str(tmp_path / "other"))
    assert len(key) == 32
    assert str(tmp_path) not in key
    assert library.spill_key("") == ""


def test_a_graph_goes_where_its_key_says(library: Library, tmp_path: Path) -> None:
    graph_def = exported(library, spill_key=library.spill_key(str(tmp_path)))
    assert str(tmp_path).encode() not in graph_def.SerializeToString()
    run(graph_def)
    settled(library)
    assert descriptors_in(tmp_path) == 1
    library.trim()
    assert descriptors_in(tmp_path) == 0


def test_a_graph_that_names_a_directory_gets_the_systems(library: Library, tmp_path: Path) -> None:
    run(exported(library, spill_key=str(tmp_path)))
    settled(library)
    assert descriptors_in(tmp_path) == 0
    run(exported(library, spill_key="/nowhere/at/all"))


CHILD = """
import sys
import tensorflow as tf
from custom_ops.load import load
load()
graph_def = tf.compat.v1.GraphDef()
graph_def.ParseFromString(open(sys.argv[1], "rb").read())
for _ in range(2):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.import_graph_def(graph_def, name="")
        session.run("y:0", {"x:0": [0.0] * 100})
"""


@pytest.mark.long
def test_it_is_said_once(library: Library, tmp_path: Path) -> None:
    """In a separate process, whose standard error is read; a key of this process is unknown there."""
    path = tmp_path / "graph.pb"
    path.write_bytes(exported(library, spill_key=library.spill_key(str(tmp_path))).SerializeToString())
    result = run_python(["-c", CHILD, str(path)], {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0"})
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("chosen in another process") == 1, result.stderr


def test_an_optimised_step_uses_the_directory_and_its_graph_does_not_name_it(
    new_net: Any, batch: Any, smallest: Any, flow: Any, tmp_path: Path
) -> None:
    options = tfmem.OffloadOptions(spill_directory=str(tmp_path), reuse_distance=1)

    def within(budget: int) -> Any:
        return tfmem.optimize(tf.function(new_net().step), memory_budget=budget, offload=options, observe=False)

    step = within(smallest(lambda size: within(size)(*batch)) + (64 << 10))
    step(*batch)
    settled(flow.library)
    assert flow.moved > 0
    assert descriptors_in(tmp_path) > 0

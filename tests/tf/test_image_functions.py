"""Code of GPU kernels in a graph: once, found again by ops in any function, through all that TensorFlow does to graphs.

No GPU: an op made for these tests reads its programs as the GPU's ops do."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from custom_ops import build_flags
from custom_ops.image_functions import add_to, code_in, definition, name_of, named
from custom_ops.jit.image import KernelImage
from custom_ops.load import load
from graph_passes.graph import serde
from graph_passes.graph.ir import Code
from tests.tf.native_programs import HERE, object_file, shared_library
from tests.tf.python_server import run_python
from tfmem.capture.live_editor import LiveEditor

CODES = [b"code \0 of the first\n\n", b"code of the second" * 1000]
IMAGES = [KernelImage(90, "main", 32, code) for code in CODES]
TEXTS = [image.to_text() for image in IMAGES]


@pytest.fixture(name="place", scope="module")
def fixture_place() -> Path:
    if shutil.which(build_flags.compiler()) is None:
        pytest.skip("needs a C++ compiler")
    return shared_library("images_op", [object_file(HERE / "images_op.cc")], load().path)


@pytest.fixture(name="read", scope="module")
def fixture_read(place: Path) -> Any:
    """The op: what it was given, and where that lies."""
    return tf.load_op_library(str(place)).tfmem_test_images


def node(read: Any, x: Any = 0.0, codes: Sequence[bytes] = CODES, texts: Sequence[str] = TEXTS) -> Any:
    return read(x=x, programs=list(texts), images=named(codes))


def library_of(graph_def: Any) -> list[bytes]:
    """The code in it, in the order of its functions."""
    return [code for code in map(code_in, graph_def.library.function) if code is not None]


def test_eager_calls_read_their_own_code(read: Any) -> None:
    """TensorFlow looks up the kernel of an eager call by what is in its attributes, shortened where it is long."""
    same, other = (b"program" + middle + bytes(80) for middle in (b"1", b"2"))
    for code in (same, other, same):
        image = KernelImage(90, "main", 32, code)
        assert node(read, codes=[code], texts=[image.to_text()]).codes.numpy().tolist() == [code]


def test_all_nodes_of_a_graph_share_it_those_in_functions_too(read: Any) -> None:
    @tf.function
    def inner(x: Any) -> Any:
        return node(read, x)

    @tf.function
    def step(x: Any) -> Any:
        here = node(read, x)
        branch = tf.cond(x > 0, lambda: node(read, x).codes, lambda: node(read, x + 1).codes)
        turns = tf.while_loop(lambda i: i < 2, lambda i: i + tf.cast(tf.size(node(read, x).codes), tf.int32) - 1, [0])
        called = inner(x)
        return here, called, branch, turns

    trace = step.get_concrete_function(tf.TensorSpec([]))
    assert sorted(library_of(trace.graph.as_graph_def())) == sorted(CODES)
    here, called, branch, turns = step(tf.constant(1.0))
    for found in (here.codes, called.codes, branch):
        assert found.numpy().tolist() == CODES
    assert int(turns[0]) == 2
    np.testing.assert_array_equal(here.places, called.places)


def test_sessions_prune_and_optimise(read: Any) -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [])
        found = node(read, x).codes
        _ = node(read, x + 1, CODES[:1], TEXTS[:1])
        with tf.compat.v1.Session() as session:
            assert session.run(found, {x: 1.0}).tolist() == CODES
    assert sorted(library_of(graph.as_graph_def())) == sorted(CODES)


def graph_with(read: Any, codes: Sequence[bytes] = CODES, texts: Sequence[str] = TEXTS) -> Any:
    with tf.Graph().as_default() as graph:
        tf.identity(node(read, tf.compat.v1.placeholder(tf.float32, [], "x"), codes, texts).codes, "out")
    return graph.as_graph_def()


def run(graph_def: Any) -> Any:
    with tf.Graph().as_default():
        tf.import_graph_def(graph_def, name="")
        with tf.compat.v1.Session() as session:
            return session.run("out:0", {"x:0": 1.0}).tolist()


def test_graphs_that_are_imported_side_by_side_agree(read: Any) -> None:
    first, second = graph_with(read), graph_with(read, CODES[1:], TEXTS[1:])
    with tf.Graph().as_default() as graph:
        for name, graph_def in (("a", first), ("b", second)):
            tf.import_graph_def(graph_def, name=name)
        with tf.compat.v1.Session() as session:
            found = session.run(["a/out:0", "b/out:0"], {"a/x:0": 1.0, "b/x:0": 1.0})
    assert [each.tolist() for each in found] == [CODES, CODES[1:]]
    assert sorted(library_of(graph.as_graph_def())) == sorted(CODES)


def test_a_graph_without_its_library_says_what_to_do(read: Any) -> None:
    graph_def = graph_with(read)
    assert run(graph_def) == CODES
    graph_def.ClearField("library")
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"not in the graph's library: give the graph with its"):
        run(graph_def)


def test_code_that_is_not_what_the_graph_says_is_refused(read: Any) -> None:
    assert run(graph_with(read)) == CODES  # so that this process knows the right one
    graph_def = graph_with(read)
    for function in graph_def.library.function:
        function.node_def[0].attr["value"].tensor.string_val[0] = b"a stranger's"
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"the code of a kernel has the digest .* damaged"):
        run(graph_def)
    for function in graph_def.library.function:
        function.node_def[0].attr["value"].tensor.CopyFrom(tf.make_tensor_proto(1.0))
    with pytest.raises(tf.errors.InvalidArgumentError, match="holds no string"):
        run(graph_def)
    graph_def = graph_with(read)
    del graph_def.node[1].attr["images"].list.func[1]
    with pytest.raises(tf.errors.InvalidArgumentError, match="has 2 GPU programs, but attr images names 1 functions"):
        run(graph_def)


def test_a_saved_model_holds_it_once_and_a_fresh_process_finds_it(read: Any, place: Path, tmp_path: Path) -> None:
    module = tf.Module()
    spec = tf.TensorSpec([])
    module.first = tf.function(lambda x: node(read, x).codes, input_signature=[spec])
    module.second = tf.function(lambda x: tf.cond(x > 0, lambda: node(read, x).codes, lambda: module.first(x)), [spec])
    where = str(tmp_path / "model")
    tf.saved_model.save(module, where)
    saved = Path(where, "saved_model.pb").read_bytes()
    assert [saved.count(code) for code in CODES[:1]] == [1]
    script = (
        "import sys, tensorflow as tf\n"
        f"tf.load_op_library({str(place)!r})\n"
        f"module = tf.saved_model.load({where!r})\n"
        "for function in (module.first, module.second):\n"
        f"    assert function(tf.constant(1.0)).numpy().tolist() == {CODES!r}\n"
        "again = sys.argv[1]\n"
        "tf.saved_model.save(module, again)\n"
        f"assert tf.saved_model.load(again).second(tf.constant(1.0)).numpy().tolist() == {CODES!r}\n"
    )
    done = run_python(["-c", script, str(tmp_path / "again")])
    assert done.returncode == 0, done.stderr[-3000:]


def test_passes_write_it_and_functions_are_rebuilt_with_it(read: Any) -> None:
    """Through the IR, then through `tfmem.optimize`, which runs Grappler and builds functions again."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [], "x")
        tf.identity(x, "y")
    made = serde.from_graph_def(graph.as_graph_def())
    attrs = {"programs": tuple(TEXTS), "images": tuple(map(Code, CODES))}
    for place in range(3):
        made.insert(f"read{place}", "TfmemTestImages", [next(iter(made.tensors(made["x"])))], attrs)
    graph_def = serde.to_graph_def(made, graph.as_graph_def())
    assert library_of(graph_def) == CODES
    again = serde.to_graph_def(serde.from_graph_def(graph_def), graph_def)
    assert library_of(again) == CODES
    optimized = tfmem.optimize(again, fetches=["read0:0", "read2:0"])
    assert sorted(library_of(optimized)) == sorted(CODES)

    step = tfmem.optimize(tf.function(lambda x: node(read, x * 2).codes), memory_budget="1GiB")
    for _ in range(3):
        assert step(tf.constant(1.0)).numpy().tolist() == CODES


def test_a_live_graph_gets_it_with_the_node(read: Any) -> None:
    del read  # it is registered
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [], "x")
    editor = LiveEditor(graph)
    attrs = {"programs": tuple(TEXTS), "images": tuple(map(Code, CODES))}
    for place in range(2):
        editor.insert(f"read{place}", "TfmemTestImages", [serde.parse_input("x")[0]], attrs)
    with tf.compat.v1.Session(graph=graph) as session:
        assert session.run("read1:0", {x: 1.0}).tolist() == CODES
    assert sorted(library_of(graph.as_graph_def())) == sorted(CODES)


def test_functions_are_named_by_what_they_hold() -> None:
    assert code_in(definition(CODES[0])) == CODES[0]
    renamed = definition(CODES[0])
    renamed.signature.name = f"__inference_{renamed.signature.name}_12"  # as TensorFlow does when it loads one
    assert code_in(renamed) == CODES[0]
    with tf.Graph().as_default() as graph:
        assert add_to(graph, CODES) == list(map(name_of, CODES)) == add_to(graph, CODES)
    renamed.signature.input_arg.add(name="x", type=tf.float32.as_datatype_enum)
    assert code_in(renamed) is None

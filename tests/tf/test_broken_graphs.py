"""Graphs that TensorFlow imports though something in them is broken are read as far as they can be."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem


def loop_graph() -> Any:
    """A recurrence as a While with functions for its body and condition."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [5, 4, 8], "x")
        w = tf.constant(np.eye(8, dtype="float32"))

        def step(t: Any, state: Any) -> Any:
            return t + 1, tf.tanh(state @ w + tf.gather(x, t))

        _, last = tf.while_loop(lambda t, _: t < 5, step, (0, tf.zeros([4, 8])))
        tf.identity(last, name="y")
    return graph.as_graph_def()


def body_of(graph_def: Any, attribute: str = "body") -> Any:
    (loop,) = [node for node in graph_def.node if node.op in ("While", "StatelessWhile")]
    return next(f for f in graph_def.library.function if f.signature.name == loop.attr[attribute].func.name)


def reads_nothing(graph_def: Any) -> None:
    body_of(graph_def).node_def[-1].input[0] = "no_such_node:y:0"


def returns_nothing(graph_def: Any) -> None:
    function = body_of(graph_def)
    function.ret[function.signature.output_arg[0].name] = "no_such_node:z:0"


def lacks_a_result(graph_def: Any) -> None:
    function = body_of(graph_def)
    del function.ret[function.signature.output_arg[0].name]


def has_a_broken_condition(graph_def: Any) -> None:
    body_of(graph_def, "cond").node_def[-1].input[0] = "nothing"


def has_an_unknown_op(graph_def: Any) -> None:
    body_of(graph_def).node_def[-1].op = "NoSuchOp"


def lacks_a_node(graph_def: Any) -> None:
    del body_of(graph_def).node_def[0]


def has_a_function_that_no_name_finds(graph_def: Any) -> None:
    body_of(graph_def).signature.name = "\0x"


def lacks_its_functions(graph_def: Any) -> None:
    del graph_def.library.function[:]


BREAK = [reads_nothing, returns_nothing, lacks_a_result, has_a_broken_condition, has_an_unknown_op, lacks_a_node]


# TensorFlow's owner of a function that it could not take cannot remove it either
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("change", [*BREAK, has_a_function_that_no_name_finds, lacks_its_functions])
@pytest.mark.parametrize("budget", [None, "1GiB", "200KB"])
def test_broken_bodies(change: Callable[[Any], None], budget: Any) -> None:
    graph_def = loop_graph()
    change(graph_def)
    with suppress(tfmem.TfmemError):  # nothing else may come
        tfmem.optimize(graph_def, memory_budget=budget, device="CPU:0")


def constant(**fields: Any) -> Any:
    graph_def = tf.compat.v1.GraphDef()
    graph_def.versions.producer = 1882
    node = graph_def.node.add(name="c", op="Const")
    node.attr["dtype"].type = tf.float32.as_datatype_enum
    tensor = node.attr["value"].tensor
    tensor.dtype = tf.float32.as_datatype_enum
    for size in fields.pop("shape"):
        tensor.tensor_shape.dim.add(size=size)
    for name, values in fields.items():
        if isinstance(values, bytes):
            setattr(tensor, name, values)
        else:
            getattr(tensor, name).extend(values)
    read = graph_def.node.add(name="y", op="Identity", input=["c"])
    read.attr["T"].type = tf.float32.as_datatype_enum
    return graph_def


CONSTANTS: dict[str, dict[str, Any]] = {
    "more values than its shape": {"shape": [2], "float_val": [1, 2, 3]},
    "fewer values": {"shape": [4], "float_val": [1, 2]},
    "no values": {"shape": [4]},
    "values for none": {"shape": [0], "float_val": [1]},
    "bytes that fit": {"shape": [1], "tensor_content": b"\0\0\x80?"},
}


@pytest.mark.parametrize("fields", CONSTANTS.values(), ids=CONSTANTS)
@pytest.mark.parametrize("budget", [None, "1GiB"])
def test_constants_as_tensorflow_takes_them(fields: dict[str, Any], budget: Any) -> None:
    graph_def = constant(**fields)
    optimized = tfmem.optimize(graph_def, memory_budget=budget, device="CPU:0")
    wanted, found = (run(each) for each in (graph_def, optimized))
    assert np.array_equal(wanted, found)


def run(graph_def: Any) -> Any:
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(graph_def, name="")
        with tf.compat.v1.Session(graph=graph) as session:
            return session.run("y:0")


def test_constants_beside_a_recurrence() -> None:
    """Where bodies of functions and small constants are read."""
    graph_def = loop_graph()
    for node in body_of(graph_def).node_def:
        if node.op == "Const" and node.attr["dtype"].type == tf.int32.as_datatype_enum:
            node.attr["value"].tensor.int_val.extend([7, 7, 7])
    for node in graph_def.node:
        if node.op == "Const" and node.attr["dtype"].type == tf.int32.as_datatype_enum:
            node.attr["value"].tensor.int_val.extend([7, 7, 7])
    tfmem.optimize(graph_def, device="CPU:0")


def call_graph() -> Any:
    """A call of a function that calls another, twice."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [4, 8], "x")

        @tf.function(autograph=False)
        def inner(data: Any) -> Any:
            return tf.split(tf.tanh(data), 2, axis=1)

        @tf.function(autograph=False)
        def outer(data: Any) -> Any:
            return tf.concat(inner(data) + inner(data), axis=1)

        tf.identity(outer(x), name="y")
    return graph.as_graph_def()


def split_of(graph_def: Any) -> Any:
    return next(node for f in graph_def.library.function for node in f.node_def if node.op == "Split")


def has_more_outputs_than_memory(graph_def: Any) -> None:
    split_of(graph_def).attr["num_split"].i = 1 << 62


def is_called_with_fewer_arguments(graph_def: Any) -> None:
    del graph_def.library.function[0].signature.input_arg[:]


def has_colocations_of_bytes(graph_def: Any) -> None:
    for nodes in (graph_def.node, *(function.node_def for function in graph_def.library.function)):
        for node in nodes:
            if node.op != "Placeholder":
                node.attr["_class"].list.s[:] = [b"\xff\xfe", b"loc:@\xff"]


CALLS = [has_more_outputs_than_memory, is_called_with_fewer_arguments]
CALLS += [has_colocations_of_bytes, lacks_its_functions]  # its importer dies of functions that call themselves


@pytest.mark.parametrize("change", CALLS)
@pytest.mark.parametrize("budget", [None, "1GiB", "1KB"])
def test_broken_calls(change: Callable[[Any], None], budget: Any) -> None:
    graph_def = call_graph()
    tfmem.optimize(graph_def, memory_budget="1GiB", device="CPU:0")
    change(graph_def)
    with suppress(tfmem.TfmemError):  # nothing else may come, and soon
        tfmem.optimize(graph_def, memory_budget=budget, device="CPU:0")


@pytest.mark.parametrize(
    "attribute", ["_handle_dtypes", "_handle_shapes", "_output_shapes", "_class", "_XlaMustCompile"]
)
@pytest.mark.parametrize("kind", ["i", "s", "type", "types", "shapes"])
@pytest.mark.parametrize("make", [loop_graph, call_graph])
def test_attributes_of_any_kind(make: Callable[[], Any], attribute: str, kind: str) -> None:
    graph_def = make()
    for node in graph_def.node:
        if kind == "types":
            node.attr[attribute].list.type.extend([1, 999])
        elif kind == "shapes":
            node.attr[attribute].list.shape.add(unknown_rank=True)
        else:
            setattr(node.attr[attribute], kind, b"\xff" if kind == "s" else 1)
    for budget in (None, "1GiB"):
        with suppress(tfmem.TfmemError):
            tfmem.optimize(graph_def, memory_budget=budget, device="CPU:0")

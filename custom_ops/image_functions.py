"""Where a graph keeps the code of its GPU kernels: in functions of its library, each under its digest.

An op's attribute `images` names a function for each of its programs; the function takes nothing and returns the code, a
constant. TensorFlow itself keeps what an attribute names: through Grappler, bodies of functions, sessions that prune,
and SavedModels, which rename functions (the op compares the code with the digest in the program, never a name).

Relies on TensorFlow's `AtomicFunction`, the owner of a registered function, and on `Graph._add_function`."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorflow as tf
    from tensorflow.core.framework.function_pb2 import FunctionDef
    from tensorflow.python.eager.polymorphic_function.atomic_function import AtomicFunction

PREFIX = "tfmem_image_"
MOST_OWNED = 1024  # functions that this process keeps for graphs to come; a graph keeps its own


def name_of(code: bytes) -> str:
    """What the function of `code` is called."""
    return PREFIX + hashlib.sha256(code).hexdigest()


def definition(code: bytes) -> FunctionDef:
    """The function of `code`, the same in all graphs."""
    import tensorflow as tf
    from tensorflow.core.framework.function_pb2 import FunctionDef

    function = FunctionDef()
    function.signature.name = name_of(code)
    function.signature.output_arg.add(name="code", type=tf.string.as_datatype_enum)
    constant = function.node_def.add(name="code", op="Const")
    constant.attr["dtype"].type = tf.string.as_datatype_enum
    constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(code, tf.string, []))
    function.ret["code"] = "code:output:0"
    return function


def code_in(function: FunctionDef) -> bytes | None:
    """What `function` returns, if it is one of these; whatever it is called."""
    import tensorflow as tf

    signature, nodes = function.signature, function.node_def
    if PREFIX not in signature.name or signature.input_arg or len(nodes) != 1 or nodes[0].op != "Const":
        return None
    value = nodes[0].attr["value"].tensor
    if value.dtype != tf.string.as_datatype_enum or len(value.string_val) != 1:
        return None
    return bytes(value.string_val[0])


@functools.lru_cache(maxsize=MOST_OWNED)
def registered(code: bytes) -> AtomicFunction:
    """The function of `code`, known to this process as long as the result is referenced."""
    import tensorflow as tf
    from tensorflow.core.function.polymorphism import function_type
    from tensorflow.python.eager import context
    from tensorflow.python.eager.polymorphic_function import atomic_function

    eager = context.context()
    eager.add_function_def(definition(code))
    nothing_to_code = function_type.from_structured_signature(((), {}), (tf.TensorSpec([], tf.string),))
    return atomic_function.AtomicFunction(name_of(code), eager, nothing_to_code)


def add_to(graph: tf.Graph, codes: Sequence[bytes]) -> list[str]:
    """Put the functions of `codes` into the library of `graph`, each once; their names."""
    for code in codes:
        if not graph._is_function(name_of(code)):
            graph._add_function(registered(code))
    return list(map(name_of, codes))


def named(codes: Sequence[bytes]) -> list[str]:
    """The functions of `codes`, in the graph that is being built, or known to eager calls."""
    import tensorflow as tf

    if tf.executing_eagerly():
        return [registered(code).name.decode() for code in codes]
    return add_to(tf.compat.v1.get_default_graph(), codes)

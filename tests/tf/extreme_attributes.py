"""Every op of the library with sizes, types and attributes that no sane graph has; a child process of
test_extreme_attributes.py runs them, and says which one it is at.

    python -m tests.tf.extreme_attributes eager|graph|saved_model [first case]
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, graph_pb2, op_def_pb2, tensor_shape_pb2
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.python.eager import context, execute
from tensorflow.python.framework import op_def_registry

from custom_ops.load import Library, load
from custom_ops.recurrent import cells
from tests import memops

MODES = ("eager", "graph", "saved_model")
EXTREMES = (-(2**63), -(2**31), -1, 0, 1, 2**31 - 1, 2**31, 2**32 + 1, 2**40, 2**60, 2**62, 2**62 + 1, 2**63 - 1)
SIZES = tuple(size for size in EXTREMES if size >= 0)
SMALL, IMPOSSIBLE = 1 << 20, 1 << 58  # elements: between them a machine might really try
MOST_OUTPUTS = 64  # more of them, and TensorFlow takes the memory for their types before any op is asked
UNKNOWN_RANK = "unknown rank"


def harmless(*elements: int) -> bool:
    """Whether tensors of so many elements are either soon there, or surely refused."""
    return all(count <= SMALL or count >= IMPOSSIBLE for count in elements)


class Given(NamedTuple):
    """An input: a tensor of zeros, an offloaded tensor's handle, or what stands for neither."""

    dtype: tf.DType = tf.float32
    shape: tuple[int, ...] = (2, 3)
    handle: bool = False


class Case(NamedTuple):
    op: str
    attributes: dict[str, Any]
    inputs: tuple[Given, ...] = ()


HANDLE = Given(handle=True)
STRANGE = (tf.string, tf.resource, tf.variant, tf.int32, tf.bool, tf.complex128, tf.qint8)


def memop_cases() -> Iterator[Case]:
    for size in EXTREMES:
        if harmless(size):
            yield Case("MemOpReserve", {"sizes": [size], "count": 1})
            yield Case("MemOpReserve", {"sizes": [size, size], "count": 2})
            yield Case("MemOpFill", {"bytes": size})
        yield Case("MemOpPreaccess", {"bytes": size})
        yield Case("MemOpProbe", {"run": size, "index": size})
        for name in ("spill_budget", "host_budget"):
            yield Case("MemOpOffload", {"T": tf.float32, name: size}, (Given(),))
        for shape in ([size], [size, size], [size, -1, size], [size] * 4):
            yield Case("MemOpPrefetch", {"T": tf.float32, "shape": shape}, (HANDLE,))
        if size <= MOST_OUTPUTS:
            yield Case("MemOpReserve", {"sizes": [], "count": size})
    yield Case("MemOpPrefetch", {"T": tf.float32, "shape": [1] * 300}, (HANDLE,))
    yield Case("MemOpStats", {"reset": True})
    yield Case("MemOpChunks", {})
    yield Case("MemOpSharing", {"T": []})
    yield Case("MemOpSharing", {"T": [tf.float32, *STRANGE]}, (Given(), *(Given(dtype) for dtype in STRANGE)))
    for dtype in STRANGE:
        one = Given(dtype)
        yield Case("MemOpOffload", {"T": dtype}, (one,))
        yield Case("MemOpRelease", {"T": dtype}, (one, HANDLE))
        yield Case("MemOpAwait", {"T": dtype}, (one, HANDLE))
        yield Case("MemOpPrefetch", {"T": dtype, "shape": UNKNOWN_RANK}, (HANDLE,))
    for shape in ((), (0,), (5,)):  # variants that are no handles
        wrong = Given(tf.variant, shape)
        yield Case("MemOpRelease", {"T": tf.float32}, (Given(), wrong))
        yield Case("MemOpAwait", {"T": tf.float32}, (Given(), wrong))
        yield Case("MemOpPrefetch", {"T": tf.float32, "shape": [2, 3]}, (wrong,))
    for mechanism in ("copy", "managed", "file", "", "x" * 1000):
        yield Case("MemOpOffload", {"T": tf.float32, "mechanism": mechanism}, (Given(),))
    for text in ("/nowhere/at/all", "\0", "x" * 100_000):
        for name in ("label", "spill_key"):
            yield Case("MemOpOffload", {"T": tf.float32, name: text}, (Given(),))
    for size in SIZES:  # nothing to move, of any shape
        yield Case("MemOpOffload", {"T": tf.float32}, (Given(shape=(0, size)),))


def matmuls() -> Iterator[Case]:
    for size, other in itertools.product(SIZES, SIZES):
        if harmless(size * other):
            yield Case("TfmemMatMul", {"num_args": 0}, (Given(shape=(size, 0)), Given(shape=(0, other))))
    for size in SIZES:
        for flags in itertools.product((False, True), repeat=2):
            attributes = {"num_args": 0, "transpose_a": flags[0], "transpose_b": flags[1]}
            yield Case("TfmemMatMul", attributes, (Given(shape=(0, size)), Given(shape=(size, 0))))
        bias = Given(shape=(0, size))
        yield Case("TfmemMatMul", {"num_args": 1}, (Given(shape=(2, 0)), Given(shape=(0, 3)), bias))
    yield Case("TfmemMatMul", {"num_args": 2}, (Given(shape=(2, 1)), Given(shape=(1, 3)), Given(), Given()))
    yield Case("TfmemMatMul", {"num_args": 0}, (Given(shape=()), Given(shape=(1,))))


LSTM = cells.lstm().to_text()
SUM = "cell 1\nsequences 1\nstate 0\nsequence 0 0\nadd 0 1\nstates 2\noutput 2\n"  # no matrix: units may be anything
SCALARS = "cell 1\nsequences 0\nstate 0\nsequence 0 0\nadd 0 1\nstates 2\noutput 2\n"
WIDE = "cell 1\nsequences 2147483647\nstate 0\nsequence 0 2147483646\nadd 0 1\nstates 2\noutput 2 2 2\n"
NO_ROWS = "cell 1\nsequences 1\nvectors 1\ninvariants 1\nmatrices 0 1\nstate 0\nsequence 0 0\nadd 0 1\nstates 2\n"
TWICE = "cell 1\nsequences 2147483647\nsequence 0 2000000000\nsequences 1\nstates 0\n"


def recurrent(
    cell: str, units: int, inputs: tuple[Given, ...], counts: tuple[int, ...], directions: int = 1, **more: Any
) -> Case:
    names = ("Ns", "Ni", "Nv", "Nm", "Nh", "No")
    attributes = {"T": tf.float32, "cell": cell, "units": units, "directions": directions, "reverse": []}
    return Case("TfmemRecurrent", {**attributes, **dict(zip(names, counts, strict=True)), **more}, inputs)


def recurrents() -> Iterator[Case]:
    def given(*shapes: tuple[int, ...]) -> tuple[Given, ...]:
        return tuple(Given(shape=shape) for shape in shapes)

    lstm = given((4, 3, 8), (2, 8), (3, 2), (3, 2))
    plain = given((4, 3, 2), (3, 2))
    yield recurrent(TWICE, 4, given((1, 1, 4), (1, 4)), (1, 0, 0, 0, 1, 0))
    for size in EXTREMES:
        yield recurrent(LSTM, size, lstm, (1, 0, 0, 1, 2, 1))
        yield recurrent(SUM, size, plain, (1, 0, 0, 0, 1, 1))
        yield recurrent(LSTM, 2, lstm, (1, 0, 0, 1, 2, 1), directions=size)
        yield recurrent(SUM, 2, plain, (1, 0, 0, 0, 1, 1), directions=size, reverse=[True] * 2)
        yield recurrent(SUM, 2, plain, (1, 0, 0, 0, 1, 1), fingerprint=size)
    yield recurrent(SUM, 4, given((2**31, 0, 4), (0, 4)), (1, 0, 0, 0, 1, 1))  # no rows, in however many steps
    yield recurrent(SUM, 4, given((0, 2**31, 4), (2**31, 0)), (1, 0, 0, 0, 1, 1))
    for size in SIZES:
        yield recurrent(SUM, size, given((0, 0, size), (0, size)), (1, 0, 0, 0, 1, 1))
        if harmless(size):
            yield recurrent(SUM, size, given((0, 1, size), (0, size)), (1, 0, 0, 0, 1, 1))
        yield recurrent(WIDE, size, given((0, 0, size), (0, size)), (1, 0, 0, 0, 1, 1))
        if harmless(size, size * size):
            yield recurrent(SCALARS, size, given((0, size), (0, size)), (1, 0, 0, 0, 1, 1))
        if harmless(size):
            inputs = given((0, 0, size), (0, size), (size,), (0, size), (0, size))
            yield recurrent(NO_ROWS, size, inputs, (1, 1, 1, 1, 1, 0))
        for batch_major in (False, True):
            for cell, shape in (
                (SCALARS, (0, size)),
                (SCALARS, (size, 0)),
                (SUM, (0, size, 4)),
                (SUM, (size, 0, 4)),
            ):
                inputs = given(shape, (0, 4))
                if not harmless(size):  # of the final states, and of what a sequence is cut into
                    inputs = given(tuple(min(number, SMALL) for number in shape), (0, 4))
                yield recurrent(cell, 4, inputs, (1, 0, 0, 0, 1, 1), batch_major=batch_major)
    for counts in itertools.product((0, 1, 2), repeat=2):
        yield recurrent(SUM, 2, plain, (counts[0], 0, 0, 0, counts[1], 1))
    for text in ("", "cell 1", "cell 1\nstates", "cell 1\nsequences 1\nstates 0\n", "\0" * 1000, "cell 1\n" * 1000):
        yield recurrent(text, 2, plain, (1, 0, 0, 0, 1, 0))


CASES = (*memop_cases(), *matmuls(), *recurrents())


def shape_proto(dimensions: Any) -> tensor_shape_pb2.TensorShapeProto:
    proto = tensor_shape_pb2.TensorShapeProto()
    if dimensions == UNKNOWN_RANK:
        proto.unknown_rank = True
        return proto
    for size in dimensions:
        proto.dim.add(size=size)
    return proto


def attribute(value: Any) -> attr_value_pb2.AttrValue:
    """As a graph has it."""
    found = attr_value_pb2.AttrValue()
    if isinstance(value, bool):
        found.b = value
    elif isinstance(value, int):
        found.i = value
    elif isinstance(value, str):
        found.s = value.encode()
    elif isinstance(value, tf.DType):
        found.type = value.as_datatype_enum
    elif isinstance(value, tensor_shape_pb2.TensorShapeProto):
        found.shape.CopyFrom(value)
    else:
        found.list.SetInParent()
        for item in value:
            single = attribute(item)
            name = single.WhichOneof("value")
            getattr(found.list, name).append(getattr(single, name))
    return found


def definition(case: Case) -> op_def_pb2.OpDef:
    found: op_def_pb2.OpDef = op_def_registry.get(case.op)
    return found


def attributes_of(case: Case) -> dict[str, Any]:
    """With shapes as protos, and all that have a default."""
    found = dict(case.attributes)
    if "shape" in found:
        found["shape"] = shape_proto(found["shape"])
    return found


def outputs_of(case: Case) -> int:
    """How many tensors the case would put out."""
    found = 0
    for output in definition(case).output_arg:
        found += max(int(case.attributes[output.number_attr]), 0) if output.number_attr else 1
    return found


# ---- in a graph ----


def graph_of(case: Case) -> tuple[graph_pb2.GraphDef, str]:
    """A graph that runs the case, and the node."""
    graph = graph_pb2.GraphDef()
    graph.versions.producer = tf.version.GRAPH_DEF_VERSION

    def node(name: str, op: str, inputs: list[str], **attributes: Any) -> str:
        made = graph.node.add(name=name, op=op, input=inputs)
        for key, value in attributes.items():
            made.attr[key].CopyFrom(attribute(value))
        return name

    def tensor(name: str, given: Given) -> str:
        if given.handle:
            source = tensor(f"{name}/source", Given())
            return node(name, "MemOpOffload", [source], T=tf.float32)
        if given.dtype == tf.resource:
            return node(name, "VarHandleOp", [], dtype=tf.float32, shape=shape_proto([]))
        if given.dtype == tf.variant and given.shape:
            element = tensor(f"{name}/element", given._replace(shape=()))
            many = node(f"{name}/dims", "Const", [], dtype=tf.int64)
            graph.node[-1].attr["value"].tensor.CopyFrom(tf.make_tensor_proto(given.shape, tf.int64))
            return node(name, "Fill", [many, element], T=tf.variant, index_type=tf.int64)
        if given.dtype == tf.variant:
            sizes = [node(f"{name}/{part}", "Const", [], dtype=tf.int32) for part in ("element", "most")]
            for place in (-2, -1):
                graph.node[place].attr["value"].tensor.CopyFrom(tf.make_tensor_proto(-1, tf.int32))
            kinds = {"element_dtype": tf.float32, "shape_type": tf.int32}
            return node(name, "EmptyTensorList", sizes, **kinds)
        dims = node(f"{name}/dims", "Const", [], dtype=tf.int64)
        graph.node[-1].attr["value"].tensor.CopyFrom(tf.make_tensor_proto(given.shape, tf.int64))
        zero = node(f"{name}/zero", "Const", [], dtype=given.dtype)
        proto = graph.node[-1].attr["value"].tensor
        proto.dtype = given.dtype.as_datatype_enum
        proto.tensor_shape.SetInParent()
        if given.dtype == tf.string:
            proto.string_val.append(b"text")
        return node(name, "Fill", [dims, zero], T=given.dtype, index_type=tf.int64)

    inputs = [tensor(f"input{place}", given) for place, given in enumerate(case.inputs)]
    return graph, node("case", case.op, inputs, **attributes_of(case))


def run_graph(case: Case) -> None:
    graph_def, name = graph_of(case)
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(graph_def, name="")
        operation = graph.get_operation_by_name(name)
        for output in operation.outputs:
            _ = output.shape
        with tf.compat.v1.Session() as session:
            session.run(operation)


def run_saved_model(case: Case) -> None:
    """A model that its author wrote by hand: no op looked at it before it is loaded."""
    graph_def, name = graph_of(case)
    saved = saved_model_pb2.SavedModel(saved_model_schema_version=1)
    meta = saved.meta_graphs.add()
    meta.meta_info_def.tags.append("serve")
    meta.graph_def.CopyFrom(graph_def)
    signature = meta.signature_def["serving_default"]
    signature.method_name = "tensorflow/serving/predict"
    if outputs_of(case):
        first = next(arg for arg in definition(case).output_arg if case.attributes.get(arg.number_attr, 1))
        put_out = signature.outputs["result"]
        put_out.name = f"{name}:0"
        put_out.dtype = first.type or case.attributes[first.type_attr].as_datatype_enum
        put_out.tensor_shape.unknown_rank = True
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "saved_model.pb").write_bytes(saved.SerializeToString())
        if not signature.outputs:  # TensorFlow 2's loader runs outputs only
            with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
                tf.compat.v1.saved_model.load(session, ["serve"], folder)
                session.run(graph.get_operation_by_name(name))
            return
        tf.saved_model.load(folder).signatures["serving_default"]()


# ---- eagerly ----


def run_eagerly(library: Library, case: Case) -> None:
    def tensor(given: Given) -> Any:
        if given.handle:
            return memops.offload(library, tf.zeros([2, 3]))
        if given.dtype == tf.resource:
            return tf.Variable(1.0).handle
        if given.dtype == tf.variant:
            empty = tf.raw_ops.EmptyTensorList(element_shape=-1, max_num_elements=-1, element_dtype=tf.float32)
            return tf.fill(given.shape, empty) if given.shape else empty
        zero = tf.constant("text") if given.dtype == tf.string else tf.cast(0, given.dtype)
        return tf.raw_ops.Fill(dims=tf.constant(given.shape, tf.int64), value=zero)

    types = {attr.name: attr.type for attr in definition(case).attr}
    attributes: list[Any] = []
    for name, value in attributes_of(case).items():
        if types[name] == "list(type)":
            attributes += [name, [dtype.as_datatype_enum for dtype in value]]
        else:
            attributes += [name, value.as_datatype_enum if types[name] == "type" else value]
    inputs = [tensor(given) for given in case.inputs]
    execute.execute(case.op, outputs_of(case), inputs, tuple(attributes), context.context())


def main() -> int:
    mode, first = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
    library = load()
    for place, case in enumerate(CASES[first:], start=first):
        print(f"CASE {place}", flush=True)
        outcome = "ran"
        try:
            if mode == "eager":
                run_eagerly(library, case)
            elif mode == "graph":
                run_graph(case)
            else:
                run_saved_model(case)
        except Exception as error:  # any, but a crash
            outcome = f"{type(error).__name__}: {str(error)[:150]}".replace("\n", " ")
        print(f"DONE {place} {outcome}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

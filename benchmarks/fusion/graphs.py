"""What TensorFlow makes of a step: its ops after Grappler, and XLA's clusters among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tensorflow.core.protobuf.config_pb2 import RunMetadata
from tensorflow.python.eager import context

# they run nothing on the device, or only read an address
WITHOUT_KERNEL = {"Const", "_Arg", "_Retval", "_Send", "_Recv", "ReadVariableOp", "VarHandleOp", "NoOp", "Merge"}
WITHOUT_KERNEL |= {"Identity", "IdentityN", "StopGradient", "Reshape", "ExpandDims", "Squeeze", "Shape", "Switch"}
WITHOUT_KERNEL |= {"OptionalNone", "OptionalFromValue", "OptionalGetValue"}  # how the gradient of an If gets its values
PRODUCTS = ("MatMul", "Conv2D", "Conv1D", "Einsum")


@contextmanager
def collected() -> Iterator[RunMetadata]:
    """What is given has, once the context is left, the graphs of all functions that were called first in it."""
    metadata = RunMetadata()
    context.enable_run_metadata()
    try:
        yield metadata
        metadata.MergeFrom(context.export_run_metadata())
    finally:
        context.disable_run_metadata()


def kernels(metadata: RunMetadata) -> dict[str, int]:
    """Counts of the largest function: products and memory-intensive ops, each of which runs a kernel."""
    graphs = max(metadata.function_graphs, key=lambda found: sum(len(part.node) for part in found.partition_graphs))
    ops = Counter(node.op for part in graphs.partition_graphs for node in part.node if node.op not in WITHOUT_KERNEL)
    products = sum(number for op, number in ops.items() if any(word in op for word in PRODUCTS))
    return {"products": products, "memory": ops.total() - products}


def clusters(metadata: RunMetadata) -> int:
    """XLA's, of all functions."""
    parts = (part for found in metadata.function_graphs for part in found.partition_graphs)
    return sum(node.op == "_XlaRun" for part in parts for node in part.node)

"""The MemOps one by one: each function adds one op to the current graph, or runs it, eagerly."""

from __future__ import annotations

from typing import Any

from custom_ops.load import Library
from graph_passes.passes.offload.options import Mechanism


def offload(
    library: Library,
    tensor: Any,
    *,
    mechanism: Mechanism = "auto",
    label: str = "",
    spill_directory: str = "",
    spill_budget: int = 0,
    host_budget: int = 0,
    name: str | None = None,
) -> Any:
    """MemOpOffload: starts moving `tensor` out; returns its handle, a scalar variant."""
    return library.ops.mem_op_offload(
        tensor=tensor,
        mechanism=mechanism,
        label=label,
        spill_key=library.spill_key(spill_directory),
        spill_budget=spill_budget,
        host_budget=host_budget,
        name=name,
    )


def release(library: Library, tensor: Any, handle: Any, name: str | None = None) -> Any:
    """MemOpRelease: after it `tensor`'s memory may be used again."""
    return library.ops.mem_op_release(tensor=tensor, handle=handle, name=name)


def prefetch(
    library: Library,
    handle: Any,
    dtype: Any,
    shape: Any = None,
    name: str | None = None,
) -> Any:
    """MemOpPrefetch: starts moving the tensor back; only `await_` may use the result."""
    return library.ops.mem_op_prefetch(handle=handle, T=dtype, shape=shape, name=name)


def await_(library: Library, tensor: Any, handle: Any, name: str | None = None) -> Any:
    """MemOpAwait: `tensor`'s memory, with the data there."""
    return library.ops.mem_op_await(tensor=tensor, handle=handle, name=name)


def probe(library: Library, run: int, index: int, name: str | None = None) -> Any:
    """MemOpProbe: records row `index` of table `run`."""
    return library.ops.mem_op_probe(run=run, index=index, name=name)


def preaccess(library: Library, size: int, name: str | None = None) -> Any:
    """MemOpPreaccess: makes the next `size` bytes allocated resident (unified memory)."""
    return library.ops.mem_op_preaccess(bytes=size, name=name)

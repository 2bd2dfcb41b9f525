"""The extension module, which records graphs op by op; where it is missing, what to do."""

from __future__ import annotations

from custom_ops.errors import OpLibraryError
from custom_ops.load import build_hint

try:
    from custom_ops._extension import Expression, KindNumbers, RecordedOp, flatten_nodes, node_maker, use_operators
except ImportError as error:
    raise OpLibraryError(f"tfmem.dynamic has no extension module: {error}. {build_hint()}") from error

__all__ = ["Expression", "KindNumbers", "RecordedOp", "flatten_nodes", "node_maker", "use_operators"]

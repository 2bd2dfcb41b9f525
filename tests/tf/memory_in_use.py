"""What the process's tensors take, which counts towards every budget in it: other tests may keep some."""

from __future__ import annotations

import gc

import tfmem


def in_use() -> int:
    """Bytes that the CPU's allocator holds, once what is unreachable is gone; 0 where it keeps no statistics."""
    gc.collect()
    return max(0, int(tfmem.load_ops().stats()[0]))

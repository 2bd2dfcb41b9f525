"""What the ops of ops/memory compute, in NumPy. Tests compare the C++ kernels with this.

MemOpRelease computes nothing: its tensor may be overwritten from then on."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass
class Ticket:
    """What a handle names: one tensor's bytes, somewhere else.

    Attributes:
        data: the bytes, [size].
        prefetched: the arrays that were handed out and not filled yet.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    data: bytes
    prefetched: list[Array] = field(default_factory=list)


def offload(tensor: Array) -> Ticket:
    """MemOpOffload: copies `tensor`, of any fixed-size dtype and any shape, out."""
    return Ticket(tensor.dtype, tensor.shape, tensor.tobytes())


def prefetch(ticket: Ticket) -> Array:
    """MemOpPrefetch: memory of the ticket's dtype and shape, whose values no op may use yet."""
    tensor = np.empty(ticket.shape, ticket.dtype)
    ticket.prefetched.append(tensor)
    return tensor


def await_(tensor: Array, ticket: Ticket) -> Array:
    """MemOpAwait: the same memory, with the bytes that were offloaded.

    Raises:
        ValueError: `tensor` was not prefetched from `ticket`.
    """
    if not any(tensor is other for other in ticket.prefetched):
        raise ValueError("the awaited tensor is not one that was prefetched from the ticket")
    tensor[...] = np.frombuffer(ticket.data, ticket.dtype).reshape(ticket.shape)
    return tensor


@dataclass
class Allocator:
    """What MemOpStats and MemOpProbe read: a device's allocator, in bytes; -1: no limit known.

    MemOpPreaccess changes none of it: it frees what it allocates.
    """

    limit: int = -1
    in_use: int = 0
    peak: int = 0

    def allocate(self, size: int) -> None:
        """Takes `size` bytes; a negative size frees them."""
        self.in_use += size
        self.peak = max(self.peak, self.in_use)

    def stats(self, reset: bool) -> Array:
        """MemOpStats; MemOpProbe is the same with `reset` on, plus the time."""
        values = np.array([self.in_use, self.peak, self.limit], np.int64)
        if reset:
            self.peak = self.in_use
        return values

"""What kernels and products of matrices take on a device, for the passes that choose among them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from custom_ops.jit.cublas import MatrixProduct

# Seconds of the library's products of these forms side by side, each on a separate stream; None: not measured.
Beside = Callable[[Sequence[MatrixProduct]], float | None]


@dataclass(frozen=True)
class Small:
    """A bound on products of matrices.

    Attributes:
        operations: multiplications and additions.
        nbytes: of both factors and the result.
    """

    operations: int
    nbytes: int


@dataclass(frozen=True)
class KernelDevice:
    """What kernels take on a device.

    Attributes:
        name: the device's.
        copies: (bytes moved, seconds) of copies, at growing sizes.
        launch: seconds from one kernel of a region to the next.
        barrier: seconds until all of a kernel has come to one point.
        block: bytes that one block can work on by itself; a kernel of no larger tensors needs no such barrier.
        chip: bytes that a kernel can keep from one pass over its tensors to the next.
        dispatch: seconds that TensorFlow takes for an op, whatever it computes.
        region: seconds that a region takes, whatever it holds.
        packed: share of their time that parts with no dependences among them lose in a kernel of several passes. The
            largest part loses nothing.
        product: seconds that a small product of matrices takes beside the bytes that it moves.
        source: characters of a kernel's source beyond which parts with no dependences among them are packed in
            several kernels, since the compiler's time grows faster than the source does; 0: any number.
        most: products up to this are small: they wait for memory more than they compute, and can be in kernels; None:
            no product can.
    """

    name: str
    copies: tuple[tuple[float, float], ...]
    launch: float
    barrier: float
    block: int
    chip: int
    dispatch: float
    region: float
    packed: float = 0.0
    product: float = 0.0
    source: int = 0
    most: Small | None = None

    def seconds(self, moved: float) -> float:
        """How long moving so many bytes takes: between the sizes that were measured, and past them at the last rate."""
        place = bisect_left(self.copies, (moved,))
        if place == 0:
            return self.copies[0][1]
        (left, before), (right, after) = self.copies[place - 1], self.copies[min(place, len(self.copies) - 1)]
        return before + (moved - left) * ((after - before) / (right - left) if right > left else before / left)

"""What a fused region takes, read from the text that its op holds: memory, bytes that it moves, flops. Pure.

input 0 -> kernel -> 1 -> product -> 2 -> kernel -> 3 (output)      1 and 2 are no buffers of the step: they lie in
the region's workspace, each while it is needed
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod, sqrt

from custom_ops.fusion.region import Assign, Call, Kernel, Region, TensorType, View
from custom_ops.fusion.text import from_text
from graph_passes.graph.ir import Node, text
from graph_passes.graph.ops import CONVOLUTIONS, FUSION_OP, MATRIX_PRODUCTS


@dataclass(frozen=True)
class RegionCosts:
    """What one run of a region takes. A size that is known only when the region runs counts as zero.

    Attributes:
        workspace: the most bytes at once of what its steps hand to each other.
        steps: bytes and flops of each kernel and call.
        views: pairs of an output and the input whose memory it is.
        repeats: whether it makes the same bits again, with no effect: all of it is kernels. A product might run by
            another algorithm.
    """

    workspace: int
    steps: tuple[tuple[int, float], ...]
    views: tuple[tuple[int, int], ...]
    repeats: bool = False


def region_costs(node: Node) -> RegionCosts | None:
    """What a node takes if it is a region; None if it is none."""
    return _costs(text(node.attrs["region"])) if node.op == FUSION_OP else None


@lru_cache(maxsize=4096)
def _costs(written: str) -> RegionCosts:
    region = from_text(written)
    sizes = [_nbytes(each) for each in region.values]
    work = [step for step in region.steps if isinstance(step, Kernel | Call)]
    steps = tuple((sum(sizes[value] for value in (*step.inputs, *step.outputs)), _flops(region, step)) for step in work)
    root = _roots(region)
    views = tuple((place, root[value]) for place, value in enumerate(region.outputs) if root[value] < region.inputs)
    repeats = all(isinstance(step, Kernel | View) for step in region.steps)
    return RegionCosts(_workspace(region, work, sizes, root), steps, views, repeats)


def _roots(region: Region) -> list[int]:
    """For each value the one whose memory it is."""
    root = list(range(len(region.values)))
    for step in region.steps:
        if isinstance(step, View):
            root[step.output] = root[step.input]
    return root


def _workspace(region: Region, work: Sequence[Kernel | Call], sizes: Sequence[int], root: Sequence[int]) -> int:
    """Bytes of the values that are neither inputs nor outputs, nor the next value of a variable."""
    elsewhere = {root[value] for value in region.outputs}
    elsewhere |= {root[step.value] for step in region.steps if isinstance(step, Assign)}
    last: dict[int, int] = {}
    for place, step in enumerate(work):
        last.update((root[value], place) for value in (*step.inputs, *step.outputs))
    held = dict[int, int]()
    most = 0
    for place, step in enumerate(work):
        held |= {value: sizes[value] for value in step.outputs if value not in elsewhere}
        most = max(most, sum(held.values()))
        held = {value: nbytes for value, nbytes in held.items() if last[value] > place}
    return most


def _nbytes(found: TensorType) -> int:
    bits = re.search("[0-9]+", found.dtype)
    sizes = [0 if size is None else size for size in found.shape]
    return prod(sizes) * (int(bits.group()) // 8 if bits else 1)


def _flops(region: Region, step: Kernel | Call) -> float:
    """Twice the numbers that a call multiplies. Of a product `[m, k] x [k, n]` they are the root of `mk * kn * mn`."""
    if not isinstance(step, Call) or not step.outputs or len(step.inputs) < 2:
        return 0.0
    read = [[size or 0 for size in region.values[value].shape] for value in step.inputs]
    made = [size or 0 for size in region.values[step.outputs[0]].shape]
    if step.op in MATRIX_PRODUCTS:
        batch = prod(made[:-2]) if len(read[0]) == len(read[1]) else 1
        return 2.0 * sqrt(prod(read[0]) * prod(read[1]) * prod(made) / max(batch, 1))
    if step.op in CONVOLUTIONS:  # all three of a layer multiply each pixel of the result with the whole filter
        backward = "Backprop" in step.op  # the last input is the result's gradient then, and sizes may be left out
        image = read[-1] if backward else made
        filters = made if "BackpropFilter" in step.op else read[-2] if backward else read[1]
        channels = filters[-1] * (filters[-2] if "Depthwise" in step.op else 1) if filters else 1
        return 2.0 * prod(image) * prod(filters) / max(channels, 1)
    return 0.0

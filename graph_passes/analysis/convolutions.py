"""Convolutions of images, pooling and their gradients as calls of cuDNN: what it computes, and where sizes are said.

cuDNN pads both sides of an image alike. TensorFlow often pads one number more behind: an image of 8 pixels, 3 of which
make every other pixel of the result, gets one behind. Such a convolution is that of a padded image, without padding:

    Conv2D                 pad the image, convolve
    Conv2DBackpropInput    the gradient of the padded image, of which a part is the image's
    Conv2DBackpropFilter   pad the image, the gradient by it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec, integers, text
from graph_passes.graph.ops import CONVOLUTIONS
from graph_passes.lower.known_numbers import integers as constant_integers
from graph_passes.refusals import Reason, Refusal

# Ops, and the input that says how large what they give is.
SIZED = {f"{op}BackpropInput": 0 for op in ("Conv2D", "DepthwiseConv2dNative")}
SIZED |= {f"{op}BackpropFilter": 1 for op in ("Conv2D", "DepthwiseConv2dNative")}
SIZED["AvgPoolGrad"] = 0

_MOST = (1 << 31) - 1  # numbers of a tensor that cuDNN takes


def said_sizes(graph: Graph, node: Node) -> dict[int, tuple[int, ...]]:
    """The input of a node that says the sizes of its result, with what it says if that is a constant."""
    place = SIZED.get(node.op)
    found = constant_integers(graph, node.inputs[place]) if place is not None else None
    return {} if place is None or found is None else {place: tuple(found)}


def inferred_sizes(graph: Graph, node: Node) -> dict[int, tuple[int, ...]]:
    """The input of a node that says the sizes of its result, with these sizes; -1 is the size of the batch."""
    spec = graph.specs.get(TensorId(node.name))
    if node.op not in SIZED or spec is None or spec.shape is None:
        return {}
    return {SIZED[node.op]: tuple(-1 if size is None else size for size in spec.shape)}


@dataclass(frozen=True)
class Padded:
    """A convolution, or gradient of one, as one of a padded image.

    Attributes:
        call: the node without padding.
        said: what `inferred_sizes` is of the call.
        paddings: how many numbers come before and behind each dimension of the image.
        image, large: specs of the image and of the padded one.
    """

    call: Node
    said: dict[int, tuple[int, ...]]
    paddings: tuple[tuple[int, int], ...]
    image: TensorSpec
    large: TensorSpec


def padded(graph: Graph, node: Node) -> Padded | None:
    """A node that cuDNN computes of a padded image alone; None if cuDNN pads the image as well, or nothing does."""
    if node.op not in CONVOLUTIONS:
        return None
    image, filters, _ = _operands(graph, node)
    if image is None or filters is None or image.shape is None or filters.shape is None:
        return None
    paddings = _paddings(node, image.shape, filters.shape)
    if all(before == after for before, after in paddings):
        return None
    call = node.copy()
    call.attrs |= {"padding": "VALID", "explicit_paddings": ()}
    large = replace(image, shape=_larger(image.shape, paddings))
    said = inferred_sizes(graph, node)
    if node.op.endswith("BackpropInput"):
        said = {place: tuple(-1 if size is None else size for size in large.shape or ()) for place in said}
    return Padded(call, said, paddings, image, large)


def refused(graph: Graph, node: Node) -> Refusal | None:
    """Why cuDNN computes no convolution, or gradient of one, such as this one; the size of the batch may be unknown."""
    specs = _operands(graph, node)
    image, filters, result = specs
    sizes = _known(image, (1, 2, 3)), _known(filters, (0, 1, 2, 3)), _known(result, (1, 2, 3))
    if not all(sizes):
        return Reason.CONVOLUTION_SIZES()
    shapes = [spec.shape for spec in specs if spec is not None and spec.shape is not None]
    for shape in (*shapes, _larger(shapes[0], _paddings(node, shapes[0], shapes[1]))):
        count = prod(1 if size is None else size for size in shape)
        if count > _MOST:
            return Reason.CONVOLUTION_LARGE(count=count)
    return None


def not_pooled(graph: Graph, node: Node) -> Refusal | None:
    """Why cuDNN pools no windows such as these, or takes no such gradient; the batch's size may be unknown."""
    given = node.inputs[1 if node.op in SIZED else 0]
    image, result = (graph.specs.get(tensor) for tensor in (given, TensorId(node.name)))
    if not _known(image, (1, 2, 3)) or not _known(result, (1, 2, 3)):
        return Reason.CONVOLUTION_SIZES()
    for spec in (image, result):
        if spec is not None and spec.sizes is not None and prod(spec.sizes) > _MOST:
            return Reason.CONVOLUTION_LARGE(count=prod(spec.sizes))
    padding, images = text(node.attrs.get("padding")), text(node.attrs.get("data_format")) or "NHWC"
    window, strides = (integers(node.attrs.get(name)) for name in ("ksize", "strides"))
    across = (0, 3 if images == "NHWC" else 1)
    one = all(found[place] == 1 for found in (window, strides) for place in across)
    if not one or padding not in ("SAME", "VALID") or images not in ("NHWC", "NCHW"):
        return Reason.NO_POOLING(images=images, padding=padding, window=list(window))
    return None


def _first(node: Node) -> int:
    """The first dimension of an image that the filter goes along."""
    return 2 if text(node.attrs.get("data_format")) == "NCHW" else 1


def _operands(graph: Graph, node: Node) -> tuple[TensorSpec | None, TensorSpec | None, TensorSpec | None]:
    """The specs of the image, of the filter and of the convolution's result."""
    made = TensorId(node.name)
    places: Sequence[TensorId] = (*node.inputs[:2], made)
    if node.op.endswith("BackpropInput"):
        places = made, *node.inputs[1:3]
    elif node.op.endswith("BackpropFilter"):
        places = node.inputs[0], made, node.inputs[2]
    image, filters, result = map(graph.specs.get, places)
    return image, filters, result


def _known(spec: TensorSpec | None, places: Sequence[int]) -> list[int]:
    """The sizes of these dimensions of four; none unless all are known and not zero."""
    if spec is None or spec.shape is None or len(spec.shape) != 4:
        return []
    found = [size for place in places if (size := spec.shape[place])]
    return found if len(found) == len(places) else []


def _paddings(node: Node, image: Sequence[int | None], filters: Sequence[int | None]) -> tuple[tuple[int, int], ...]:
    """What TensorFlow pads before and behind each dimension of the image."""
    first = _first(node)
    found = [(0, 0)] * 4
    for place, window in enumerate(filters[:2]):
        found[first + place] = _padding(node, first + place, image[first + place] or 0, window or 0)
    return tuple(found)


def _larger(image: Sequence[int | None], paddings: Sequence[tuple[int, int]]) -> tuple[int | None, ...]:
    return tuple(size if size is None else size + sum(pad) for size, pad in zip(image, paddings, strict=True))


def _padding(node: Node, dimension: int, size: int, window: int) -> tuple[int, int]:
    """What TensorFlow pads before and behind a dimension of the image."""
    kind = text(node.attrs.get("padding"))
    if kind == "EXPLICIT":
        before, after = integers(node.attrs.get("explicit_paddings"))[2 * dimension : 2 * dimension + 2]
        return before, after
    if kind != "SAME":
        return 0, 0
    stride = integers(node.attrs.get("strides"))[dimension]
    dilation = (integers(node.attrs.get("dilations")) or (1, 1, 1, 1))[dimension]
    missing = max((-(-size // stride) - 1) * stride + (window - 1) * dilation + 1 - size, 0)
    return missing // 2, missing - missing // 2

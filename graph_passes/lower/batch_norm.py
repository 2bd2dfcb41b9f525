"""FusedBatchNormV3 and its gradient, channels last, with the arithmetic of TensorFlow's kernels
(fused_batch_norm_op.cc): computed in the dtype of the statistics, and cast to the input's.

On a GPU Grappler makes `_FusedBatchNormEx` of a batch norm, an addition and a ReLU. It is read as these, rounded once.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from graph_passes.graph.ir import Graph, Node, TensorId, boolean, floating, text
from graph_passes.graph.ops import OpPattern
from graph_passes.lower.access import FIRST, Access
from graph_passes.lower.program_writer import Demand, ProgramWriter, Steps
from graph_passes.lower.reductions import reduction_kind
from graph_passes.lower.rule import Rule
from graph_passes.refusals import Reason, Refusal

_WIDE = "float32"  # the dtype of statistics
_SIDE = 5  # the output of `_FusedBatchNormGradEx` that is the gradient of a side input
_RESULT = 7  # its input that is what the forward op made


def _rows(w: ProgramWriter, x: TensorId, channel: Access) -> tuple[Access, tuple[int, ...]]:
    """Where to read all that is one channel's, and the axes to reduce over."""
    outer = len(w.shapes[x]) - 1
    return w.over(x, range(outer), (*(FIRST,) * outer, *channel))


def _mean(w: ProgramWriter, total: int, count: int) -> int:
    """A sum over so many rows, times one over their number."""
    return w.apply("multiply", total, w.like(total, float(np.float32(1) / np.float32(count))))


def _count(w: ProgramWriter, x: TensorId) -> int:
    return int(np.prod(w.shapes[x][:-1]))


def _moments(w: ProgramWriter, x: TensorId, channel: Access) -> Generator[Demand, int, tuple[int, int]]:
    """Mean and variance of a channel."""
    row, axes = _rows(w, x, channel)
    element = w.cast(_WIDE, (yield x, row))
    count = _count(w, x)
    mean = _mean(w, w.reduce("sum", element, axes), count)
    centered = w.apply("subtract", element, mean)
    return mean, _mean(w, w.reduce("sum", w.apply("square", centered), axes), count)


def _is_training(node: Node) -> bool:
    return "is_training" not in node.attrs or boolean(node.attrs["is_training"])


def _factor(w: ProgramWriter, node: Node, variance: int) -> int:
    epsilon = floating(node.attrs.get("epsilon", 1e-4))
    return w.apply("reciprocal_sqrt", w.apply("add", variance, w.like(variance, epsilon)))


def _batch_norm(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    """Outputs: y; mean and variance, moved towards the new ones; mean and variance for the gradient."""
    x, scale, offset, old_mean, old_variance = node.inputs[:5]
    channel = at[-1:]
    if not _is_training(node):
        mean = yield old_mean, channel
        variance = yield old_variance, channel
    else:
        mean, variance = yield from _moments(w, x, channel)
    if output in (1, 2) and _is_training(node):
        return (yield from _moved(w, node, output, channel, (mean, variance)[output - 1]))
    if output:
        return mean if output in (1, 3) else variance
    factor = yield scale, channel
    shift = yield offset, channel
    element = w.cast(_WIDE, (yield x, at))
    scaled = w.apply(
        "multiply", w.apply("subtract", element, mean), w.apply("multiply", _factor(w, node, variance), factor)
    )
    result = w.apply("add", scaled, shift)
    for side in node.inputs[5:] if node.op == "_FusedBatchNormEx" else ():
        result = w.apply("add", result, w.cast(_WIDE, (yield side, at)))
    if _is_activated(node):
        result = w.apply("relu", result)
    return w.cast(w.shapes.dtype(x), result)


def _is_activated(node: Node) -> bool:
    return text(node.attrs.get("activation_mode")) == "Relu"


def _moved(w: ProgramWriter, node: Node, output: int, channel: Access, new: int) -> Steps:
    """A moving average: the new value, of the variance the unbiased one, by the share that an attribute says."""
    count = _count(w, node.inputs[0])
    if output == 2:
        new = w.apply("multiply", new, w.like(new, float(np.float32(count) / np.float32(max(count - 1, 1)))))
    share = floating(node.attrs.get("exponential_avg_factor", 1.0))
    if share == 1.0:
        return new
    old = yield node.inputs[2 + output], channel
    kept = w.apply("multiply", w.like(old, float(np.float32(1) - np.float32(share))), old)
    return w.apply("add", kept, w.apply("multiply", w.like(new, share), new))


def _gradient(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    """Outputs: the gradients of x, scale and offset; of a side input, the sixth."""
    x, scale, mean_of, variance_of = node.inputs[1:5]
    if output == _SIDE:
        return w.cast(w.shapes.dtype(x), (yield from _upstream(w, node, at)))
    channel = at[-1:]
    mean = yield mean_of, channel
    variance = yield variance_of, channel
    factor = _factor(w, node, variance)
    row, axes = _rows(w, x, channel)
    upstream = yield from _upstream(w, node, row)
    centered = w.apply("subtract", w.cast(_WIDE, (yield x, row)), mean)
    total = w.reduce("sum", upstream, axes)
    if output == 2:
        return total
    if output == 1:
        if _is_training(node):
            return w.reduce("sum", w.apply("multiply", upstream, w.apply("multiply", centered, factor)), axes)
        return w.apply("multiply", w.reduce("sum", w.apply("multiply", upstream, centered), axes), factor)
    weight = w.apply("multiply", (yield scale, channel), factor)
    own = yield from _upstream(w, node, at)
    if not _is_training(node):
        return w.cast(w.shapes.dtype(x), w.apply("multiply", own, weight))
    count = _count(w, x)
    together = _mean(w, w.reduce("sum", w.apply("multiply", upstream, centered), axes), count)
    slope = w.apply("multiply", w.apply("square", factor), together)
    deviation = w.apply("subtract", w.cast(_WIDE, (yield x, at)), mean)
    rest = w.apply("subtract", w.apply("subtract", own, _mean(w, total, count)), w.apply("multiply", deviation, slope))
    return w.cast(w.shapes.dtype(x), w.apply("multiply", weight, rest))


def _upstream(w: ProgramWriter, node: Node, at: Access) -> Steps:
    """The gradient of the normalised numbers: behind a ReLU those of its result alone that are positive."""
    gradient = w.cast(_WIDE, (yield node.inputs[0], at))
    if not _is_activated(node):
        return gradient
    result = w.cast(_WIDE, (yield node.inputs[_RESULT], at))
    return w.apply("multiply", gradient, w.cast(_WIDE, w.apply("greater", result, w.like(result, 0))))


def _refusal(graph: Graph, node: Node) -> Refusal | None:
    if text(node.attrs.get("data_format")) not in ("", "NHWC", "NDHWC"):
        return Reason.CHANNELS_FIRST()
    shape = graph.specs[node.inputs[1 if "Grad" in node.op else 0]].shape
    if shape is None or None in shape:
        return Reason.BATCH_NORM_SIZE()
    activation = text(node.attrs.get("activation_mode"))
    return (
        None
        if activation in ("", "Identity", "Relu")
        else Reason.BATCH_NORM_ACTIVATION(op=node.op, activation=activation)
    )


def _kind(graph: Graph, node: Node) -> OpPattern:
    if not _is_training(node) and "Grad" not in node.op:
        return OpPattern.ELEMENTWISE
    shape = graph.specs[node.inputs[1 if "Grad" in node.op else 0]].shape or ()
    return reduction_kind(shape, range(len(shape) - 1))


RULES = {
    "FusedBatchNormV3": Rule(_batch_norm, _kind, (0, 5), _refusal, reserved=(5,)),
    "FusedBatchNormGradV3": Rule(_gradient, _kind, (0, 5), _refusal, reserved=(3, 4)),
    "_FusedBatchNormEx": Rule(_batch_norm, _kind, (0, None), _refusal, reserved=(5,)),
    "_FusedBatchNormGradEx": Rule(_gradient, _kind, (0, None), _refusal, unread=(5, 6), reserved=(3, 4)),
}

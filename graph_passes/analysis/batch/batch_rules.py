"""The rules of all ops that can work on a piece of the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from graph_passes.analysis.batch import arrangements, products
from graph_passes.analysis.batch.labels import Asked, Rows, Separation, Summed
from graph_passes.graph.ir import boolean, text, texts
from graph_passes.graph.ops import IDENTITIES, IN_PLACE

Rule = Callable[[Asked], Separation]

_GRADIENTS_OF_INPUT = ("Conv2DBackpropInput", "DepthwiseConv2dNativeBackpropInput", "Conv3DBackpropInputV2")
_GRADIENTS_OF_FILTER = ("Conv2DBackpropFilter", "DepthwiseConv2dNativeBackpropFilter", "Conv3DBackpropFilterV2")
_ROWS_OF_INPUT_0 = (
    "Conv2D Conv3D DepthwiseConv2dNative _FusedConv2D _FusedDepthwiseConv2dNative AvgPool AvgPool3D MaxPool MaxPool3D "
    "MaxPoolV2 LRN ResizeBilinear ResizeNearestNeighbor ResizeBicubic ResizeNearestNeighborGrad DepthToSpace "
    "SpaceToDepth"
)
_NOT_ELEMENTWISE = (
    "BiasAdd BiasAddV1 Softmax LogSoftmax FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 FusedBatchNormGrad "
    "FusedBatchNormGradV2 FusedBatchNormGradV3 _FusedBatchNormEx SoftmaxCrossEntropyWithLogits "
    "SparseSoftmaxCrossEntropyWithLogits Select"
)
_MORE_ELEMENTWISE = (
    "Cast Erf Erfc Erfinv Greater GreaterEqual Less LessEqual Equal NotEqual ZerosLike OnesLike ClipByValue Lgamma "
    "Digamma LogicalOr NextAfter TruncateDiv Mod BitwiseAnd BitwiseOr"
)
ELEMENTWISE = (
    IN_PLACE.difference(_NOT_ELEMENTWISE.split()).union(_MORE_ELEMENTWISE.split()).union(IDENTITIES - {"IdentityN"})
)


def elementwise(asked: Asked) -> Separation:
    """Ops of equal or broadcast shapes: each result lies where its operands lie."""
    made = asked.made()
    rank = len(made)
    places = {
        rank - len(asked.sizes(index)) + label.axis for index, label in enumerate(asked.labels) if label is not None
    }
    asked.require(len(places) == 1)
    (place,) = places
    rows = asked.rows(made, place)
    inputs: list[Rows | None] = []
    for index, label in enumerate(asked.labels):
        sizes = asked.sizes(index)
        axis = place - (rank - len(sizes))
        if axis < 0 or sizes[axis] == 1:
            asked.require(label is None)
            inputs.append(None)
            continue
        asked.require(sizes[axis] == made[place])
        inputs.append(Rows(axis, rows.inner))
    return Separation(tuple(inputs), (rows,))


def _first(asked: Asked, *others: int) -> Rows:
    """The rows of input 0, which lie in its first dimension; `others` are read whole."""
    label = asked.labels[0]
    asked.require(label is not None and label.axis == 0)
    asked.whole(*others)
    assert label is not None
    return label


def by_image(asked: Asked) -> Separation:
    """Convolutions, pooling and resizing: input 0 has the examples in its first dimension, the rest is read whole."""
    rest = range(1, len(asked.node.inputs))
    label = _first(asked, *rest)
    fused = texts(asked.node.attrs.get("fused_ops"))
    asked.require(not {"Add", "FusedBatchNorm", "LayerNorm"}.intersection(fused))
    asked.require(asked.made()[0] == asked.sizes(0)[0])
    outputs = [asked.rows(asked.made(index), 0) for index in range(asked.node.outputs)]
    return Separation((label, *(None for _ in rest)), tuple(outputs))


def by_images(asked: Asked) -> Separation:
    """The gradients of pooling: all inputs and the output have the examples in their first dimension."""
    inputs = []
    for index, label in enumerate(asked.labels):
        asked.require(label is None or label.axis == 0)
        inputs.append(asked.rows(asked.sizes(index), 0))
    made = asked.rows(asked.made(), 0)
    asked.require(all(each == made for each in inputs))
    return Separation(tuple(inputs), (made,))


def input_gradient(asked: Asked) -> Separation:
    """A convolution's gradient of its input: (sizes, filter, gradient)."""
    asked.whole(0, 1)
    label = asked.labels[2]
    asked.require(label is not None and label == Rows(0, label.inner))
    made = asked.rows(asked.made(), 0)
    asked.require(made == label and asked.numbers(0)[0] == asked.made()[0])
    return Separation((None, None, label), (made,), ((0, 0, made.inner),))


def filter_gradient(asked: Asked) -> Separation:
    """A convolution's gradient of its filter: (input, sizes, gradient), a sum over the examples."""
    asked.whole(1)
    rows = [asked.rows(asked.sizes(index), 0) for index in (0, 2)]
    asked.require(rows[0] == rows[1] and all(asked.labels[index] in (None, rows[0]) for index in (0, 2)))
    return Separation((rows[0], None, rows[1]), (Summed(),))


def pool_gradient(asked: Asked) -> Separation:
    """AvgPoolGrad: (sizes, gradient)."""
    asked.whole(0)
    label, made = asked.labels[1], asked.rows(asked.made(), 0)
    asked.require(label == made and asked.numbers(0)[0] == asked.made()[0])
    return Separation((None, label), (made,), ((0, 0, made.inner),))


def resize_gradient(asked: Asked) -> Separation:
    """ResizeBilinearGrad and ResizeBicubicGrad: (gradient, original image)."""
    rows = [asked.rows(asked.sizes(index), 0) for index in (0, 1)]
    asked.require(rows[0] == rows[1] == asked.rows(asked.made(), 0))
    asked.require(all(label in (None, rows[0]) for label in asked.labels))
    return Separation(tuple(rows), (rows[0],))


def _channel(asked: Asked, rank: int) -> int:
    return 1 if text(asked.node.attrs.get("data_format")).startswith("NC") else rank - 1


def bias(asked: Asked) -> Separation:
    """BiasAdd: the batch is not the channels."""
    asked.whole(1)
    label = asked.labels[0]
    asked.require(label is not None and label.axis != _channel(asked, len(asked.sizes(0))))
    return Separation((label, None), (label,))


def bias_gradient(asked: Asked) -> Separation:
    """BiasAddGrad: a sum over all dimensions but the channels."""
    label = asked.labels[0]
    asked.require(label is not None and label.axis != _channel(asked, len(asked.sizes(0))))
    return Separation((label,), (Summed(),))


def last_axis(asked: Asked) -> Separation:
    """Softmax and the like: over the last dimension, which the batch is not."""
    label = asked.labels[0]
    asked.whole(*range(1, len(asked.node.inputs)))
    asked.require(label is not None and label.axis < len(asked.sizes(0)) - 1)
    return Separation((label, *(None for _ in asked.node.inputs[1:])), (label,) * asked.node.outputs)


def cross_entropy(asked: Asked) -> Separation:
    """Softmax cross entropy: (logits, labels) by rows."""
    rows = [asked.rows(asked.sizes(index), 0) for index in (0, 1)]
    asked.require(rows[0] == rows[1] and all(label in (None, rows[0]) for label in asked.labels))
    return Separation(tuple(rows), (rows[0], rows[0]))


def select(asked: Asked) -> Separation:
    """Select: as SelectV2, where all shapes are equal."""
    asked.require(len({asked.sizes(index) for index in range(3)}) == 1)
    return elementwise(asked)


def normalised(asked: Asked) -> Separation:
    """Batch norm with given statistics: (input, then what is read whole)."""
    label = asked.labels[0]
    rest = range(1, len(asked.node.inputs))
    asked.whole(*rest)
    asked.require(not boolean(asked.node.attrs["is_training"]) and label is not None)
    asked.require(label is not None and label.axis != _channel(asked, len(asked.sizes(0))))
    asked.require(not any(asked.is_read(index) for index in range(1, asked.node.outputs)))
    return Separation((label, *(None for _ in rest)), (label, *(None for _ in range(1, asked.node.outputs))))


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(_ROWS_OF_INPUT_0.split(), by_image),
    **dict.fromkeys(("MaxPoolGrad", "MaxPool3DGrad", "LRNGrad"), by_images),
    **dict.fromkeys(_GRADIENTS_OF_INPUT, input_gradient),
    **dict.fromkeys(_GRADIENTS_OF_FILTER, filter_gradient),
    **dict.fromkeys(("AvgPoolGrad", "AvgPool3DGrad"), pool_gradient),
    **dict.fromkeys(("ResizeBilinearGrad", "ResizeBicubicGrad"), resize_gradient),
    **dict.fromkeys(("BiasAdd", "BiasAddV1"), bias),
    "BiasAddGrad": bias_gradient,
    **dict.fromkeys(("Softmax", "LogSoftmax", "TopKV2"), last_axis),
    **dict.fromkeys(("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"), cross_entropy),
    "Select": select,
    **dict.fromkeys(("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"), normalised),
    **arrangements.RULES,
    **products.RULES,
}


def separation(asked: Asked) -> Separation:
    """How an op works on a piece of the batch.

    Raises:
        MixesError: it cannot.
    """
    rule = RULES.get(asked.node.op)
    if rule is None:
        raise asked.refused()
    return rule(asked)

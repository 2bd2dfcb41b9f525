"""How many floating-point operations a product or convolution takes: two for each multiplication, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from graph_passes.analysis.cost.device_costs import load
from graph_passes.analysis.cost.model import Roofline, flops
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec

Sizes = tuple[int | None, ...]


def step(op: str, inputs: tuple[Sizes, ...], output: Sizes, **attrs: Any) -> tuple[Graph, Node]:
    given = [TensorId(f"input_{place}") for place in range(len(inputs))]
    node = Node("y", op, given, attrs=attrs, outputs=1)
    specs = {tensor: TensorSpec("float32", 4, shape) for tensor, shape in zip(given, inputs, strict=True)}
    specs[TensorId("y")] = TensorSpec("float32", 4, output)
    return Graph([*(Node(tensor.node, "Placeholder", outputs=1) for tensor in given), node], specs), node


@pytest.mark.parametrize(
    ("op", "inputs", "output", "attrs", "expected"),
    [
        ("MatMul", ((5, 7), (7, 3)), (5, 3), {}, 2 * 5 * 3 * 7),
        ("MatMul", ((7, 5), (7, 3)), (5, 3), {"transpose_a": True}, 2 * 5 * 3 * 7),
        ("MatMul", ((5, 7), (3, 7)), (5, 3), {"transpose_b": True}, 2 * 5 * 3 * 7),
        ("MatMul", ((0, 7), (7, 3)), (0, 3), {}, 0),
        ("_FusedMatMul", ((5, 7), (7, 3), (3,)), (5, 3), {}, 2 * 5 * 3 * 7),
        ("TfmemMatMul", ((7, 5), (7, 3)), (5, 3), {"transpose_a": True}, 2 * 5 * 3 * 7),
        ("BatchMatMulV2", ((4, 2, 5, 7), (4, 2, 7, 3)), (4, 2, 5, 3), {}, 2 * 4 * 2 * 5 * 3 * 7),
        ("BatchMatMul", ((4, 7, 5), (4, 7, 3)), (4, 5, 3), {"adj_x": True}, 2 * 4 * 5 * 3 * 7),
        ("BatchMatMulV3", ((4, 5, 7), (4, 3, 7)), (4, 5, 3), {"adj_y": True}, 2 * 4 * 5 * 3 * 7),
        ("BatchMatMulV2", ((4, 5, 7), (7, 3)), (4, 5, 3), {}, 2 * 4 * 5 * 3 * 7),  # the second is broadcast
        ("BatchMatMulV2", ((4, 1, 5, 7), (2, 7, 3)), (4, 2, 5, 3), {}, 2 * 4 * 2 * 5 * 3 * 7),
        ("_MklFusedBatchMatMulV2", ((4, 5, 7), (4, 7, 3), ()), (4, 5, 3), {}, 2 * 4 * 5 * 3 * 7),
        # attention's scores: [64, 12, 512, 64] x [64, 12, 64, 512]
        (
            "BatchMatMulV2",
            ((64, 12, 512, 64), (64, 12, 64, 512)),
            (64, 12, 512, 512),
            {},
            2 * 64 * 12 * 512 * 512 * 64,  # 2.6e10
        ),
        ("Einsum", ((4, 5, 7), (7, 3)), (4, 5, 3), {"equation": "abc,cd->abd"}, 2 * 4 * 5 * 7 * 3),
        ("Einsum", ((4, 5, 7), (7, 2, 3)), (4, 5, 2, 3), {"equation": "abc,cde->abde"}, 2 * 4 * 5 * 7 * 2 * 3),
        ("Einsum", ((4, 2, 5, 7), (4, 2, 6, 7)), (4, 2, 5, 6), {"equation": "bhqd,bhkd->bhqk"}, 2 * 4 * 2 * 5 * 6 * 7),
        ("Einsum", ((4, 2, 5, 7), (2, 7, 3)), (4, 2, 5, 3), {"equation": "...ij,...jk->...ik"}, 2 * 4 * 2 * 5 * 7 * 3),
        ("Einsum", ((5, 4, 7), (7, 3)), (5, 4, 3), {"equation": "i...j,jk->i...k"}, 2 * 5 * 4 * 7 * 3),
        ("Einsum", ((5, 7),), (7, 5), {"equation": "ab->ba"}, 0),  # nothing is multiplied
        # 8 channels of a 3 x 3 filter over 4, at 6 x 6 pixels of 2 images
        ("Conv2D", ((2, 6, 6, 4), (3, 3, 4, 8)), (2, 6, 6, 8), {}, 2 * 2 * 6 * 6 * 8 * 3 * 3 * 4),
        ("_FusedConv2D", ((2, 6, 6, 4), (3, 3, 4, 8), (8,)), (2, 6, 6, 8), {}, 2 * 2 * 6 * 6 * 8 * 3 * 3 * 4),
        ("Conv2D", ((2, 4, 6, 6), (3, 3, 4, 8)), (2, 8, 6, 6), {"data_format": "NCHW"}, 2 * 2 * 6 * 6 * 8 * 3 * 3 * 4),
        # two groups: each channel reads 2 of the 4
        ("Conv2D", ((2, 6, 6, 4), (3, 3, 2, 8)), (2, 6, 6, 8), {}, 2 * 2 * 6 * 6 * 8 * 3 * 3 * 2),
        # the filter is large and y small: a stride of 2
        ("Conv2DBackpropInput", ((4,), (3, 3, 4, 8), (2, 3, 3, 8)), (2, 6, 6, 4), {}, 2 * 2 * 3 * 3 * 8 * 3 * 3 * 4),
        ("Conv2DBackpropFilter", ((2, 6, 6, 4), (4,), (2, 3, 3, 8)), (3, 3, 4, 8), {}, 2 * 2 * 3 * 3 * 8 * 3 * 3 * 4),
        ("Conv3D", ((2, 5, 6, 6, 4), (2, 3, 3, 4, 8)), (2, 5, 6, 6, 8), {}, 2 * 2 * 5 * 6 * 6 * 8 * 2 * 3 * 3 * 4),
        ("_FusedConv3D", ((2, 5, 6, 6, 4), (2, 3, 3, 4, 8), (8,)), (2, 5, 6, 6, 8), {}, 2 * 360 * 8 * 2 * 3 * 3 * 4),
        (
            "Conv3DBackpropFilterV2",
            ((2, 5, 6, 6, 4), (5,), (2, 5, 6, 6, 8)),
            (2, 3, 3, 4, 8),
            {},
            2 * 2 * 5 * 6 * 6 * 8 * 2 * 3 * 3 * 4,
        ),
        # each of 4 x 2 channels reads one
        ("DepthwiseConv2dNative", ((2, 6, 6, 4), (3, 3, 4, 2)), (2, 6, 6, 8), {}, 2 * 2 * 6 * 6 * 8 * 3 * 3),
        ("_FusedDepthwiseConv2dNative", ((2, 6, 6, 4), (3, 3, 4, 2), (8,)), (2, 6, 6, 8), {}, 2 * 2 * 6 * 6 * 8 * 9),
        (
            "DepthwiseConv2dNativeBackpropFilter",
            ((2, 6, 6, 4), (4,), (2, 6, 6, 8)),
            (3, 3, 4, 2),
            {},
            2 * 2 * 6 * 6 * 8 * 3 * 3,
        ),
        (
            "DepthwiseConv2dNativeBackpropInput",
            ((4,), (3, 3, 4, 2), (2, 6, 6, 8)),
            (2, 6, 6, 4),
            {},
            2 * 2 * 6 * 6 * 8 * 3 * 3,
        ),
        ("Relu", ((5, 7), (5, 7)), (5, 7), {}, 0),
        ("BatchMatMulV2", ((None, 5, 7), (None, 7, 3)), (None, 5, 3), {}, 0),
        ("Einsum", ((None, 5), (5, 3)), (4, 3), {"equation": "ab,bc->ac"}, 0),
        ("MatMul", ((None, 7), (7, 3)), (5, 3), {}, 0),
    ],
)
def test_by_hand(op: str, inputs: tuple[Sizes, ...], output: Sizes, attrs: dict[str, Any], expected: int) -> None:
    assert flops(*step(op, inputs, output, **attrs)) == expected


def test_a_batched_product_takes_the_time_of_its_products_one_by_one() -> None:
    device = load("unit")  # 1 flop/s, 1 byte/s, no launch
    together = Roofline(device).seconds(*step("BatchMatMulV2", ((6, 5, 700), (6, 700, 3)), (6, 5, 3)))
    alone = Roofline(device).seconds(*step("MatMul", ((5, 700), (700, 3)), (5, 3)))
    assert together == pytest.approx(6 * alone)

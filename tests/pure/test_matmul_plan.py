"""Which products go to tensor cores, and what then stands in their place."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from custom_ops.jit.image import KernelImage
from custom_ops.jit.matmul import LARGE, SMALL, Shape, Tiling, best_tiling, tilings
from graph_passes.ir import Code, DataType, Graph, Node, TensorId, TensorSpec
from graph_passes.matmul.apply import MATMUL_OP, apply_products
from graph_passes.matmul.plan import plan_products, worth_it

Dims = tuple[int | None, ...] | None


def graph(left: Dims = (None, 512), right: Dims = (512, 2048), dtype: str = "float32", **attrs: Any) -> Graph:
    """x @ w, with a bias if something is fused; somebody reads it, and somebody waits for it."""
    fused = "fused_ops" in attrs
    inputs = [TensorId(name) for name in ("x", "w", *(("bias",) if fused else ()))]
    attrs = {"T": DataType(dtype), "transpose_a": False, "transpose_b": False} | attrs
    nodes = [Node(name, "Placeholder", outputs=1) for name in ("x", "w", "bias", "before")]
    nodes += [
        Node("product", "_FusedMatMul" if fused else "MatMul", inputs, ["before"], "/device:GPU:0", attrs, outputs=1),
        Node("reader", "Tanh", [TensorId("product")], outputs=1),
        Node("waiting", "NoOp", [], ["product"]),
    ]
    shapes = {"x": left, "w": right, "bias": (2048,), "product": (None, 2048)}
    specs = {TensorId(name): TensorSpec(dtype, 4, shape) for name, shape in shapes.items()}
    return Graph(nodes, specs)


@pytest.mark.parametrize(
    ("made", "found"),
    [
        (graph(), True),
        (graph(fused_ops=("BiasAdd",)), True),
        (graph(fused_ops=("BiasAdd", "Relu")), False),
        (graph(dtype="float64"), False),
        (graph(left=None), False),
        (graph(right=None), False),
        (graph(right=(512, None)), True),  # sizes that nobody knows count as 512
        (graph(right=(512, 100)), False),
        (graph(left=(None, 64), right=(64, 256)), False),
        (graph(left=(20, 512)), False),  # so few rows that cuBLAS is faster
        (graph(left=(512, 20), transpose_a=True), False),
        (graph(left=(512, 100), transpose_a=True), True),
        (graph(left=(4000, 4000), right=(4000, 20)), False),  # so few columns
        (graph(left=(None, 512), right=(None, 2048), transpose_a=True), True),
        (graph(left=(None, 512), right=(2048, 512), transpose_b=True), True),
        (graph(left=(None, 2048), right=(512, 2048), transpose_b=True), True),
    ],
)
def test_large_products_of_float32_are_found(made: Graph, found: bool) -> None:
    assert plan_products(made, ["product", "reader", "no such node"]) == (("product",) if found else ())


def test_others_than_those_asked_for_stay() -> None:
    assert plan_products(graph(), []) == ()


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "wins"),
    [  # as measured on an H200
        (6400, 1024, 4096, True),
        (1000, 256, 768, True),
        (6400, 128, 384, True),
        (100, 512, 1536, True),
        (6400, 64, 256, False),
        (1000, 128, 512, False),
        (100, 256, 1024, False),
        (64, 2048, 8192, False),
        (100, 2048, 512, True),
        (100, 4096, 1024, True),
        (100, 1024, 256, False),
        (1024, 6400, 4096, True),
        (512, 2000, 2048, True),
        (512, 100, 2048, False),
        (256, 6400, 1024, True),
        (256, 1000, 1024, True),
        (256, 100, 1024, False),
    ],
)
def test_which_products_win(rows: int, depth: int, columns: int, wins: bool) -> None:
    assert worth_it(rows, depth, columns) == wins


@pytest.mark.parametrize("fused", [False, True])
def test_a_product_is_replaced_with_all_its_edges(fused: bool) -> None:
    made = graph(transpose_b=True, **({"fused_ops": ("BiasAdd",)} if fused else {}))
    images = [KernelImage(90, name, 128, f"code of {name}".encode()) for name in ("split", "large", "small")]
    apply_products(made, ["product"], images)
    assert "product" not in made.nodes
    new = made[made["reader"].inputs[0].node]
    assert (new.op, new.device, new.control) == (MATMUL_OP, "/device:GPU:0", ["before"])
    assert [tensor.node for tensor in new.inputs] == ["x", "w", *(["bias"] if fused else [])]
    assert new.attrs == {
        "num_args": int(fused),
        "transpose_a": False,
        "transpose_b": True,
        "programs": tuple(image.to_text() for image in images),
        "images": tuple(Code(image.code) for image in images),
    }
    assert made["waiting"].control == [new.name]
    assert made.specs[TensorId(new.name)].shape == (None, 2048)


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "tiling"),
    [
        (100, 1024, 4096, Tiling(small=True, parts=1)),  # 32 large tiles for 132 multiprocessors, 128 small ones
        (1000, 1024, 2048, Tiling(small=False, parts=1)),  # 128 large tiles
        (6400, 1024, 4096, Tiling(small=False, parts=1)),
        (100, 4096, 1024, Tiling(small=True, parts=8)),  # 32 small tiles
        (1000, 4096, 1024, Tiling(small=False, parts=2)),  # 64 large ones
        (256, 6400, 1024, Tiling(small=False, parts=8)),  # 16 large ones
    ],
)
def test_as_many_blocks_as_there_are_multiprocessors(rows: int, depth: int, columns: int, tiling: Tiling) -> None:
    """What was the fastest on an H200, or within 5% of it, of all tilings."""
    assert best_tiling(Shape(rows, depth, columns), processors=132) == tiling


@given(
    rows=st.integers(1, 5000), depth=st.integers(0, 9000), columns=st.integers(1, 5000), processors=st.integers(1, 200)
)
def test_each_part_has_some_of_the_depth_and_room_for_its_sums(
    rows: int, depth: int, columns: int, processors: int
) -> None:
    shape = Shape(rows, depth, columns)
    found = list(tilings(shape, processors))
    assert {tiling for tiling in found if tiling.parts == 1} == {Tiling(False, 1), Tiling(True, 1)}
    pairs = shape.lines // 2
    for tiling in found:
        assert tiling.parts == 1 or -(-pairs // tiling.parts) * (tiling.parts - 1) < pairs
        assert tiling.sums_bytes(shape) <= 2 * processors * tiling.tile**2 * 4


def test_what_a_product_needs() -> None:
    shape = Shape(rows=3, depth=65, columns=5)
    assert shape.lines == 4  # of 32 numbers, an even number of them
    assert Tiling(small=True, parts=1).memory_bytes(shape) == (3 + 5) * (4 * 128 + 4) + 4
    assert Tiling(small=True, parts=2).memory_bytes(shape) == (3 + 5) * (4 * 128 + 4) + 2 * 64 * 64 * 4 + 4
    assert (shape.tiles(128), Shape(129, 1, 257).tiles(128)) == (1, 6)
    assert (LARGE.shared, SMALL.shared) == (96 << 10, 64 << 10)

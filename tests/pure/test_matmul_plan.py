"""Which products go to tensor cores, and what then stands in their place."""

from __future__ import annotations

from typing import Any

import pytest

from custom_ops.errors import KernelError
from custom_ops.jit.image import KernelImage
from graph_passes.analysis.cost.device_costs import product_sizes
from graph_passes.graph.ir import Code, DataType, Graph, Node, TensorId, TensorSpec
from graph_passes.graph.rewrite import apply_rewrites
from graph_passes.passes.products.apply import MATMUL_OP, product_rewrites
from graph_passes.passes.products.plan import Needs, ProductPlan, plan_products, products, worth_it
from graph_passes.refusals import Reason
from tests.float_graphs import Given

Dims = tuple[int | None, ...] | None

SIZES = product_sizes("h200")


def graph(left: Dims = (None, 512), right: Dims = (512, 2048), dtype: str = "float32", **attrs: Any) -> Graph:
    """x @ w, with a bias if something is fused; one op reads it, and one waits for it."""
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
        (graph(right=(512, None)), True),  # unknown sizes count as 512
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
    assert products(made, ["product", "reader", "no such node"], SIZES) == (("product",) if found else ())


def test_others_than_those_asked_for_stay() -> None:
    assert products(graph(), [], SIZES) == ()


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
    assert worth_it(rows, depth, columns, SIZES) == wins


@pytest.mark.parametrize("fused", [False, True])
def test_a_product_is_replaced_with_all_its_edges(fused: bool) -> None:
    made = graph(transpose_b=True, **({"fused_ops": ("BiasAdd",)} if fused else {}))
    images = tuple(KernelImage(90, name, 128, f"code of {name}".encode()) for name in ("split", "large", "small"))
    apply_rewrites(product_rewrites(ProductPlan(("product",), images), made), made)
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


def test_products_for_which_no_kernels_can_be_made_stay() -> None:
    def fails() -> list[KernelImage]:
        raise KernelError("no compiler")

    plan, found = plan_products(Given(graph()), Needs(["product"], SIZES, fails))
    assert plan == ProductPlan(("product",), reason=Reason.PRODUCT_KERNELS(detail="no compiler"))
    assert product_rewrites(plan, found) == []
    assert "no kernels for this device: no compiler" in plan.note

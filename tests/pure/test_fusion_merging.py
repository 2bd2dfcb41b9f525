"""Which large products of one operand become one, and what the graph is then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from custom_ops.jit.cublas import MatrixProduct
from graph_passes.analysis.cost.kernel_costs import Small
from graph_passes.graph.ir import Graph, TensorId, TensorSpec, boolean
from graph_passes.graph.order import topological
from graph_passes.graph.rewrite import apply_rewrites
from graph_passes.passes.merge.apply import merge_rewrites
from graph_passes.passes.merge.plan import LEAST, Group, Needs, plan_merge
from tests.float_graphs import Build, Given
from tests.fusion_graphs import UNIT

ROWS, SIZE = 8, 4
NAMES = ("q", "k", "v")


def apart_is_slower(forms: Sequence[MatrixProduct]) -> float:
    """Products of any size take their time also beside each other: more than a copy takes here."""
    return 1e4 * len(forms)


NONE = Small(0, 0)


def needs(beside: Any = apart_is_slower, small: Small | None = NONE, **other: Any) -> Needs:
    return Needs(replace(UNIT, most=small), beside, **other)


def planned(b: Build, given: Needs | None = None) -> tuple[list[tuple[Group, ...]], Graph]:
    plan, graph = plan_merge(Given(b.graph().copy()), given or needs())
    apply_rewrites(merge_rewrites(plan, graph), graph)
    topological(graph)
    return list(plan.families), graph


def forward(*, op: str = "MatMul", **attrs: Any) -> Build:
    """Queries, keys and values of x."""
    b = Build()
    b("x", "Placeholder", (ROWS, SIZE))
    for name in NAMES:
        b(f"w{name}", "Placeholder", (SIZE, SIZE))
        b(name, op, (ROWS, SIZE), "x", f"w{name}", **{"transpose_a": False, "transpose_b": False, **attrs})
        b(f"{name}_read", "Relu", (ROWS, SIZE), name)
    b("out", "AddN", (ROWS, SIZE), *(f"{name}_read" for name in NAMES))
    return b


def trained(rest: bool = True) -> Build:
    """The layers with gradients, as an attention's projections have them: the operand is three-dimensional."""
    b = Build()
    b("x", "Placeholder", (2, ROWS // 2, SIZE))
    for name in NAMES:
        b(f"w{name}", "Placeholder", (SIZE, SIZE))
        b(f"x_{name}", "Reshape", (ROWS, SIZE), "x", b.axes(f"flat_{name}", ROWS, SIZE))
        b(name, "MatMul", (ROWS, SIZE), f"x_{name}", f"w{name}", transpose_a=False, transpose_b=False)
        b(f"d{name}", "Tanh", (ROWS, SIZE), name)
    b("residual", "Relu", (2, ROWS // 2, SIZE), "x")
    parts = []
    for name in reversed(NAMES):
        b(f"{name}_to_x", "MatMul", (ROWS, SIZE), f"d{name}", f"w{name}", transpose_a=False, transpose_b=True)
        shape = b.axes(f"whole_{name}", 2, ROWS // 2, SIZE)
        parts.append(b(f"{name}_to_x_whole", "Reshape", (2, ROWS // 2, SIZE), f"{name}_to_x", shape))
        b(f"{name}_to_w", "MatMul", (SIZE, SIZE), f"x_{name}", f"d{name}", transpose_a=True, transpose_b=False)
        b(f"{name}_update", "Relu", (SIZE, SIZE), f"{name}_to_w")
    b("dx", "AddN", (2, ROWS // 2, SIZE), *parts, *(["residual"] if rest else []))
    b("out", "Tanh", (2, ROWS // 2, SIZE), "dx")
    return b


def valued(graph: Graph, wanted: Sequence[str]) -> list[Any]:
    """Values of nodes, in NumPy; placeholders have numbers by their names."""
    found: dict[str, Any] = {}
    for name in topological(graph):
        node = graph[name]
        given = [found[tensor.node] for tensor in node.inputs]
        shape = graph.sizes(TensorId(name))
        if node.op == "Placeholder":
            found[name] = np.random.default_rng(sum(map(ord, name))).normal(size=shape)
        elif node.op == "Const":
            literal = node.attrs.get("value")
            found[name] = np.reshape(literal.values, literal.shape) if literal else graph.constants[name]
        elif node.op == "Reshape":
            found[name] = given[0].reshape(given[1])
        elif node.op in ("MatMul", "_FusedMatMul"):
            flags = (boolean(node.attrs[flag]) for flag in ("transpose_a", "transpose_b"))
            left, right = (matrix.T if flag else matrix for matrix, flag in zip(given, flags, strict=False))
            found[name] = left @ right + sum(given[2:])
        elif node.op == "ConcatV2":
            found[name] = np.concatenate(given[:-1], int(given[-1]))
        elif node.op == "Slice":
            ends = [slice(begin, begin + size) for begin, size in zip(given[1], given[2], strict=True)]
            found[name] = given[0][tuple(ends)]
        else:
            ops = {"AddN": sum, "BiasAdd": sum, "Relu": lambda x: np.maximum(*x, 0), "Tanh": lambda x: np.tanh(*x)}
            found[name] = ops[node.op](given)
    return [found[name] for name in wanted]


def products(graph: Graph) -> list[str]:
    return [node.name for node in graph if node.op in ("MatMul", "_FusedMatMul")]


def same(b: Build, graph: Graph, *wanted: str) -> None:
    for one, other in zip(valued(b.graph(), wanted), valued(graph, wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_queries_keys_and_values_are_one_product():
    b = forward()
    ((group,),), graph = planned(b)
    assert sorted(group.products) == sorted(NAMES)
    assert group.merged == replace(group.apart[0], columns=3 * SIZE)
    assert len(products(graph)) == 1
    assert not set(NAMES) & set(graph.nodes)
    same(b, graph, "out")


@pytest.mark.parametrize("rest", [True, False])
def test_gradients_share_what_is_put_side_by_side(rest):
    b = trained(rest)
    (family,), graph = planned(b)
    assert [(len(group.products), bool(group.total)) for group in family] == [(3, True), (3, False), (3, False)]
    assert len(products(graph)) == 3
    assert sum(node.op == "ConcatV2" for node in graph) == 2  # of weights, and of gradients
    assert sum(node.op == "AddN" for node in graph) == rest
    same(b, graph, "out", *(f"{name}_update" for name in NAMES))


def test_equal_layers_are_timed_once():
    b = forward()
    b("y", "Placeholder", (ROWS, SIZE))
    for name in NAMES:
        b(f"u{name}", "Placeholder", (SIZE, SIZE))
        b(f"y{name}", "MatMul", (ROWS, SIZE), "y", f"u{name}", transpose_a=False, transpose_b=False)
        b(f"y{name}_read", "Relu", (ROWS, SIZE), f"y{name}")
    asked = []

    def beside(forms: Sequence[MatrixProduct]) -> float:
        asked.append(tuple(forms))
        return apart_is_slower(forms)

    families, _ = planned(b, needs(beside))
    assert len(families) == 2
    assert len(asked) == len(set(asked)) == 2


def test_weights_may_be_transposed():
    b = forward(transpose_b=True)
    _, graph = planned(b)
    (joined,) = (node for node in graph if node.op == "ConcatV2")
    assert graph[joined.inputs[-1].node].attrs["value"].values == (0,)
    same(b, graph, "out")


def test_biases_are_added_to_the_parts():
    b = Build()
    b("x", "Placeholder", (ROWS, SIZE))
    for name in NAMES:
        b(f"w{name}", "Placeholder", (SIZE, SIZE))
        b(f"b{name}", "Placeholder", (SIZE,))
        flags = {"transpose_a": False, "transpose_b": False, "fused_ops": ("BiasAdd",)}
        b(name, "_FusedMatMul", (ROWS, SIZE), "x", f"w{name}", f"b{name}", **flags)
    b("out", "AddN", (ROWS, SIZE), *NAMES)
    _, graph = planned(b)
    assert sum(node.op == "BiasAdd" for node in graph) == 3
    assert len(products(graph)) == 1
    same(b, graph, "out")


def test_products_that_wait_for_each_other_stay_apart():
    b = Build()
    b("x", "Placeholder", (SIZE, SIZE))
    b("w", "Placeholder", (SIZE, SIZE))
    b("one", "MatMul", (SIZE, SIZE), "x", "w", transpose_a=False, transpose_b=False)
    b("between", "Relu", (SIZE, SIZE), "one")
    b("other", "MatMul", (SIZE, SIZE), "x", "between", transpose_a=False, transpose_b=False)
    b("out", "Relu", (SIZE, SIZE), "other")
    families, graph = planned(b)
    assert families == []
    assert len(products(graph)) == 2


def test_a_product_that_is_there_twice_is_joined_once():
    b = forward()
    b("again", "MatMul", (ROWS, SIZE), "x", "wq", transpose_a=False, transpose_b=False)
    b("more", "Relu", (ROWS, SIZE), "again")
    ((group,),), graph = planned(b)
    assert len(group.products) == 3
    assert len({"q", "again"} - set(group.products)) == 1
    assert len(products(graph)) == 2
    same(b, graph, "out", "more")


def test_a_product_that_is_added_up_is_in_no_other_group():
    b = trained()
    b("wz", "Placeholder", (SIZE, SIZE))
    b("z", "MatMul", (ROWS, SIZE), "dq", "wz", transpose_a=False, transpose_b=True)  # of the operand of q_to_x
    b("z_read", "Relu", (ROWS, SIZE), "z")
    families, graph = planned(b)
    products = [name for family in families for group in family for name in group.products]
    assert len(products) == len(set(products)) == 9
    assert "z" in graph.nodes
    same(b, graph, "out", "z_read", *(f"{name}_update" for name in NAMES))


def on_devices(b: Build) -> Build:
    for number, name in enumerate(NAMES):
        for node in b.nodes:
            if node.name.startswith(name):
                node.device = f"/device:GPU:{number}"
    return b


def unknown_rows() -> Build:
    b = forward()
    b.specs |= {TensorId(name): TensorSpec("float32", 4, (None, SIZE)) for name in ("x", *NAMES)}
    return b


def waited_for() -> Build:
    b = forward()
    for node in b.nodes:
        if node.name in NAMES:
            node.control.append("x")
    return b


@pytest.mark.parametrize(
    ("b", "given"),
    [
        (forward(), needs(beside=None)),
        (forward(), needs(small=None)),
        (forward(), needs(small=Small(1 << 20, 1 << 20))),
        (forward(), needs(whole=False)),
        (forward(), needs(beside=lambda forms: None)),
        (forward(), needs(beside=lambda forms: 1.0)),
        (unknown_rows(), needs()),
        (waited_for(), needs()),
        (forward(op="_FusedMatMul", fused_ops=("Relu",)), needs()),
        (on_devices(forward()), needs()),
    ],
    ids=["untimed", "unbound", "small", "parts", "unmeasured", "no faster", "rows", "control", "activation", "devices"],
)
def test_others_stay(b: Build, given: Needs):
    families, graph = planned(b, given)
    assert families == []
    assert len(products(graph)) == 3


@pytest.mark.parametrize(("more", "merged"), [(-1.0, 0), (1.0, 1)])
def test_a_copy_of_weights_counts(more, merged):
    """A byte takes a second here: 192 to read and 192 to write; and times scatter."""
    apart = (1.0 + 2 * 3 * SIZE * SIZE * 4 + more) / (1 - LEAST)
    families, _ = planned(forward(), needs(beside=lambda forms: apart if len(forms) > 1 else 1.0))
    assert len(families) == merged


def test_the_groups_of_a_family_are_chosen_by_what_they_save():
    """What kernels make is no copy, so that the gradients of weights are merged where nothing else is."""

    def beside(forms: Sequence[MatrixProduct]) -> float:
        return 1e5 if len(forms) > 1 and forms[0].left_transposed else 1.0

    b = trained()
    ((group,),), graph = planned(b, needs(beside=beside))
    assert sorted(group.products) == ["k_to_w", "q_to_w", "v_to_w"]
    assert len(products(graph)) == 7
    same(b, graph, "out", *(f"{name}_update" for name in NAMES))

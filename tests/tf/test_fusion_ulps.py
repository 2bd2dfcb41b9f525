"""Elementwise ops on a CPU are as near to TensorFlow's as docs/benchmarks_elementwise_cpu.md says."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from benchmarks.fusion import ulps
from benchmarks.records import ROOT
from custom_ops.expr.table import TABLE
from graph_passes.lower.elementwise import RULES as ARITHMETIC
from graph_passes.lower.gradients import RULES as GRADIENTS

RESULTS = ROOT / "benchmarks" / "results" / "fusion_ulps_cpu.json"
# Results that are no floating point numbers, or that only choose among their arguments or convert one.
OTHERS = {
    *("Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual", "IsNan", "IsInf", "IsFinite"),
    *("LogicalAnd", "LogicalOr", "LogicalNot", "LogicalXor", "Select", "SelectV2", "ClipByValue", "Cast"),
    *(
        "Add",
        "AddN",
        "BiasAdd",
        "BiasAddV1",
        "Div",
        "Inv",
        "InvGrad",
    ),  # other names for what is there, or several of it
    *("FloorMod", "TruncateDiv", "_UnaryOpsComposition"),
}
EXACT = {
    *("Abs", "Neg", "Sign", "Square", "Sqrt", "Floor", "Ceil", "Rint", "Round", "AddV2", "Sub", "Mul", "RealDiv"),
    *("Maximum", "Minimum", "SquaredDifference", "MulNoNan", "DivNoNan", "Xdivy", "FloorDiv", "Relu", "Relu6"),
    *("LeakyRelu", "Softsign", "ReluGrad", "Relu6Grad", "LeakyReluGrad", "EluGrad", "SeluGrad", "SoftsignGrad"),
    *("SigmoidGrad", "TanhGrad", "ReciprocalGrad", "SqrtGrad", "RsqrtGrad"),
}
COUNT = 4096


@pytest.fixture(scope="module", params=ulps.DTYPES)
def measured(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return request.param, ulps.measured(request.param, COUNT)


def test_every_op_that_a_region_computes_is_measured() -> None:
    assert set(ulps.OPS) == {*ARITHMETIC, *GRADIENTS} - OTHERS


def test_what_is_exact_is_tensorflows_to_the_bit(measured: tuple[str, dict[str, Any]]) -> None:
    _, found = measured
    for name in EXACT & set(found):
        for of in ("normal", "special"):
            case = found[name][of]
            assert (case["differ"], case["signs"], case["nonfinite"]) == (0, 0, 0), (name, of, case)


def test_zeros_have_tensorflows_signs(measured: tuple[str, dict[str, Any]]) -> None:
    _, found = measured
    assert {name: case["special"]["signs"] for name, case in found.items() if case["special"]["signs"]} == {}


def test_the_others_are_as_near_to_the_exact_value(measured: tuple[str, dict[str, Any]]) -> None:
    """Half types are rounded once; of the others the bounds are the table's."""
    dtype, found = measured
    assert len(found) >= len(ulps.OPS) - len(ulps.WITHOUT_HALF)
    bounds = {name: op.ulps for op in TABLE.values() for name in op.tf_ops}
    for name in set(found) - EXACT - {"SoftplusGrad", "Xlogy"}:  # in several ops, as TensorFlow's
        case = found[name]["normal"]
        if "ours" in case:
            bound = 0.51 if dtype not in ulps.FULL else max(bounds[name], 2.5)
            assert case["ours"] <= bound, (name, case)


def test_near_0_elu_and_selu_keep_their_digits(measured: tuple[str, dict[str, Any]]) -> None:
    """TensorFlow's kernels subtract 1 from exp(x), of which little is left."""
    _, found = measured
    for name in ("Elu", "Selu"):
        assert found[name]["normal"]["ours"] <= 2
        assert found[name]["normal"]["theirs"] > 50


def test_units_in_the_last_place() -> None:
    one, above = np.float32([1, -1, 0.0, np.nan, np.inf]), np.float32([1, -1, -0.0, np.nan, 1])
    above[0] = np.nextafter(np.float32(1), np.float32(2))
    found = ulps.compared("float32", one, above, np.float64([1 + 2.0**-24, -1, 0, 0, 0]))
    assert found == {"differ": 2, "ulps": 1, "signs": 1, "nonfinite": 1, "ours": 0.5, "theirs": 0.5}


def test_the_table_of_the_page_is_that_of_the_results() -> None:
    tables = ulps.tables(json.loads(RESULTS.read_text()))
    assert tables in (ROOT / "docs" / "benchmarks_elementwise_cpu.md").read_text()

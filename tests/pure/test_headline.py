"""The first line of a report, and what became of a layer or an op."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graph_passes.decision import Decision, Fusion
from graph_passes.errors import GraphError
from graph_passes.fates import explain
from graph_passes.names import plain, spoken, suffix_of
from graph_passes.report import RECOMPUTED, RegionRecord, Report, Span, SplitRecord, StepRecord, TransferRecord
from graph_passes.verdict import Verdict, rated_by

GIB = 1 << 30


def record(tensor: str, nbytes: int = GIB, after: str = "a") -> TransferRecord:
    return TransferRecord(tensor, nbytes, after, "released", "prefetched", "used")


REPORT = Report(
    graph="resnet50.fit",
    device="NVIDIA H100",
    policy="optimal",
    decision=Decision.MOVED,
    budget=8 * GIB,
    peak_before=int(14.9 * GIB),
    peak_predicted=int(7.6 * GIB),
    transfers=(
        record("resnet50_1/conv1_1/Relu:0"),
        record("resnet50_1/conv1_1/BiasAdd:0", after=RECOMPUTED),
        record("resnet50_1/conv2_1/Relu:0", after=RECOMPUTED),
    ),
    verdict=Verdict(fits=False, seconds_unlimited=1.0, seconds=1.12, smallest_budget=GIB, op="resnet50_1/conv2_1/Relu"),
    curve_before=(("resnet50_1/conv1_1/Relu", 1), ("resnet50_1/conv3_1/Relu", 2)),
    scopes=("resnet50_1/conv1_1", "resnet50_1/conv3_1"),
    scope_suffix="_1",
    stalls=(("resnet50_1/conv1_1/Relu:0", 1_200_000),),
    spans=(Span("compute", "a", 0, 5), Span("out", "x:0", 5, 9)),
)


MOVED = "`resnet50.fit`: fits 8.0 GiB: peak 7.6 instead of 14.9 GiB, 12% slower by prediction; "
MOVED += "1 tensor offloaded, 2 recomputed"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, MOVED),
        ({"transfers": (), "decision": Decision.FITS}, "`resnet50.fit`: fits 8.0 GiB unchanged: peak 7.6 GiB"),
        (
            {"transfers": (), "decision": Decision.ORDERED, "peak_measured": 7 * GIB},
            "`resnet50.fit`: fits 8.0 GiB in the planned order: peak 7.0 GiB",
        ),
        (
            {"verdict": Verdict(fits=False, seconds_unlimited=1.0, seconds=3.5)},
            MOVED.replace("12% slower", "3.5 times as long"),
        ),
        ({"step_measured_ns": 1_050_000_000}, MOVED.replace("12% slower by prediction", "5% slower")),
        ({"step_measured_ns": 990_000_000}, MOVED.replace("12% slower by prediction", "as fast")),
        ({"step_measured_ns": 500_000_000}, MOVED.replace("12% slower by prediction", "2.00 times as fast")),
        (
            {"step_predicted_ns": 1_120_000_000, "step_measured_ns": 2_000_000_000},
            MOVED.replace("by prediction", "by prediction (1.12 s a step, 2 s measured)"),
        ),
        (
            {"peak_measured": 9 * GIB},
            "`resnet50.fit`: OVER BUDGET: peak 9.0 GiB, the budget is 8.0 GiB; 1 tensor offloaded, 2 recomputed",
        ),
        (
            {"transfers": (), "budget": None, "decision": Decision.NO_BUDGET},
            "`resnet50.fit`: no memory budget; nothing was changed",
        ),
        (
            {"transfers": (), "budget": None, "decision": Decision.REPLACED, "replaced": ("an LSTM",)},
            "`resnet50.fit`: no memory budget; 1 recurrent layer replaced",
        ),
        (
            {"transfers": (), "decision": Decision.FAILED},
            "`resnet50.fit`: planning failed; the unmodified step runs",
        ),
    ],
)
def test_the_first_line_is_the_verdict(changes: dict[str, object], line: str) -> None:
    report = replace(REPORT, **changes)  # type: ignore[arg-type]
    assert report.headline == line
    first = report.to_text().replace("\n  ", " ", 1) if len(line) > 100 else report.to_text()
    assert first.startswith(line)
    assert explain(report) == line


def test_a_page_says_what_was_asked_done_and_not_done_in_this_order() -> None:
    region = RegionRecord("fusion_0", (StepRecord("kernel", (("resnet50_1/conv1_1/Relu", "Relu"),)),))
    full = replace(
        REPORT,
        regions=(region,),
        fusion="stitched",
        fusion_state=Fusion.STITCHED,
        not_replaced=("rnn: a reason",),
        notes=("a note",),
        others=(replace(REPORT, graph="resnet50.evaluate"),),
    )
    text = full.to_text()
    places = [text.index(f"\n{title}\n") for title in ("asked", "done", "not done", "details", "notes")]
    assert places == sorted(places)
    assert "resnet50/conv1/Relu:0  1.2 ms" in text
    assert "at op 'resnet50/conv2/Relu'" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100
    assert "1 region fused" in text
    assert Report.from_json(full.to_json()) == full


def test_what_stays_in_memory_is_told_once_for_each_reason_and_in_the_users_names() -> None:
    stays = [(f"tfmem/split_0/{piece}/resnet50_1/pool_1/MaxPool2d:0", "a reason") for piece in range(4)]
    split = SplitRecord(3, 0, "resnet50_1/conv3_1/Relu", "resnet50_1/conv3_1/Add", (2, 2), "equal")
    stays.append(("resnet50_1/pool_1/MaxPool2d:0", "another"))
    report = replace(REPORT, notes=("a note",), not_moved=tuple(stays), splits=(split,))
    assert Report.from_json(report.to_json()) == report
    text = report.to_text()
    done, kept = text.index("\nnot done\n"), text.index("\ndetails\n")
    assert text[done:kept].splitlines()[2:] == [
        "  not moved   'piece 1/resnet50/pool/MaxPool2d:0' and 3 more: a reason",
        "  not moved   'resnet50/pool/MaxPool2d:0': another",
    ]
    assert text.endswith("\nnotes\n  note: a note")
    assert "  split       3 ops from 'resnet50/conv3/Relu' to 'resnet50/conv3/Add', in 2 pieces of 2 examples" in text


def test_the_fate_of_a_layer_and_of_an_op() -> None:
    assert explain(REPORT, "conv1") == (
        "layer 'conv1': 1 tensor offloaded (1.0 GiB), the step waits 1.2 ms for them, 1 tensor recomputed (1.0 GiB)."
    )
    assert explain(REPORT, "conv3") == "layer 'conv3': nothing was changed."
    assert explain(REPORT, "resnet50/conv2/Relu:0") == (
        "'resnet50/conv2/Relu:0' (1.0 GiB) is freed before 'released' and recomputed before 'used'."
    )
    assert "comes back from before 'prefetched' on for 'used', which waits 1.2 ms" in explain(
        REPORT, "resnet50_1/conv1_1/Relu"
    )
    replaced = replace(REPORT, replaced_layers=("net/lstm/while",), kept_layers=(("net/gru/while", "a reason"),))
    assert explain(replaced, "lstm") == "recurrent layer 'lstm' is replaced by one op."
    assert explain(replaced, "gru") == "recurrent layer 'gru' is not replaced: a reason."
    with pytest.raises(GraphError, match="names no layer and no changed op 'conv9'; there are: conv"):
        explain(REPORT, "conv9")


@pytest.mark.parametrize(
    "changes",
    [
        {"replaced_layers": ("net_1/lstm_1/while",), "replaced": ("net_1/lstm_1/while (While): 8 units",)},
        {"kept_layers": (("net_1/lstm_1/while", "a reason"),), "not_replaced": ("net_1/lstm_1/while (While): why",)},
        {"regions": (RegionRecord("fusion_0", (StepRecord("kernel", (("net_1/lstm_1/Tanh", "Tanh"),)),)),)},
        {"not_stitched": (("net_1/lstm_1/Tanh", "a reason"),)},
    ],
)
def test_layers_have_the_users_names_where_no_memory_was_planned(changes: dict[str, object]) -> None:
    found = Report("net.fit", "CPU", "none", Decision.REPLACED, 0, 0, **changes)  # type: ignore[arg-type]
    found = replace(found, scope_suffix=suffix_of("net", found.named_ops()))
    assert found.scope_suffix == "_1"
    assert "lstm_1" not in found.to_text()
    assert ("net/lstm/while (While): " in found.to_text()) is ("replaced" in str(changes))
    if found.replaced_layers or found.kept_layers:
        with pytest.raises(GraphError, match=r"no changed op 'lst'; there are: lstm$"):
            explain(found, "lst")


def test_the_fate_of_a_layer_that_runs_in_pieces() -> None:
    record = SplitRecord(3, 0, "resnet50_1/conv3_1/Relu", "resnet50_1/conv3_1/Add", (2, 2), "equal")
    scopes = (*REPORT.scopes, "tfmem/split_0/1/resnet50_1/conv3_1")
    split = replace(REPORT, splits=(record,), scopes=scopes)
    assert explain(split, "conv3") == "layer 'conv3': runs in 2 pieces along the batch."
    assert plain("tfmem/split_0/1/resnet50_1/conv3_1/Relu:0", "_1") == "piece 2/resnet50/conv3/Relu:0"
    assert suffix_of("resnet50", ["tfmem/split_0/1/resnet50_1/conv3_1/Relu"]) == "_1"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("__inference_train_23", "train"),
        ("__inference_step_2_23", "step_2"),
        ("__inference_signature_wrapper_serve_4", "serve"),
        ("train", "train"),
    ],
)
def test_functions_have_the_names_that_users_gave(name: str, words: str) -> None:
    assert spoken(name) == words


def test_layers_have_the_names_that_users_gave() -> None:
    names = ["other", "gradient_tape/net_1/pool_2_1/MaxPoolGrad"]
    assert suffix_of("net", names) == "_1"
    assert suffix_of("net", ["net/pool_1/MaxPool"]) == suffix_of("net", []) == ""
    assert plain("gradient_tape/net_1/pool_2_1/MaxPoolGrad_1", "_1") == "gradient_tape/net/pool_2/MaxPoolGrad_1"
    assert plain("net_1/pool_1_2/MaxPool", "_1") == "net/pool_1/MaxPool"
    assert plain("net/pool_1/MaxPool", "") == "net/pool_1/MaxPool"


def test_a_changed_steps_rate_is_of_what_the_given_step_takes() -> None:
    given, changed = Verdict(False, 2.0, 2.5), Verdict(False, 0.8, 1.0, least=0.9)
    assert rated_by(changed, given) == Verdict(False, 2.0, 1.0, least=0.9)
    assert rated_by(changed, None) == changed
    assert rated_by(None, given) is None


def test_a_step_that_regions_make_faster_than_its_unlimited_rate_is_told_so() -> None:
    verdict = Verdict(False, seconds_unlimited=2.0, seconds=1.0, least=0.9, smallest_budget=GIB, op="conv")
    assert str(verdict).startswith("fits with moves; predicted 2.00 times the unlimited rate; the smallest budget")
    nearly = Verdict(False, seconds_unlimited=2.0, seconds=1.99, least=1.9, smallest_budget=GIB, op="conv")
    assert "predicted 1.000 of the unlimited rate, at most 1.000 possible" in str(nearly)

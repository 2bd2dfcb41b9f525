"""What is said of regions: the report as text and JSON, a sentence about an op, a picture."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from graph_passes.decision import Fusion
from graph_passes.errors import GraphError
from graph_passes.passes.fuse.explain import explain
from graph_passes.passes.fuse.picture import regions_svg
from graph_passes.report import STITCHED, UNCHANGED_FITS, RegionRecord, Report, StepRecord
from tfmem.cli.main import main

SOFTMAX = ("Softmax", "mul", "Sum", "Neg", "Mean", "Log", "sub")
REGION = RegionRecord(
    "fusion_0",
    (
        StepRecord("read", (("ReadVariableOp", "ReadVariableOp"),)),
        StepRecord("call", (("dense/MatMul", "MatMul"),), (0,)),
        StepRecord("kernel", tuple((name, name) for name in SOFTMAX), (1,)),
        StepRecord("view", (("Reshape", "Reshape"),), (2,)),
        StepRecord("kernel", (("update", "AssignSubVariableOp"),), (3, 0)),
    ),
)
REPORT = Report(
    graph="step",
    device="CPU",
    policy="hybrid",
    decision=STITCHED,
    peak_before=0,
    peak_predicted=0,
    passes=("fusion",),
    regions=(REGION,),
    not_stitched=(("draw", "a stateful random op"), ("x", "no rule for Placeholder"), ("y", "no rule for Placeholder")),
    fusion="stitched: 0.4 ms a step against 0.9 ms, on copies",
    fusion_state=Fusion.STITCHED,
)
LEFT = replace(
    REPORT,
    decision=UNCHANGED_FITS,
    fusion="left unchanged: stitched it took 1.95 ms a step against 1.87 ms, on copies",
    fusion_state=Fusion.LEFT,
)


@pytest.mark.parametrize(
    ("op", "sentence"),
    [
        (
            "Softmax",
            "'Softmax' is in region 'fusion_0', as kernel 1 of 2, together with mul, Sum, Neg, Mean, Log and 1 more.",
        ),
        ("update", "'update' is in region 'fusion_0', as kernel 2 of 2, which holds nothing else."),
        ("dense/MatMul:0", "'dense/MatMul' is in region 'fusion_0', which runs TensorFlow's own kernel for it."),
        ("ReadVariableOp", "'ReadVariableOp' is in region 'fusion_0', which reads the variable in place."),
        ("Reshape", "'Reshape' is in region 'fusion_0', where it is another shape of the same memory."),
        ("draw", "'draw' is in no region: a stateful random op."),
    ],
)
def test_one_sentence_about_an_op(op: str, sentence: str) -> None:
    assert explain(REPORT, op) == sentence


@pytest.mark.parametrize("state", [Fusion.LEFT, Fusion.UNDECIDED])
def test_regions_that_do_not_run_are_not_told_as_if_they_did(state: Fusion) -> None:
    report = replace(LEFT, fusion_state=state)
    text = report.to_text()
    assert "  planned     1 region of 11 ops: none runs" in text.splitlines()
    assert "fusion_0" not in text
    assert report.running == ()
    assert explain(report, "update") == (
        "'update' runs in no region (left unchanged: stitched it took 1.95 ms a step against 1.87 ms, on copies); "
        "stitched it would be in region 'fusion_0', as kernel 2 of 2, which holds nothing else."
    )
    assert explain(report, "draw") == "'draw' is in no region: a stateful random op."


def test_what_runs_is_told_by_its_state_not_by_words() -> None:
    report = replace(LEFT, fusion="in other words", fusion_state=Fusion.STITCHED)
    assert report.running == (REGION,)
    assert "  fused       fusion_0: 11 ops in 2 kernels and 1 call" in report.to_text().splitlines()


def test_what_there_was_no_op_of() -> None:
    with pytest.raises(GraphError, match=r"there are: .*dense/MatMul"):
        explain(REPORT, "dense/MatMull")
    with pytest.raises(GraphError, match="the fusion pass did not run on 'other'"):
        explain(Report("other", "CPU", "hybrid", "moved", 0, 0), "Softmax")


def test_what_is_not_planned_yet_is_said() -> None:
    report = replace(REPORT, fusion="not decided yet: the unmodified step runs", regions=(), not_stitched=())
    with pytest.raises(GraphError, match=r"fusion of .* is not planned yet \(not decided yet.*call it more often"):
        explain(report, "MatMul")


def test_reports_of_regions_are_read_as_they_were_written() -> None:
    assert Report.from_json(REPORT.to_json()) == REPORT
    before = json.loads(REPORT.to_json())
    for name in ("regions", "not_stitched", "fusion"):  # of versions without the pass
        del before[name]
    assert Report.from_json(json.dumps(before)).regions == ()


def test_the_table_names_regions_and_counts_reasons() -> None:
    lines = REPORT.to_text().splitlines()
    assert "  fused       fusion_0: 11 ops in 2 kernels and 1 call" in lines
    assert "  not fused   2 ops: no rule for Placeholder" in lines
    assert "  fusion      stitched: 0.4 ms a step against 0.9 ms, on copies" in lines


def test_a_picture_has_a_box_for_each_kernel_and_call_and_arrows_through_views() -> None:
    picture = ElementTree.fromstring(regions_svg(REPORT))
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "kernel, 7 ops" in texts
    assert "dense/MatMul" in texts
    boxes = [each for each in picture.iter("{http://www.w3.org/2000/svg}rect") if each.get("rx") == "3"]
    assert len(boxes) == 3
    arrows = [each for each in picture.iter("{http://www.w3.org/2000/svg}path") if each.get("marker-end")]
    assert len(arrows) == 2  # product to softmax, softmax by way of the view to the update
    rights = [float(box.get("x", "0")) for box in boxes]
    assert rights == sorted(set(rights))


def test_a_picture_has_its_title_above_the_frame_and_its_arrows_between_the_boxes() -> None:
    picture = ElementTree.fromstring(regions_svg(REPORT))
    title = next(picture.iter("{http://www.w3.org/2000/svg}text"))
    rects = list(picture.iter("{http://www.w3.org/2000/svg}rect"))
    (frame,) = (each for each in rects if each.get("rx") == "6")
    assert float(title.attrib["y"]) == 16 + 14  # a line below the margin
    assert float(frame.attrib["y"]) == 16 + 2 * 14
    boxes = [(float(each.attrib["x"]), float(each.attrib["width"])) for each in rects if each.get("rx") == "3"]
    arrows = [each.attrib["d"] for each in picture.iter("{http://www.w3.org/2000/svg}path") if each.get("marker-end")]
    for arrow, (left, width), (right, _) in zip(arrows, boxes, boxes[1:], strict=False):
        horizontal = [float(number) for number in re.findall(r"[\d.]+", arrow)[::2]]
        assert horizontal == pytest.approx([left + width, left + width + 27, right - 27, right], abs=0.2)


def test_the_command_line_explains_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    file.write_text(REPORT.to_json())
    assert main(["explain", str(file), "draw", "update"]) == 0
    assert capsys.readouterr().out.splitlines() == [explain(REPORT, "draw"), explain(REPORT, "update")]
    assert main(["explain", str(file), "nothing"]) == 1
    assert "no op 'nothing' was left" in capsys.readouterr().err
    assert main(["report", str(file), "--regions", str(tmp_path / "regions.svg")]) == 0
    assert (tmp_path / "regions.svg").read_text() == regions_svg(REPORT)
    assert main(["explain", str(tmp_path), "draw"]) == 1
    assert "pass a SavedModel that tfmem optimised" in capsys.readouterr().err


def test_a_picture_goes_on_below_where_it_is_too_wide() -> None:
    names = [f"layers/product_{place}/MatMul" for place in range(39)]
    chain = tuple(StepRecord("call", ((name, "MatMul"),), (place,)) for place, name in enumerate(names))
    region = RegionRecord("while/body/fusion_0", (StepRecord("call", (("while/body/first", "MatMul"),)), *chain))
    picture = ElementTree.fromstring(regions_svg(replace(REPORT, regions=(region,), others=())))
    assert float(picture.attrib["width"]) < 2500
    boxes = [each for each in picture.iter("{http://www.w3.org/2000/svg}rect") if each.get("rx") == "3"]
    places = {(each.attrib["x"], each.attrib["y"]) for each in boxes}
    assert len(places) == len(boxes) == 40
    assert len({y for _, y in places}) > 2
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "first (MatMul)" in texts  # the region's name says the rest

"""The report: text, JSON, picture, and the words for sizes and times."""

import dataclasses
import json
import sys

import pytest

from graph_passes.decision import Decision, Missed
from graph_passes.device_report import duration, milliseconds, size
from graph_passes.report import MOVED, UNCHANGED_FITS, Report, TransferRecord
from tfmem.plot import PlotError, plot_report

MIB = 1 << 20


def transfer(index: int, nbytes: int = MIB) -> TransferRecord:
    return TransferRecord(f"act{index}:0", nbytes, f"f{index}", f"r{index}", f"p{index}", f"b{index}")


@pytest.fixture
def moved() -> Report:
    return Report(
        graph="train",
        device="/device:CPU:0",
        policy="autovm",
        decision=MOVED,
        budget=10 * MIB,
        passes=("grappler", "offload"),
        peak_before=16 * MIB,
        peak_predicted=10 * MIB,
        bytes_out_predicted=6 * MIB,
        bytes_in_predicted=6 * MIB,
        stall_predicted_ns=1_500_000,
        step_predicted_ns=2_000_000_000,
        size_threshold=MIB,
        transfers=(transfer(1, 4 * MIB), transfer(2, 2 * MIB)),
        curve_before=(("a", 1), ("b", 16 * MIB)),
        curve_after=(("a", 1), ("b", 10 * MIB)),
        notes=("while body left alone: no shape",),
    )


def test_json_round_trip(moved):
    ran = dataclasses.replace(moved, peak_measured=9 * MIB, stall_measured_ns=7, jit_compile="left on")
    for report in (moved, ran, Report("g", "d", "none", UNCHANGED_FITS, 1, 1)):
        assert Report.from_json(report.to_json()) == report


def test_a_report_is_frozen_and_compares(moved):
    with pytest.raises(dataclasses.FrozenInstanceError):
        moved.budget = 3
    assert hash(moved) == hash(Report.from_json(moved.to_json()))


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "{",
        "{}",
        json.dumps({"format": 1, "graph": "g"}),
        json.dumps({"format": 99, "graph": "g"}),
    ],
)
def test_bad_json_is_one_clear_error(text):
    with pytest.raises(ValueError, match=r"report|Expecting"):
        Report.from_json(text)


def test_unknown_field_is_named(moved):
    data = json.loads(moved.to_json()) | {"colour": "red"}
    with pytest.raises(ValueError, match="colour"):
        Report.from_json(json.dumps(data))


def test_text_names_every_figure(moved):
    text = str(moved)
    for words in ("16.0 MiB before", "10.0 MiB planned", "- measured", "1.5 ms planned", "2 s"):
        assert words in text
    for words in ("act1:0", "grappler, offload", "policy autovm", "note: while body left alone"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 100


def test_text_says_when_the_budget_is_broken(moved):
    within = dataclasses.replace(moved, peak_measured=10 * MIB)
    over = dataclasses.replace(moved, peak_measured=11 * MIB)
    assert "OVER BUDGET" not in within.to_text()
    assert "+10.0% vs. plan) OVER BUDGET" in over.to_text()


def test_text_keeps_the_largest_transfers_and_sums_the_rest(moved):
    many = dataclasses.replace(moved, transfers=tuple(transfer(i, i * MIB) for i in range(1, 6)))
    text = many.to_text(rows=2)
    assert [f"act{index}:0" in text for index in (5, 4, 3)] == [True, True, False]
    assert "and 3 more, 6.0 MiB" in text


def test_long_names_keep_their_end(moved):
    name = "gradient_tape/" + "very_long_scope/" * 5 + "conv:0"
    record = dataclasses.replace(transfer(1), tensor=name)
    text = dataclasses.replace(moved, transfers=(record,)).to_text()
    assert name not in text
    assert "conv:0" in text


@pytest.mark.parametrize(
    ("count", "words"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), ((1 << 20) - 1, "1.0 MiB"), (3 << 29, "1.5 GiB")],
)
def test_size(count, words):
    assert size(count) == words


@pytest.mark.parametrize(
    ("nanoseconds", "words"),
    [
        (None, "-"),
        (0, "0 ns"),
        (1500, "1.5 us"),
        (999_400, "999 us"),
        (999_600, "1 ms"),
        (278_000_000, "278 ms"),
        (2_000_000_000, "2 s"),
        (1_234_000_000_000, "1234 s"),
    ],
)
def test_duration(nanoseconds, words):
    assert duration(nanoseconds) == words


def test_milliseconds_have_no_exponent():
    assert [milliseconds(seconds) for seconds in (0.0004, 0.9994, 2.5)] == ["0.4 ms", "999 ms", "2500 ms"]


def test_picture(moved, tmp_path):
    pytest.importorskip("matplotlib")
    for number, report in enumerate((moved, dataclasses.replace(moved, transfers=(), budget=None))):
        path = plot_report(report, tmp_path / f"{number}.png")
        assert path.read_bytes().startswith(b"\x89PNG")


def test_no_curve_no_picture(moved, tmp_path):
    pytest.importorskip("matplotlib")
    empty = dataclasses.replace(moved, curve_before=(), curve_after=())
    with pytest.raises(PlotError, match="'train' holds no memory curve"):
        plot_report(empty, tmp_path / "none.png")


def test_picture_without_matplotlib(moved, tmp_path, monkeypatch):
    for name in [*sys.modules]:
        if name.partition(".")[0] == "matplotlib":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotError, match="pip install"):
        plot_report(moved, tmp_path / "none.png")


def test_a_models_other_functions_come_behind(moved, tmp_path):
    evaluation = Report("test_step", "CPU", "autovm", "replaced", 0, 0, replaced=("lstm",), function="test")
    whole = dataclasses.replace(moved, function="train", others=(evaluation,))
    text = str(whole)
    assert text.startswith("`train`: fits 10.0 MiB")
    other = "\n\n`test_step`: no memory budget; 1 recurrent layer replaced\n"
    assert text.index("act1:0") < text.index(other) < text.rindex("lstm")
    assert Report.from_json(whole.to_json()) == whole
    with pytest.raises(ValueError, match="colour"):
        Report.from_json(whole.to_json().replace('"replaced": [', '"colour": 1, "replaced": ['))


def test_reports_of_before_are_read(moved):
    """Written before a report could have others."""
    data = json.loads(moved.to_json())
    del data["function"], data["others"]
    assert Report.from_json(json.dumps(data)) == moved


def test_decisions_are_data(moved):
    assert not moved.decision.is_unchanged
    assert [each for each in Decision if each.is_unchanged] == [each for each in Decision if "unchanged" in each]
    assert Report("f", "CPU", "hybrid", "unchanged: fits", 0, 0).decision is Decision.FITS
    assert Report.from_json(moved.to_json()).decision is MOVED
    with pytest.raises(ValueError, match="not a tfmem report: 'gone' is not a valid Decision"):
        Report.from_json(moved.to_json().replace('"decision": "moved"', '"decision": "gone"'))


def test_a_note_of_a_missed_budget_is_told_by_its_type(moved):
    missed = Missed.of(" by 2 bytes, while plans were tried")
    report = dataclasses.replace(moved, notes=(missed, "OVER BUDGET says a note that is none"))
    assert [note for note in report.notes if isinstance(note, Missed)] == [missed]
    assert f"note: {missed}" in report.to_text()
    assert missed.once == "over budget (while plans were tried, not since) by 2 bytes, while plans were tried"
    assert Report.from_json(report.to_json()) == report

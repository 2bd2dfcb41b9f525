"""Commands that need no TensorFlow: `report` and `cache`, and how all of them fail."""

import pytest

from graph_passes.report import MOVED, Report, TransferRecord
from tfmem import __main__ as cli

MIB = 1 << 20


@pytest.fixture
def file(tmp_path):
    report = Report(
        graph="train",
        device="CPU",
        policy="autovm",
        decision=MOVED,
        budget=10 * MIB,
        peak_before=16 * MIB,
        peak_predicted=10 * MIB,
        transfers=tuple(TransferRecord(f"act{i}:0", (i + 1) * MIB, "a", "a", "b", "b") for i in range(3)),
        curve_before=(("a", 1), ("b", 16 * MIB)),
        curve_after=(("a", 1), ("b", 10 * MIB)),
    )
    path = tmp_path / "report.json"
    path.write_text(report.to_json())
    return path


def test_report_prints_the_largest_moves(file, capsys):
    assert cli.main(["report", str(file), "--rows", "1"]) == 0
    text = capsys.readouterr().out
    assert "16.0 MiB before, 10.0 MiB planned" in text
    assert "act2:0" in text
    assert "and 2 more, 3.0 MiB" in text


def test_report_draws(file, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "memory.png"
    assert cli.main(["report", str(file), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"{picture}\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("peak", "is not JSON"),
        ("{}", "not a tfmem report"),
        ("[1]", "not a tfmem report"),
    ],
)
def test_report_refuses_what_is_none(content, message, tmp_path, capsys):
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    assert cli.main(["report", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tfmem report: ")
    assert message in error


def test_cache_counts_and_clears_its_own_and_nothing_else(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TFMEM_CACHE_DIR", str(tmp_path))
    assert cli.main(["cache"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: 0 profiles, 0 files of GPU kernels, 0 B\n"

    names = ("profiles/ab/cd", "profiles/ab/x.tmp", "profiles/abc.json", "kernels/ab/cd")
    profile, unfinished, old, kernel = (tmp_path / name for name in names)
    kept = (tmp_path / "profiles/notes.txt", tmp_path / "abc.json")
    for path in (profile, unfinished, old, kernel, *kept):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("12345")
    assert cli.main(["cache"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: 3 profiles, 1 file of GPU kernels, 20 B\n"
    assert profile.exists()

    assert cli.main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: 3 profiles, 1 file of GPU kernels, 20 B, deleted\n"
    assert not any(path.exists() for path in (profile, unfinished, old, kernel))
    assert all(path.exists() for path in kept)


def test_no_cache(monkeypatch, capsys):
    monkeypatch.setenv("TFMEM_CACHE_DIR", "")
    assert cli.main(["cache", "--clear"]) == 0
    assert "no cache" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["report"], ["teleport"], ["optimize"]])
def test_bad_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "usage: python -m tfmem" in capsys.readouterr().err

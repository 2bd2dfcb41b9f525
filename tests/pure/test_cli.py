"""Commands that need no TensorFlow: `report`, `explain`, `plan diff` and `cache`, and how all of them fail."""

import json
from dataclasses import replace

import pytest

from graph_passes.report import MOVED, Report, TransferRecord
from tests.pure.test_plan_file import PLAN
from tfmem.cli import main as cli
from tfmem.cli.output import print_table

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
    assert capsys.readouterr().out == f"{tmp_path}: 0 files of profiles and plans, 0 files of GPU kernels, 0 B\n"

    names = ("profiles/ab/cd", "profiles/ab/x.tmp", "profiles/abc.json", "kernels/ab/cd")
    profile, unfinished, old, kernel = (tmp_path / name for name in names)
    kept = (tmp_path / "profiles/notes.txt", tmp_path / "abc.json")
    for path in (profile, unfinished, old, kernel, *kept):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("12345")
    assert cli.main(["cache"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: 3 files of profiles and plans, 1 file of GPU kernels, 20 B\n"
    assert profile.exists()

    assert cli.main(["cache", "--clear"]) == 0
    assert (
        capsys.readouterr().out == f"{tmp_path}: 3 files of profiles and plans, 1 file of GPU kernels, 20 B, deleted\n"
    )
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
    assert "usage: tfmem" in capsys.readouterr().err


def test_help_is_one_screen(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    for command in ("plan", "optimize", "explain", "report", "profile", "doctor", "devices", "cache"):
        assert any(line.split()[:1] == [command] for line in lines)
    assert any(line.strip().startswith("3  no plan fits") for line in lines)


@pytest.mark.parametrize("command", ["plan", "optimize", "explain", "report", "profile", "doctor", "devices", "cache"])
def test_every_command_has_json_and_help_of_one_screen(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert any("--json" in line for line in lines)
    assert len(lines) <= 40


def test_explain_says_it_in_a_sentence_each(file, capsys):
    assert cli.main(["explain", str(file)]) == 0
    assert capsys.readouterr().out.startswith("`train`: fits 10.0 MiB")
    assert cli.main(["explain", str(file), "act1", "--json"]) == 0
    assert "is offloaded after 'a'" in json.loads(capsys.readouterr().out)["act1"]


def test_reports_for_programs(file, capsys):
    assert cli.main(["report", str(file), "--json"]) == 0
    assert Report.from_json(capsys.readouterr().out) == Report.from_json(file.read_text())
    assert cli.main(["report", "nothing.json", "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["kind"] == "FileNotFoundError"
    assert printed.err.startswith("tfmem report: ")


def test_plans_are_compared(tmp_path, capsys):
    old, new, other = (tmp_path / f"{name}.json" for name in ("old", "new", "other"))
    old.write_text(PLAN.to_json())
    new.write_text(replace(PLAN, budget=MIB).to_json())
    other.write_text("[")
    assert cli.main(["plan", "diff", str(old), str(new)]) == 0
    assert capsys.readouterr().out == "  budget      60.0 MiB -> 1.0 MiB\n"
    assert cli.main(["plan", "diff", str(old), str(old), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["equal"] is True
    assert cli.main(["plan", "diff", str(old), str(new), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["equal"], found["fields"]) == (False, [["budget", PLAN.budget, MIB]])
    assert cli.main(["plan", "diff", str(old), str(other)]) == 1
    assert "is not JSON" in capsys.readouterr().err
    assert cli.main(["plan", "diff", str(old)]) == cli.USAGE
    assert "diff takes two plans" in capsys.readouterr().err
    assert cli.main(["report", str(old)]) == 0  # a plan holds a report
    assert "asked" in capsys.readouterr().out


def test_the_cache_for_programs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TFMEM_CACHE_DIR", str(tmp_path))
    assert cli.main(["cache", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "directory": str(tmp_path),
        "profiles": 0,
        "kernels": 0,
        "bytes": 0,
        "deleted": False,
    }


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["plan", "diff", "one.json"], "diff takes two plans, not 1"),
        (["plan", "one", "two"], "found 2 models, expected one"),
        (["profile", "train:model", "--batch", "8", "--steps", "3"], "give at least 8"),
    ],
)
def test_a_wrong_command_line_has_its_exit_code(command, message, capsys):
    assert cli.main(command) == cli.USAGE
    assert message in capsys.readouterr().err


def test_a_missing_file_is_named_without_a_number_of_an_error(tmp_path, capsys):
    assert cli.main(["plan", "diff", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == cli.FAILED
    assert capsys.readouterr().err == f"tfmem plan: '{tmp_path / 'a.json'}': No such file or directory\n"


@pytest.mark.parametrize("command", ["plan", "optimize", "profile", "explain", "report", "doctor", "devices", "cache"])
def test_every_command_takes_json(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_the_help_fits_a_screen(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 100


def test_a_table_cuts_no_cell(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    print_table(("what", "found"), [("headers", "/a/folder" * 8)])
    assert "".join(capsys.readouterr().out.split()).count("/a/folder") == 8

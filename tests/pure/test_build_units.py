"""The plan of what g++ compiles together, and what is compiled again after a change."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from custom_ops import build_flags
from tools import build_units
from tools.build_units import Unit
from tools.compile_units import Job, compile_all

ROOT = build_flags.PACKAGE.parent
PLANS = {
    "op library": (build_units.units, build_flags.sources),
    "extension": (build_units.one_by_one, build_flags.extension_sources),
}


@pytest.mark.parametrize(("plan", "sources"), PLANS.values(), ids=PLANS)
def test_each_source_is_in_one_unit(
    plan: Callable[[Sequence[Path], Path], list[Unit]], sources: Callable[[], list[Path]]
) -> None:
    units = plan(sources(), ROOT)
    assert sorted(source for unit in units for source in unit.sources) == sources() != []
    assert all(source.is_file() for unit in units for source in unit.sources)
    assert len({unit.name for unit in units}) == len(units)


def test_units_of_the_op_library_are_few_and_none_is_long() -> None:
    units = build_units.units(build_flags.sources(), ROOT)
    lengths = [sum(len(source.read_text().splitlines()) for source in unit.sources) for unit in units]
    assert len(units) <= 25
    assert max(lengths) < 1.25 * build_units.LINES


def test_code_for_one_instruction_set_is_compiled_alone() -> None:
    units = build_units.units(build_flags.sources(), ROOT)
    alone = {source.stem for unit in units if len(unit.sources) == 1 for source in unit.sources}
    assert {"cpu_kernels", "cpu_kernels_avx2", "cpu_kernels_avx512"} <= alone


def test_a_unit_reads_tensorflow_if_a_header_of_its_sources_does(tmp_path: Path) -> None:
    files = {
        "near/a.cc": '#include "near/a.h"\n',
        "near/a.h": '#include "far/b.h"\n',
        "far/b.h": '#include "tensorflow/core/framework/op.h"\n',
        "far/c.cc": '#include "absl/status/status.h"\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    units = build_units.units([tmp_path / "near/a.cc", tmp_path / "far/c.cc"], tmp_path)
    assert units == [
        Unit("far", (tmp_path / "far/c.cc",), False),
        Unit("near", (tmp_path / "near/a.cc",), True),
    ]
    assert units[1].text(tmp_path) == '#include "near/a.cc"\n'


def test_a_long_folder_is_cut_into_parts_of_similar_length(tmp_path: Path) -> None:
    sources = [tmp_path / f"{name}.cc" for name in "abcdef"]
    for source in sources:
        source.write_text("\n" * (build_units.LINES // 3))
    first, second = build_units.units(sources, tmp_path)
    assert (first.name, second.name) == (f"{tmp_path.name}_1", f"{tmp_path.name}_2")
    assert first.sources + second.sources == tuple(sources)
    assert len(first.sources) == len(second.sources) == 3


# What stands for the compiler: writes the target, and lists the source as what that was made from.
COMPILER = """
import pathlib, sys
source, target, *_, listed = sys.argv[1:]
if "wrong" in pathlib.Path(source).read_text():
    sys.exit(1)
pathlib.Path(target).write_text("")
pathlib.Path(listed).write_text(f"{target}: {source}\\n")
"""


class Folder:
    """Two units and the header that the second reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in ("header", "plain", "reader"):
            (path / name).write_text("")
        self.jobs = [self.job("header"), self.job("plain"), self.job("reader", path / "header.o")]

    def job(self, name: str, header: Path | None = None) -> Job:
        source, target = self.path / name, self.path / f"{name}.o"
        return Job(name, target, [sys.executable, "-c", COMPILER, str(source), str(target)], header)

    def change(self, name: str, text: str = "") -> None:
        (self.path / name).write_text(text)
        newest = max(path.stat().st_mtime for path in self.path.iterdir())
        os.utime(self.path / name, (newest + 10, newest + 10))


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def made(folder: Folder, capfd: pytest.CaptureFixture[str]) -> list[str]:
    compile_all(folder.jobs)
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [f"[{i + 1}/{len(lines)}]" for i in range(len(lines))]
    return sorted(line.partition("compiling ")[2] for line in lines)


def test_what_is_compiled_is_counted_and_only_what_changed_is(
    folder: Folder, capfd: pytest.CaptureFixture[str]
) -> None:
    assert made(folder, capfd) == ["header", "plain", "reader"]
    assert made(folder, capfd) == []
    folder.change("plain")
    assert made(folder, capfd) == ["plain"]


def test_what_reads_a_precompiled_header_is_compiled_with_it(folder: Folder, capfd: pytest.CaptureFixture[str]) -> None:
    made(folder, capfd)
    folder.change("header")
    assert made(folder, capfd) == ["header", "reader"]


def test_a_build_that_ended_behind_the_header_goes_on_with_what_reads_it(
    folder: Folder, capfd: pytest.CaptureFixture[str]
) -> None:
    made(folder, capfd)
    folder.change("header.o")
    assert made(folder, capfd) == ["reader"]


def test_a_failure_ends_the_build(folder: Folder) -> None:
    folder.change("header", "wrong")
    with pytest.raises(SystemExit, match="not everything was built"):
        compile_all(folder.jobs)
    assert not (folder.path / "reader.o").exists()

"""Sources are compiled in other processes, several at once; an error in one is reported, and harms no other."""

from __future__ import annotations

import colorsys
import gc
import os
import signal
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from custom_ops.errors import KernelError
from custom_ops.jit import compilers as module
from custom_ops.jit import nvrtc
from custom_ops.jit.compilers import Compilers
from custom_ops.recurrent import cells
from custom_ops.recurrent.codegen.source import generate
from custom_ops.recurrent.spec import Configuration, RecurrentSpec

SOURCE = 'extern "C" __global__ void kernel(float* x) { x[threadIdx.x] *= 2; }'


@pytest.fixture(name="with_nvrtc")
def fixture_with_nvrtc() -> None:
    try:
        nvrtc.compiler_version()
    except KernelError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("with_nvrtc")
def test_code_is_that_of_this_process() -> None:
    compile_source = Compilers(2)
    recurrent = generate(RecurrentSpec(cells.simple_rnn(), 16), Configuration(threads=64, lanes=4), 90)
    for source, contract in ((SOURCE, True), (SOURCE, False), (recurrent, True)):
        assert compile_source(source, 90, contract=contract) == nvrtc.compile_source(source, 90, contract=contract)


@pytest.mark.usefixtures("with_nvrtc")
def test_the_compilers_words_come_back() -> None:
    compile_source = Compilers(1)
    with pytest.raises(KernelError, match=r"rejects a kernel for sm_90:\nrecurrent\.cu\(1\): error"):
        compile_source("no such type", 90)
    with pytest.raises(KernelError, match="gpu-architecture"):
        compile_source(SOURCE, 33)
    assert compile_source(SOURCE, 90).startswith(b"\x7fELF")


Install = Callable[[str], None]


@pytest.fixture(name="compiler")
def fixture_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a `compile_source` of the test's own into the other processes."""

    def install(body: str) -> None:
        folder = tmp_path / "path"
        folder.mkdir()
        (folder / "stand_in.py").write_text(
            "import os, sys, time\n"
            "from pathlib import Path\n"
            "from custom_ops.errors import KernelError\n"
            "from custom_ops.jit import compilers, nvrtc\n"
            f"def compile_source(source, *_):\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"
            "nvrtc.compile_source = compile_source\n"
            "main = compilers.main\n"
        )
        monkeypatch.setattr(module, "__name__", "stand_in")  # where the other process finds `main`
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])

    return install


def test_several_at_once_and_no_more(compiler: Install, tmp_path: Path) -> None:
    """The first three wait for each other."""
    (tmp_path / "here").mkdir()
    compiler(
        f"""
        here = Path({str(tmp_path / "here")!r})
        (here / source).touch()
        give_up = time.monotonic() + 60
        while len(list(here.iterdir())) < 3 and time.monotonic() < give_up:
            time.sleep(0.01)
        return f"{{os.getpid()}} {{len(list(here.iterdir()))}}".encode()
        """
    )
    compile_source = Compilers(3)
    with ThreadPoolExecutor(6) as pool:
        found = [code.split() for code in pool.map(lambda name: compile_source(name, 90), "abcdef")]
    assert len({process for process, _ in found}) == 3
    assert min(int(seen) for _, seen in found) >= 3


def test_equal_sources_compile_once_unless_that_failed(compiler: Install, tmp_path: Path) -> None:
    """The second thread asks while the first one's source compiles; a source that failed is tried when asked for."""
    count = tmp_path / "count"
    compiler(
        f"""
        with open({str(count)!r}, "a") as file:
            file.write(source)
        time.sleep(0.3)
        if source == "b" and Path({str(count)!r}).read_text().count("b") == 1:
            raise KernelError("no room")
        return source.encode()
        """
    )
    compile_source = Compilers(2)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(compile_source, ["a", "a"], [90, 90])) == [b"a", b"a"]
    assert compile_source("a", 90) == b"a"
    with pytest.raises(KernelError, match="no room"):
        compile_source("b", 90)
    assert [compile_source("b", 90), compile_source("b", 90)] == [b"b"] * 2
    assert count.read_text() == "abb"
    compile_source("a", 80)
    assert count.read_text() == "abba"


def test_a_compiler_that_hangs_is_ended_and_the_others_still_compile(compiler: Install) -> None:
    compiler(
        """
        if source == "second":
            time.sleep(100)
        return source.encode()
        """
    )
    compile_source = Compilers(1, seconds=5)
    assert compile_source("first", 90) == b"first"
    with pytest.raises(KernelError, match="compiling it took more than 5 seconds"):
        compile_source("second", 90)
    assert compile_source("third", 90) == b"third"


def test_a_compiler_that_dies_takes_one_kernel_with_it(compiler: Install) -> None:
    compiler(
        """
        print("something else on standard output")
        if source == "first":
            sys.stderr.write("corrupted size vs. prev_size")
            sys.stderr.flush()
            os.abort()
        if source == "second":
            raise ValueError("no such thing")
        if source == "third":
            raise KernelError("does not fit")
        return source.encode()
        """
    )
    compile_source = Compilers(1)
    for source, *words in (
        ("first", "signal 6", "corrupted size vs. prev_size"),
        ("second", "status 1", "no such thing"),
        ("third", "does not fit"),
    ):
        with pytest.raises(KernelError) as caught:
            compile_source(source, 90)
        assert all(word in str(caught.value) for word in words), caught.value
    assert compile_source("fourth", 90) == b"fourth"


@pytest.mark.parametrize("executable", ["/no/such/python", "/bin/false"])
def test_where_no_process_starts_this_one_compiles_and_says_so(
    executable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(nvrtc, "compile_source", lambda source, *_: source.encode())
    assert Compilers()("here", 90) == b"here"
    assert "no other process could be started" in caplog.text


def alive(process: int) -> bool:
    """Whether it runs; a process that ended and waits for its parent does not."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_what_a_task_needs_is_imported_before_its_process_is_forked(compiler: Install) -> None:
    compiler("return f'{source in sys.modules} {os.getppid()}'.encode()")
    compile_source = Compilers(2)
    compile_source.begin()
    (parent,) = compile_source._parents
    name = colorsys.__name__  # which nothing else there imports
    assert compile_source(name, 90).decode() == f"False {parent._process.pid}"
    compile_source._idle.pop().end()  # so that the next task has a new fork
    assert compile_source.run(colorsys.rgb_to_hsv, 1.0, 0.0, 0.0)[0] == 0.0
    compile_source._idle.pop().end()
    assert compile_source(name, 80).decode() == f"True {parent._process.pid}"


def test_no_process_stays(compiler: Install) -> None:
    compiler("return f'{os.getpid()} {os.getppid()}'.encode()")
    compile_source = Compilers(2)
    processes = [int(word) for word in compile_source("a", 90).split()]
    assert all(map(alive, processes))
    del compile_source
    gc.collect()
    assert not any(map(alive, processes))


def test_where_the_process_that_is_forked_dies_the_next_task_has_another(
    compiler: Install, caplog: pytest.LogCaptureFixture
) -> None:
    compiler("return f'{os.getpid()} {os.getppid()}'.encode()")
    compile_source = Compilers(1)
    first, parent = map(int, compile_source("a", 90).split())
    os.kill(parent, signal.SIGKILL)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(KernelError, match="ended"):
        compile_source("b", 90)
    assert compile_source.run(os.path.basename, "/c") == "c"  # in this process, which says so
    assert "no other process could be started" in caplog.text
    again, another = map(int, compile_source("d", 90).split())
    assert {again, another}.isdisjoint({first, parent, os.getpid()})

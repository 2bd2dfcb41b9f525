"""Kernels compiled in another process are there in this one; what goes wrong in it is told, and harms nobody."""

import pickle
import sys
import textwrap

import pytest

from custom_ops.errors import KernelError
from custom_ops.jit import nvrtc
from custom_ops.jit.cache import Cache
from custom_ops.recurrent import cells
from custom_ops.recurrent import compile_ahead as module
from custom_ops.recurrent.compile_ahead import compile_ahead
from custom_ops.recurrent.program import build
from custom_ops.recurrent.spec import Configuration, RecurrentSpec

SPEC = RecurrentSpec(cells.simple_rnn(), 16)
FIRST, SECOND, THIRD = (Configuration(threads=threads, lanes=4) for threads in (64, 128, 256))


def test_what_another_process_compiled_is_not_compiled_again(tmp_path, monkeypatch):
    try:
        nvrtc.compiler_version()
    except KernelError as error:
        pytest.skip(str(error))
    too_large = Configuration(rows=4096)
    cache = Cache(tmp_path)
    refused = compile_ahead(SPEC, [too_large, FIRST], 90, cache)
    assert list(refused) == [too_large]  # passed over
    with pytest.raises(KernelError) as caught:
        build(SPEC, too_large, 90, cache)
    assert refused[too_large] == str(caught.value)
    monkeypatch.setattr(nvrtc, "compile_source", lambda *_: pytest.fail("compiled here"))
    assert build(SPEC, FIRST, 90, cache).image.code[:4] == b"\x7fELF"


def test_the_compilers_words_come_back(tmp_path):
    """An architecture that no compiler knows."""
    try:
        nvrtc.compiler_version()
    except KernelError as error:
        pytest.skip(str(error))
    refused = compile_ahead(SPEC, [FIRST], 33, Cache(tmp_path))
    assert "gpu-architecture" in refused[FIRST]


@pytest.fixture(name="compiler")
def fixture_compiler(tmp_path, monkeypatch):
    """Puts a `build` of the test's own into the other process."""

    def install(body):
        folder = tmp_path / "path"
        folder.mkdir()
        text = textwrap.dedent(body)
        (folder / "stand_in.py").write_text(
            "import os, sys, time\n"
            "from custom_ops.errors import KernelError\n"
            f"def build(spec, configuration, arch, cache):\n{textwrap.indent(text, '    ')}\n"
            "from custom_ops.recurrent import compile_ahead\n"
            "compile_ahead.build = build\n"
            "main = compile_ahead.main\n"
        )
        monkeypatch.setattr(module, "__name__", "stand_in")  # where the other process finds `main`
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])

    return install


def test_a_compiler_that_hangs_is_ended_and_the_others_still_compile(compiler, tmp_path):
    compiler(
        f"""
        if configuration.threads == {SECOND.threads}:
            time.sleep(100)
        open({str(tmp_path)!r} + f"/{{configuration.threads}}", "w").close()
        """
    )
    refused = compile_ahead(SPEC, [FIRST, SECOND, THIRD], 90, Cache(tmp_path), seconds=15)
    assert refused == {SECOND: "compiling it took more than 15 seconds"}
    assert {"64", "256"} <= {path.name for path in tmp_path.iterdir()}


def test_a_compiler_that_dies_takes_one_kernel_with_it(compiler, tmp_path):
    compiler(
        f"""
        print("something else on standard output")
        if configuration.threads == {FIRST.threads}:
            sys.stderr.write("corrupted size vs. prev_size")
            sys.stderr.flush()
            os.abort()
        if configuration.threads == {SECOND.threads}:
            raise ValueError("no such thing")
        raise KernelError("does not fit")
        """
    )
    refused = compile_ahead(SPEC, [FIRST, SECOND, THIRD], 90, Cache(tmp_path))
    assert all(words in refused[FIRST] for words in ("signal 6", "corrupted size vs. prev_size"))
    assert all(words in refused[SECOND] for words in ("status 1", "no such thing"))
    assert refused[THIRD] == "does not fit"


@pytest.mark.parametrize("executable", ["/no/such/python", "/bin/false"])
def test_where_no_process_starts_nothing_is_refused_and_it_is_said(executable, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(sys, "executable", executable)
    assert compile_ahead(SPEC, [FIRST, SECOND], 90, Cache(tmp_path)) == {}
    assert "no other process could be started" in caplog.text


def test_tasks_can_be_sent():
    assert pickle.loads(pickle.dumps((SPEC, [FIRST]))) == (SPEC, [FIRST])

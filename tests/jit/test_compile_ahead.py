"""Kernels compiled in another process are there in this one."""

import pytest

from custom_ops import cells
from custom_ops.errors import KernelError
from custom_ops.jit import nvrtc
from custom_ops.jit.cache import Cache
from custom_ops.jit.compile_ahead import compile_ahead
from custom_ops.jit.program import build
from custom_ops.spec import Configuration, RecurrentSpec


def test_what_another_process_compiled_is_not_compiled_again(tmp_path, monkeypatch):
    try:
        nvrtc.compiler_version()
    except KernelError as error:
        pytest.skip(str(error))
    spec = RecurrentSpec(cells.simple_rnn(), 16)
    fits, too_large = Configuration(threads=64, lanes=4), Configuration(register_weights=10_000)
    cache = Cache(tmp_path)
    compile_ahead(spec, [too_large, fits], 90, cache)  # what does not fit is passed over
    monkeypatch.setattr(nvrtc, "compile_source", lambda *_: pytest.fail("compiled here"))
    assert build(spec, fits, 90, cache).image[:4] == b"\x7fELF"

"""The kernel of a dynamic net: NVRTC takes it, and bad scripts end in an error. What it computes:
tests/tf/dynamic_on_fake_gpu.py."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import numpy as np
import pytest

from custom_ops import build_flags
from custom_ops.dynamic.codegen import batch_table
from custom_ops.dynamic.codegen.gpu_program import DynamicProgram, build
from custom_ops.dynamic.codegen.on_chip import Chip
from custom_ops.errors import KernelError
from custom_ops.jit import nvrtc
from custom_ops.jit.launch import LoadedKernel, Module
from tests.compiled import cubin
from tests.cuda_on_cpu.driver import Compiler, CpuDevice, Driver
from tests.dynamic_specs import tree_rnn

PROCESSORS = 2
SIGNAL, WAIT, LOSSES, CALL = 4, 5, 7, 8
WAITED_TOO_LONG, BAD_INSTRUCTION = 1, 2


@pytest.mark.parametrize("arch", [80, 90, 120])
def test_nvrtc_takes_the_kernel(arch: int) -> None:
    try:
        nvrtc.compiler_version()
    except KernelError as error:
        pytest.skip(str(error))
    program = build(tree_rnn(40), arch, Chip(processors=3), compile_source=cubin)
    assert program.image.code.startswith(b"\x7fELF")
    assert program.image.cooperative


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    if shutil.which(build_flags.compiler()) is None:
        pytest.skip("needs a C++ compiler")
    compiler = Compiler()
    with CpuDevice(driver=Driver(), compile_source=compiler) as found:
        yield found


@pytest.fixture(scope="module")
def program(device: CpuDevice) -> DynamicProgram:
    chip = Chip(processors=PROCESSORS)
    return build(tree_rnn(5), 90, chip, compile_source=device.compile_source, script_words=8, polls=50)


def run(device: CpuDevice, program: DynamicProgram, scripts: list[list[tuple[int, ...]]]) -> tuple[int, list[int]]:
    """The status and the first signals, after instructions that are an op and its words."""
    facts = dict(program.more)
    words = [[word for op, *rest in script for word in (op | (1 + len(rest)) << 8, *rest)] for script in scripts]
    sent = np.zeros(int(facts["table"]) + PROCESSORS + 1, np.uint32)
    ends = len(sent) + np.cumsum([0, *map(len, words)])
    sent[int(facts["table"]) :] = ends
    sent = np.concatenate([sent, *(np.array(script, np.uint32) for script in words)]).astype(np.uint32)
    status = device.upload(np.zeros(64 + 16, np.uint32))
    parameter = [0] * int(facts["words"])
    weights = device.upload(np.zeros(1000, np.float32))
    failure = device.upload(np.zeros(1, np.uint32))
    parameter[batch_table.SENT], parameter[batch_table.STATUS], parameter[batch_table.FAILURE] = (
        device.upload(sent),
        status,
        failure,
    )
    parameter[batch_table.POINTERS : batch_table.POINTERS + 4] = [weights] * 4
    module = Module(program.image.code, device.driver)
    LoadedKernel(program.image, module).prepare((PROCESSORS, 1), parameter)(device.stream)
    found = device.download(status, np.zeros(64 + 16, np.uint32))
    assert device.download(failure, np.zeros(1, np.uint32)) == found[0]  # which the host is told
    return int(found[0]), found[64:68].tolist()


def test_processors_wait_for_each_other(device: CpuDevice, program: DynamicProgram) -> None:
    # in pieces of 8 words, so that instructions lie across two of them
    scripts = [[(SIGNAL, 0), (WAIT, 0, 2), (SIGNAL, 1), (WAIT, 1, 2), (LOSSES, 0, 0)]] * 2
    assert run(device, program, scripts) == (0, [2, 2, 0, 0])


def test_what_is_common_is_called(device: CpuDevice, program: DynamicProgram) -> None:
    facts = dict(program.more)
    first = int(facts["table"]) + PROCESSORS + 1
    # the first processor's script is (signal 0) (wait 0, 1) (signal 1); the other calls the last two, and ends with one
    scripts = [[(SIGNAL, 0), (WAIT, 0, 1), (SIGNAL, 1)], [(CALL, first + 2, first + 7), (SIGNAL, 2)]]
    assert run(device, program, scripts) == (0, [1, 2, 1, 0])


def test_a_signal_that_does_not_come_is_an_error_and_no_hang(device: CpuDevice, program: DynamicProgram) -> None:
    scripts = [[(WAIT, 0, 2), (SIGNAL, 1)], [(SIGNAL, 0), (WAIT, 1, 1), (SIGNAL, 2)]]
    # no thread goes on behind a wait that ended in vain
    assert run(device, program, scripts) == (WAITED_TOO_LONG, [1, 0, 0, 0])


@pytest.mark.parametrize("instruction", [(1, 1000, 0, 1), (2, 0, 0, 0), (3, 1, 0, 1), (99,)])
def test_an_instruction_that_there_is_not_is_an_error(
    device: CpuDevice, program: DynamicProgram, instruction: tuple[int, ...]
) -> None:
    # kernel 1000; the gradient of a table, by tiles; rows of a matrix; no op at all
    status, _ = run(device, program, [[instruction, (SIGNAL, 0)], [(SIGNAL, 0)]])
    assert status == BAD_INSTRUCTION

"""GPU programs of a region: chosen, compiled, kept."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest

from custom_ops.errors import KernelError
from custom_ops.expr.text import from_text
from custom_ops.fusion import programs
from custom_ops.fusion.programs import build, by_model, by_tuner, kernels
from custom_ops.fusion.region import Call, Kernel, Region, TensorType
from custom_ops.jit import nvrtc
from custom_ops.jit.cache import Cache
from custom_ops.jit.device import DeviceContext
from tests.cuda_on_cpu.driver import Compiler, CpuDevice, Driver
from tests.fusion_regions import softmax_step

pytest_plugins = ("tests.fusion_device",)

DOUBLED = "program 1\naxes 0 0\ntensor float32 2\ninput 0 a0 a1\nadd 0 0\noutput 1 0 1\n"


class Timed(CpuDevice):
    """The second kernel that is timed is the fastest."""

    timed = 0

    def time(self, enqueue: Any) -> float:
        enqueue()
        self.timed += 1
        return 1.0 if self.timed == 2 else 2.0


@pytest.fixture
def device(compiler: Compiler) -> Iterator[DeviceContext]:
    with Timed(driver=Driver(), compile_source=compiler) as found:
        yield found


def product(inputs: tuple[int, int], output: int, transposed: bool) -> Call:
    return Call("MatMul", b"", inputs, (output,))


def doubled(*rows: int | None) -> Region:
    """A kernel for each number of rows."""
    values = tuple(TensorType("float32", (size, 8)) for size in rows)
    kernels = (Kernel(from_text(DOUBLED), (i,), (len(rows) + i,), ("double",)) for i in range(len(rows)))
    return Region(len(rows), (), values * 2, tuple(kernels), (len(rows),))


def test_equal_kernels_are_one(device: DeviceContext) -> None:
    found = build(doubled(4, 4, 8, None), 90, by_model(132), compile_source=device.compile_source)
    assert len(found) == 4
    assert found[0] is found[1]
    header = dict(line.split(" ", 1) for line in found[3].to_text().splitlines())
    assert header["digest"] == found[3].image.digest
    assert header["words"].startswith("tensor:0 output:0")


def test_the_fastest_is_taken(device: DeviceContext, tmp_path: Path) -> None:
    """The fastest of the three that the model ranks first, the same one each time: what was timed is kept."""
    cache = Cache(tmp_path)
    region = doubled(64)
    (timed,) = build(region, 90, by_tuner(device, cache, 3), compile_source=device.compile_source)
    (again,) = build(region, 90, by_tuner(device, cache, 3), compile_source=device.compile_source)
    assert again.configuration == timed.configuration


def test_what_went_wrong_names_the_kernel() -> None:
    def missing(*_: object, **__: object) -> NoReturn:
        raise KernelError("NVRTC is needed")

    with pytest.raises(KernelError, match="a kernel of double: NVRTC is needed"):
        build(doubled(4), 90, by_model(132), compile_source=missing)


SCALED = "program 1\naxes 0 0\ntensor float32 2\ninput 0 a0 a1\n{} 0 0\noutput 1 0 1\n"


def different(*ops: str) -> Region:
    """A kernel for each op."""
    floats = TensorType("float32", (4, 8))
    kernels = (Kernel(from_text(SCALED.format(op)), (0,), (1 + i,), (op,)) for i, op in enumerate(ops))
    return Region(1, (), (floats,) * (1 + len(ops)), tuple(kernels), (1,))


def test_kernels_are_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """None returns before all three are being compiled."""
    monkeypatch.setattr(programs, "usable_cores", lambda: 3)
    together = threading.Barrier(3, timeout=60)

    def compile_source(source: str, *_: object, **__: object) -> bytes:
        together.wait()
        return source.encode()

    region = different("add", "multiply", "subtract")
    found = build(region, 90, by_model(132), compile_source=compile_source)
    alone = build(region, 90, by_model(132), compile_source=lambda source, *_, **__: source.encode())
    assert found == alone, "in the region's order"


def test_one_of_several_that_cannot_be_compiled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "usable_cores", lambda: 2)

    def taken(source: str, *_: object, **__: object) -> bytes:
        return source.encode()

    (wrong,) = build(different("subtract"), 90, by_model(132), compile_source=taken)

    def compile_source(source: str, *_: object, **__: object) -> bytes:
        if source.encode() == wrong.image.code:
            raise KernelError("expected a ';'")
        return source.encode()

    with pytest.raises(KernelError, match=r"^a kernel of subtract: expected a ';'"):
        build(different("add", "multiply", "subtract", "maximum"), 90, by_model(132), compile_source=compile_source)


def test_several_are_timed_one_at_a_time(
    device: DeviceContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "usable_cores", lambda: 3)
    running: list[object] = []
    most: list[int] = []

    def timed(enqueue: Any) -> float:
        running.append(enqueue)
        most.append(len(running))
        enqueue()
        time.sleep(0.05)
        running.remove(enqueue)
        return 1.0

    monkeypatch.setattr(device, "time", timed)
    region = different("add", "multiply", "subtract")
    found = build(region, 90, by_tuner(device, Cache(tmp_path), 3), compile_source=device.compile_source)
    assert len({program.image.digest for program in found}) == 3
    assert len(most) >= 6
    assert max(most) == 1


SIDE = 46_400  # whose square is more than 2^31


def test_more_positions_than_32_bits_count(device: DeviceContext) -> None:
    """Neither tensor is large, nor the result: what is reduced is."""
    text = f"program 1\naxes {SIDE} {SIDE}\ntensor float32 1\ntensor float32 1\ninput 0 a0\ninput 1 a1\nmultiply 0 1\n"
    text += "reduce max 2 1\noutput 3 0\n"
    types = tuple(TensorType("float32", (SIDE,)) for _ in range(3))
    region = Region(2, (), types, (Kernel(from_text(text), (0, 1), (2,)),), (2,))
    for choose in (by_model(132), by_model(1)):
        ((kernel, _),) = kernels(region, choose)
        assert "using Index = long long" in kernel.source.text
    large = TensorType("float32", (SIDE, SIDE))
    region = Region(1, (), (large, large), (Kernel(from_text(DOUBLED), (0,), (1,)),), (1,))
    (program,) = build(region, 90, by_model(132), compile_source=device.compile_source)
    assert dict(program.description)["wide"] == 1
    (program,) = build(doubled(1 << 20), 90, by_model(132), compile_source=device.compile_source)
    assert dict(program.description)["wide"] == 0


def shared_cache(folder: str, barrier: Any) -> bytes:
    """The cache of a process: a region's code, compiled by what takes its time, in a cache that others use at once."""

    def compile_source(source: str, *_: object) -> bytes:
        time.sleep(0.05)
        return source.encode() * 3

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "compiler_version", lambda: "12.9")
        barrier.wait()
        made = build(doubled(4, 8, None), 90, by_model(132), Cache(Path(folder)), compile_source)
    return b"".join(program.image.code for program in made)


def test_eight_processes_share_a_cache(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    with spawn.Manager() as manager, ProcessPoolExecutor(8, spawn) as pool:
        barrier = manager.Barrier(8)
        found = {pool.submit(shared_cache, str(tmp_path), barrier) for _ in range(8)}
        codes = {each.result(timeout=120) for each in found}
    assert len(codes) == 1
    kept = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(kept) == 1, "one source, whatever the number of rows, and nothing that was still being written"


@pytest.fixture(name="compiled")
def fixture_compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What was compiled: source and architecture."""
    monkeypatch.setattr(nvrtc, "compiler_version", lambda: "12.9")
    return []


def compiler_of(compiled: list[tuple[str, int]]) -> Any:
    def compile_source(source: str, arch: int, *_: object) -> bytes:
        compiled.append((source, arch))
        return f"code for {arch}".encode()

    return compile_source


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "folder"])
def test_a_damaged_cache_is_compiled_again(damage: str, tmp_path: Path, compiled: list[tuple[str, int]]) -> None:
    region, cache = doubled(4), Cache(tmp_path)
    made = build(region, 90, by_model(132), cache, compiler_of(compiled))
    (file,) = (each for each in tmp_path.rglob("*") if each.is_file())
    data = file.read_bytes()
    if damage == "folder":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes({"cut": data[:-1], "changed": data[:-1] + b"?", "empty": b""}[damage])
    assert build(region, 90, by_model(132), cache, compiler_of(compiled)) == made
    assert len(compiled) == 2
    assert build(region, 90, by_model(132), cache, compiler_of(compiled)) == made
    assert len(compiled) == 2, "what was damaged is replaced"


def test_a_cache_that_cannot_be_written(tmp_path: Path, compiled: list[tuple[str, int]]) -> None:
    (tmp_path / "file").write_text("no folder can be made here")
    cache = Cache(tmp_path / "file" / "kernels")
    for times in (1, 2):
        (program,) = build(doubled(4), 90, by_model(132), cache, compiler_of(compiled))
        assert program.image.code == b"code for 90"
        assert len(compiled) == times


def test_a_cache_of_another_gpu(tmp_path: Path, compiled: list[tuple[str, int]]) -> None:
    """Code is another one for another architecture; a choice, for another name."""
    cache = Cache(tmp_path)
    for arch in (90, 80, 90, 80):
        (program,) = build(doubled(4), arch, by_model(132), cache, compiler_of(compiled))
        assert program.image.code == f"code for {arch}".encode()
        assert program.image.arch == arch
    assert [arch for _, arch in compiled] == [90, 80]


def test_nvrtc_compiles_a_region_once(tmp_path: Path) -> None:
    try:
        nvrtc.compiler_version()
    except KernelError as error:
        pytest.skip(str(error))

    def never(*_: object, **__: object) -> NoReturn:
        raise AssertionError("compiled again")

    region, cache = softmax_step(product, None), Cache(tmp_path)
    made = build(region, 90, by_model(132), cache)
    assert build(region, 90, by_model(132), cache, never) == made
    assert all(program.image.code.startswith(b"\x7fELF") for program in made)
